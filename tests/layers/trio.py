"""A model of two parents with three linears each that one input feeds, adapters for them, and what each must answer.

The truth is plain: W x + b + 2 B A x in float64, with A and B as their files have them, row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from hf_multilora.kernels import triton_laid
from hf_multilora.layers import merged as merged_file
from hf_multilora.layers import slots as slots_file
from hf_multilora.layers.merged import Merged
from hf_multilora.layers.together import Step
from tests.kernels.suite import INTERPRETED
from tests.tiny import VOCAB, Family, Names, error

K, WIDTHS = 20, (24, 9, 5)  # unequal, as of grouped queries, and no multiples of a tile
LINEARS = ("q_proj", "k_proj", "v_proj")
# how a call is computed: the backend, and constants that choose the path
WAYS: Mapping[str, tuple[str, dict[str, int]]] = {
    "dense": ("torch", {}),
    "alone": ("torch", {"DENSE_TOKENS_CPU": 0}),
    "rows": ("triton", {}),
    "tiles": ("triton", {"FEW": 0}),
    "grouped": ("triton", {"DENSE_WORK": 0}),
}
ALL_WAYS = [pytest.param(way, marks=[INTERPRETED] * (how == "triton")) for way, (how, _) in WAYS.items()]
MERGING = [param for param in ALL_WAYS if param.values[0] != "alone"]
FEW_WAYS = [way for way in ALL_WAYS if way.values[0] in ("dense", "rows")]
DENSE = FEW_WAYS[:1]
ADAPTERS: dict[str, dict[str, Any]] = {  # uneven ranks per sibling and adapter
    "a": {"r": {"q_proj": 3, "k_proj": 1, "v_proj": 5}, "targets": LINEARS},
    "b": {"r": 4, "targets": ("q_proj", "v_proj")},
    "k": {"r": 2, "targets": ("k_proj",)},
    "wide": {"r": {"q_proj": 2, "k_proj": 19, "v_proj": 3}, "targets": LINEARS},
}
NAMES: Names = ["a", None, "b", "k"]


class Parent(nn.Module):
    def __init__(self, inputs: Sequence[int], biases: Sequence[bool], widths: Sequence[int]) -> None:
        super().__init__()
        for name, k, n, bias in zip(LINEARS, inputs, widths, biases, strict=True):
            self.add_module(name, nn.Linear(k, n, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        return torch.cat((q, k, v), -1)


class Narrow(Parent):
    """Its keys get less of the input, and are computed as if they did not."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)
        v = self.v_proj(x)
        if x.shape[-1] == self.k_proj.in_features:
            v = v + self.k_proj(x)[..., :5]
        return torch.cat((q, self.k_proj(x[..., : self.k_proj.in_features]), v), -1)


class Model(tf.PreTrainedModel):
    config_class = tf.LlamaConfig

    def __init__(
        self, config: Any, parent: Any = Parent, inputs: Any = (K,) * 3, biases: Any = (True,) * 3, widths: Any = WIDTHS
    ) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(VOCAB, inputs[0])
        self.first, self.second = parent(inputs, biases, widths), parent(inputs, biases, widths)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def _init_weights(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data.normal_(std=0.3)

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None) -> CausalLMOutput:
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        return CausalLMOutput(logits=torch.cat((self.first(x), self.second(x)), -1))


def bare(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = tf.LlamaConfig(vocab_size=VOCAB, hidden_size=K, num_attention_heads=2)
    return Model(config, **settings).eval().requires_grad_(False)


def family(folder: Path, adapters: Mapping[str, Mapping[str, Any]] = ADAPTERS, **settings: Any) -> Family:
    return Family(bare(**settings), folder, adapters)


class Trio:
    """A MultiLoRAModel of the family, and what its parents' linears must answer."""

    def __init__(self, family: Family, way: str, *names: str, model: Any = None, **settings: Any) -> None:
        self.way, self.family = way, family
        self.model = family.model(*names, backend=WAYS[way][0], **settings) if model is None else model
        self.factors = {name: load_file(path / "adapter_model.safetensors") for name, path in family.paths.items()}
        self.factors = {name: self.factors[name] for name in names or self.factors}

    @property
    def routing(self) -> Any:
        return self.model._multilora.routing

    def module(self, child: str, parent: str = "first") -> Any:
        return self.model.get_submodule(parent).get_submodule(f"{child}_proj")

    def merged(self, child: str, parent: str = "first") -> Any:
        return self.module(child, parent)._lora.merged

    def together(self, parent: str = "first") -> list[str]:
        """The linears that lie in one buffer, all groups: "qkv" or "qv", "k"."""
        groups: dict[int, str] = {}
        for child in "qkv":
            slots = self.module(child, parent).__dict__.get("_lora")
            if slots is not None and slots.merged is not None:
                groups[id(slots.merged)] = groups.get(id(slots.merged), "") + child
        return sorted(groups.values())

    def open(self, names: Names = NAMES) -> Any:
        return self.model.adapters(list(names))

    @torch.no_grad()
    def want(self, child: str, x: Tensor, names: Names = NAMES, parent: str = "first") -> Tensor:
        """float64, of the weights as they are."""
        module = self.module(child, parent)
        out = nn.functional.linear(x.double(), module.weight.double(), None)
        if module.bias is not None:
            out = out + module.bias.double()
        for row, name in enumerate(names):
            key = f"base_model.model.{parent}.{child}_proj.lora_"
            if name is not None and f"{key}A.weight" in self.factors[name]:
                a, b = (self.factors[name][f"{key}{half}.weight"].to(x.device).double() for half in "AB")
                out[row] += 2 * x[row].double() @ a.T @ b.T
        return out

    def check(
        self, got: Tensor, child: str, x: Tensor, names: Names = NAMES, parent: str = "first", tolerance: float = 1e-5
    ) -> None:
        """Each row as if it were alone; rows with each other's adapters would not pass."""
        got = got.detach()
        want, turned = self.want(child, x, names, parent), self.want(child, x, [*names[1:], *names[:1]], parent)
        assert got.shape == want.shape and (not want.numel() or error(got, want) < tolerance), child
        trained = {name for name in names if name and f"base_model.model.{parent}.{child}_proj" in self.keys(name)}
        if trained and len(set(names)) > 1 and want.numel():
            assert error(got, turned) > 20 * tolerance, "another order passes: the check says nothing"

    def keys(self, name: str) -> set[str]:
        return {key.rsplit(".lora_", 1)[0] for key in self.factors[name]}

    def lay(self, names: Names = NAMES) -> None:
        """A request, so that weights are laid."""
        with self.open(names):
            pass

    def call(self, x: Tensor, order: str = "qkv", names: Names = NAMES, parent: str = "first") -> dict[str, Tensor]:
        """The outputs in a request of their own, checked; nothing is held after it."""
        with self.open(names):
            outs = self.ask(x, order, names, parent)
        assert self.routing.shared is None
        return outs

    def ask(self, x: Tensor, order: str = "qkv", names: Names = NAMES, parent: str = "first") -> dict[str, Tensor]:
        """The same inside a request."""
        outs = {child: self.module(child, parent)(x) for child in order}
        for child, out in outs.items():
            self.check(out, child, x, names, parent)
        return outs

    def whole(self, inputs: Tensor, names: Names = NAMES) -> None:
        """The model's own call, checked."""
        got = self.model(input_ids=inputs, adapter_names=list(names)).logits
        x = self.model.embed(inputs).detach()
        parts = [(child, parent) for parent in ("first", "second") for child in "qkv"]
        for out, (child, parent) in zip(got.split(WIDTHS * 2, -1), parts, strict=True):
            self.check(out, child, x, names, parent)
        assert self.routing.shared is None

    @contextmanager
    def counted(self) -> Iterator[list[Merged]]:
        """Who computed several linears together, each time."""
        runs, run, again = list[Merged](), merged_file.run, Step.again
        sites = self.model._multilora.sites

        def count(merged: Merged, *args: Any) -> Any:
            found = run(merged, *args)
            if found is not None:
                runs.append(merged)
            return found

        def count_again(step: Step, x: Tensor) -> Any:
            found = again(step, x)
            if found is not None:
                runs.append(next(site.merged for _, site in sites.values() if site.merged and site.merged.step is step))
            return found

        with mock.patch.object(merged_file, "run", count), mock.patch.object(Step, "again", count_again):
            yield runs


def setting(monkeypatch: pytest.MonkeyPatch, way: str) -> str:
    """Set the constants of a way."""
    for name, value in WAYS[way][1].items():
        monkeypatch.setattr(triton_laid if name == "FEW" else slots_file, name, value)
    return way


def table(cases: Iterable[str], more: Iterable[str], ways: Sequence[Any] = FEW_WAYS[1:]) -> Any:
    """All cases with the torch backend; with `ways`, which the interpreter runs, these few."""
    few = [pytest.param(case, *way.values, marks=way.marks) for case in more for way in ways]
    return pytest.mark.parametrize(("name", "way"), [*((case, "dense") for case in cases), *few])


def copied(trio: Trio, model: Any) -> Trio:
    """The same for a copy of the model."""
    return Trio(trio.family, trio.way, *trio.factors, model=model)


def x_of(rows: int = 4, tokens: int = 2, k: int = K, seed: int = 1) -> Tensor:
    return torch.randn(rows, tokens, k, generator=torch.Generator().manual_seed(seed))
