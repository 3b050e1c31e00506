"""A tiny mixture-of-experts model, adapters of it in several layouts, and what each row must answer: merged by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hf_multilora import MultiLoRAModel
from tests.experts import MARGIN, MIXTURES, PAD, VOCAB, Margins, Mixture
from tests.experts_adapters import EACH, PACKED, PEFT, Adapter, describe, merge, write

Names = Sequence[str | None]
LENGTHS = (5, 8, 3, 6)  # tokens of the rows
NAMES: Names = ["whole", None, "other", "attention"]
SEEDS = 100
NO_POSITIONS = ("jamba", "nemotron_h")  # models without rotary embeddings
TOLERANCE = 1e-5  # of the largest logit
FAR = 1e-2  # what another adapter in a row must change at least


def adapters_of(name: str) -> dict[str, dict[str, Any]]:
    """The adapters that every architecture is served with: of different layouts, ranks and modules."""
    mixture = MIXTURES[name]
    other: dict[str, Any] = {"layout": PACKED, "shared": True}
    if mixture.old:
        other = {"layout": EACH}
    elif mixture.router == "mlp.router" and mixture.experts == "mlp.experts" and not mixture.others:
        other = {"layout": PEFT, "biases": True}
    return {
        "whole": {"layout": PEFT, "r": 3, "others": True},
        "other": {"r": 5, **other},
        "attention": {"layout": PEFT, "r": 2, "projections": ()},
    }


def require(name: str) -> Mixture:
    """The architecture of that name; skips the test where Transformers has none, or none in its experts interface."""
    mixture = MIXTURES[name]
    if mixture.missing:
        pytest.skip(f"Transformers {transformers.__version__} has no {mixture.model}")
    base = mixture.build(0)
    if not hasattr(base.get_submodule(mixture.paths(base, mixture.experts)[0]), "is_transposed"):
        pytest.skip(f"Transformers {transformers.__version__} has these experts outside its interface")
    return mixture


class Family:
    """A base whose routing is far from ties on `rows`, with adapters, and the truth of every row alone."""

    def __init__(
        self, mixture: Mixture, folder: Path, adapters: Mapping[str, Mapping[str, Any]], margin: float = MARGIN
    ) -> None:
        self.mixture, self.folder, self.margin = mixture, folder, margin
        made = torch.Generator().manual_seed(3)
        self.rows = [torch.randint(3, VOCAB - 3, (n,), generator=made) for n in LENGTHS]
        for seed in range(SEEDS):
            self.base = self.mixture.build(seed)
            self.adapters: dict[str, Adapter] = {}
            for i, (key, some) in enumerate(adapters.items()):
                self.adapters[key] = describe(self.mixture, self.base, **({"seed": i + 1} | dict(some)))
            self._alone: dict[str | None, Any] = {None: self.base}
            self._truth: dict[tuple[str | None, int], Tensor] = {}
            if self._far_from_ties():
                break
        else:
            raise AssertionError(f"{mixture.model}: routing near a tie with each of {SEEDS} seeds")
        for key, adapter in self.adapters.items():
            write(adapter, self.base, folder / key)

    def _far_from_ties(self) -> bool:
        with Margins() as margins:
            for key in (None, *self.adapters):
                for i in range(len(self.rows)):
                    self.row(key, i)
                    if margins.smallest < self.margin:
                        return False
        return True

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def alone(self, name: str | None) -> Any:
        """The base with this adapter merged."""
        if name not in self._alone:
            self._alone[name] = merge(self.base, self.adapters[name or ""])
        return self._alone[name]

    @torch.no_grad()
    def row(self, name: str | None, i: int) -> Tensor:
        """Logits [tokens, out] of row i alone."""
        if (name, i) not in self._truth:
            self._truth[name, i] = self.alone(name)(input_ids=self.rows[i][None].to(self.base.device)).logits[0]
        return self._truth[name, i]

    def truth(self, names: Names) -> list[Tensor]:
        return [self.row(name, i) for i, name in enumerate(names)]

    def model(self, *names: str, experts: str = "eager", **settings: Any) -> Any:
        """A MultiLoRAModel on a copy of the base, with these adapters (none: all)."""
        chosen = {name: self.path(name) for name in names or self.adapters}
        base = copy.deepcopy(self.base)
        base.set_experts_implementation(experts)
        return MultiLoRAModel.from_pretrained(base, chosen, **settings)

    def inputs(self, count: int | None = None) -> dict[str, Tensor]:
        """The rows in one batch, padded on the left."""
        rows = self.rows[:count]
        width = max(map(len, rows))
        ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
        return {"input_ids": ids, "attention_mask": mask}

    def generated(self, name: str | None, i: int, **settings: Any) -> Tensor:
        """New tokens [sequences, tokens] of row i alone."""
        row = self.rows[i][None].to(self.base.device)
        return self.alone(name).generate(input_ids=row, attention_mask=torch.ones_like(row), **settings)[
            :, row.shape[1] :
        ]


@torch.no_grad()
def logits(model: Any, inputs: Mapping[str, Tensor], names: Names | None = None) -> list[Tensor]:
    """Each row's own logits [tokens, out]: without those of padding."""
    mask = inputs["attention_mask"]
    given = dict(inputs)
    if model.config.model_type not in NO_POSITIONS:
        given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    named = {} if names is None else {"adapter_names": list(names)}
    device = "cpu" if model.device.type == "meta" else model.device  # offloaded
    out = model(**{key: value.to(device) for key, value in given.items()}, **named).logits
    return [row[own.bool().to(row.device)] for row, own in zip(out, mask, strict=True)]


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference, as a share of the largest value wanted."""
    assert got.shape == want.shape, (got.shape, want.shape)
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).abs().max() / want.abs().max())


def errors(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[float]:
    return [error(one, alone) for one, alone in zip(got, want, strict=True)]


def check(family: Family, model: Any, names: Names = NAMES, tolerance: float = TOLERANCE) -> list[Tensor]:
    """A mixed batch is each row alone; and with the names turned by one every row would be far from it."""
    got, want = logits(model, family.inputs(len(names)), names), family.truth(names)
    found = errors(got, want)
    assert max(found) < tolerance, dict(zip(map(str, names), found, strict=True))
    turned = [*names[1:], names[0]]
    others = errors(family.truth(turned), want)
    told = [far for far, one, other in zip(others, names, turned, strict=True) if one != other]
    assert min(told, default=1.0) > FAR, "another adapter would pass: the check says nothing"
    return got
