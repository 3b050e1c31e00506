"""What is measured: the contenders, the mixes of a batch, the modes of generation. A new one is a new row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn

from hf_multilora import MultiLoRAModel

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOLERANCE = 1e-3  # largest difference of two logits in float32 that still count as the same answer


@dataclass(frozen=True)
class Mix:
    """What the rows of a batch get: row i has adapter i modulo `distinct`; 0: every row has the base."""

    name: str
    distinct: int

    def rows(self, adapters: Sequence[str], rows: int) -> list[str | None]:
        if self.distinct > min(rows, len(adapters)):
            raise ValueError(
                f"a mix of {self.distinct} distinct adapters must have as many rows and adapters, got {rows} rows and "
                f"{len(adapters)} adapters; raise --rows or lower --adapters"
            )
        return [adapters[i % self.distinct] if self.distinct else None for i in range(rows)]


@dataclass(frozen=True)
class Contender:
    """A model to be timed.

    build: (own copy of the base, {adapter name: folder}) -> the model with all adapters registered.
    call: names of the rows (None: the base) -> the arguments that say so to `forward` and `generate`.
    base, mixed: which mixes it is timed with: the one without adapters, those with.
    """

    name: str
    build: Callable[[nn.Module, Mapping[str, Path]], Any]
    call: Callable[[list[str | None]], dict[str, Any]]
    base: bool
    mixed: bool


def _ours(base: nn.Module, folders: Mapping[str, Path]) -> Any:
    return MultiLoRAModel.from_pretrained(base, {n: str(f) for n, f in folders.items()}, max_loras=max(1, len(folders)))


def _peft(base: nn.Module, folders: Mapping[str, Path]) -> Any:
    (first, folder), *others = folders.items()
    model = PeftModel.from_pretrained(base, folder, adapter_name=first)  # type: ignore[arg-type]
    for name, folder in others:
        model.load_adapter(folder, adapter_name=name)
    return model.eval()


BARE, OURS, PEFT = "bare", "hf_multilora", "peft"
CONTENDERS = (
    Contender(BARE, lambda base, folders: base, lambda names: {}, base=True, mixed=False),
    Contender(OURS, _ours, lambda names: {"adapter_names": names}, base=True, mixed=True),
    Contender(PEFT, _peft, lambda names: {"adapter_names": [n or "__base__" for n in names]}, base=False, mixed=True),
)

# name -> what `generate` gets besides the prompts
MODES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


@dataclass(frozen=True)
class Cell:
    """One line of the table: a contender with a mix."""

    contender: Contender
    mix: Mix

    @property
    def name(self) -> str:
        return self.contender.name if self.contender.name == BARE else f"{self.contender.name}, {self.mix.name}"


def cells(mixes: Sequence[Mix]) -> list[Cell]:
    found = [Cell(c, Mix("all base", 0)) for c in CONTENDERS if c.base]
    return found + [Cell(c, mix) for mix in mixes for c in CONTENDERS if c.mixed]


# -- on a GPU: python -m tests.benchmarks.gpu ----------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """One batch: `rows` prompts of `tokens`, row i with adapter i modulo `distinct` (0: the base), max_loras `slots`.

    phase: "decode" (one token per row after the prompt) or "prefill" (the prompts themselves).
    names: what the rows get instead.
    """

    phase: str
    rows: int
    tokens: int
    distinct: int
    slots: int
    names: tuple[str | None, ...] | None = None

    @property
    def shape(self) -> str:
        """What the bare model is timed with."""
        return f"{self.phase} {self.rows} x {self.tokens}"

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.distinct} adapter{'' if self.distinct == 1 else 's'} in {self.slots} slots"

    def mix(self) -> list[str | None]:
        if self.names is not None:
            return list(self.names)
        return Mix("", self.distinct).rows([adapter_name(i) for i in range(self.distinct)], self.rows)


def adapter_name(index: int) -> str:
    return f"adapter-{index}"


def _works(slots: int, *rows: tuple[str, int, int, int]) -> tuple[Work, ...]:
    return tuple(Work(*row, slots) for row in rows)


# Cells in the order in which they run: adapters stay in their slots, so cells with few adapters come before those with
# more, except the last one, which shows few adapters in a batch while all slots are taken.
PLANS = {
    "full": (
        *_works(
            8, ("decode", 8, 128, 0), ("prefill", 8, 256, 0), ("decode", 1, 128, 1), ("prefill", 8, 256, 1),
            ("prefill", 8, 1024, 1), ("decode", 8, 128, 8), ("decode", 64, 128, 8), ("prefill", 8, 256, 8),
            ("prefill", 8, 1024, 8),
        ),
        *_works(64, ("decode", 64, 128, 64), ("prefill", 64, 128, 64), ("decode", 8, 128, 8)),
    ),
    "small": (
        *_works(2, ("decode", 2, 5, 0), ("decode", 1, 5, 1), ("prefill", 2, 7, 1), ("decode", 4, 5, 2)),
        *_works(4, ("decode", 4, 5, 4), ("prefill", 4, 7, 4), ("decode", 2, 5, 2)),
    ),
}  # fmt: skip
