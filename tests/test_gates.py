"""Gated MLPs as read from the source: what is found runs by the formula, and one broken rule is enough for None."""

from __future__ import annotations

import copy
import functools
import linecache
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from hf_multilora.gates import Gate, activation_of, gate_of
from hf_multilora.layers.base import AdaptedLayer, mix

from .architecture_table import ARCHITECTURES

FORMULAS: dict[str | None, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
}
GATE = Gate("gate", "up", "act", "down")


class Parts(nn.Module):
    """What the bodies below are written with."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.other = (nn.Linear(4, 6) for _ in range(3))
        self.down, self.pair = nn.Linear(6, 4), nn.Linear(4, 12)
        self.act, self.drop, self.norm = nn.SiLU(), nn.Dropout(0.5), nn.LayerNorm(6)
        self.fn, self.fast, self.limit = F.silu, True, 7.0
        self.mlps = nn.ModuleList([self.gate])

    def cast(self, x: Tensor) -> Tensor:
        return x.half().float()


class Gated(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def fused(module: nn.Module, gate: Gate, x: Tensor, activation: str | None = None) -> Tensor:
    """The formula, with the activation that was found (or another)."""
    act = FORMULAS[activation or activation_of(getattr(module, gate.act))]
    return module.get_submodule(gate.down)(act(module.get_submodule(gate.gate)(x)) * module.get_submodule(gate.up)(x))


def differ(a: Tensor, b: Tensor) -> bool:
    """By more than fp32 rounding."""
    return bool((a - b).abs().max() > 1e-5 * b.abs().max())


def check(module: nn.Module, found: Gate | None) -> None:
    """The formula gives what the module gives; with gate and up swapped, or another activation, it does not."""
    assert found is not None
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter)
    x = torch.randn(3, 2, module.get_submodule(found.gate).in_features)  # type: ignore[arg-type]
    with torch.no_grad():
        expected = module(x)
        assert not differ(fused(module, found, x), expected)
        assert differ(fused(module, replace(found, gate=found.up, up=found.gate), x), expected)
        others = FORMULAS.keys() - {activation_of(getattr(module, found.act))}
        assert others and all(differ(fused(module, found, x, other), expected) for other in others)


def written(text: str, path: Path) -> Any:
    """A class whose `forward` is written so, in a file of its own."""
    path.write_text(text)
    linecache.checkcache(str(path))
    space: dict[str, Any] = {"torch": torch, "F": F, "Tensor": Tensor}
    exec(compile(text, str(path), "exec"), space)
    return type("Written", (Parts,), {"forward": space["forward"]})


def forward(body: str, head: str = "def forward(self, x):") -> str:
    return head + "".join(f"\n    {line}" for line in body.split("\n")) + "\n"


LINE = "return self.down(self.act(self.gate(x)) * self.up(x))"
FOUND: dict[str, str] = {
    "one line": forward(LINE),
    "factors": forward("return self.down(self.up(x) * self.act(self.gate(x)))"),
    "named result": forward("down = self.down(self.act(self.gate(x)) * self.up(x))\nreturn down"),
    "named parts": forward("g = self.act(self.gate(x))\nu = self.up(x)\nd = self.down(g * u)\nreturn d"),
    "each named": forward("u = self.up(x)\ng = self.gate(x)\na = self.act(g)\np = u * a\nd = self.down(p)\nreturn d"),
    "annotated": forward("g: Tensor = self.gate(x)\nreturn self.down(self.up(x) * self.act(g))"),
    "docstring": forward(f'"""What\nit does"""\n# and why\n{LINE}'),
    "other names": forward(LINE.replace("self", "me").replace("(x", "(hidden"), "def forward(me, hidden: Tensor, /):"),
    "function": forward("return self.down(self.fn(self.gate(x)) * self.up(x))"),
}
NOT_FOUND: dict[str, str] = {
    "dropout": forward("return self.down(self.drop(self.act(self.gate(x)) * self.up(x)))"),
    "clamp": forward("u = self.up(x).clamp(max=self.limit)\nreturn self.down(self.act(self.gate(x)) * u)"),
    "cast": forward("return self.down((self.act(self.gate(x)) * self.up(x)).to(x.dtype))"),
    "scale": forward("return self.down(self.act(self.gate(x)) * self.up(x) * 2)"),
    "no down": forward("return self.act(self.gate(x)) * self.up(x)"),
    "of a list": forward("return self.down(self.act(self.mlps[0](x)) * self.up(x))"),
    "chunk": forward("g, u = self.pair(x).chunk(2, dim=-1)\nreturn self.down(self.act(g) * u)"),
    "branch": forward(f"if self.fast:\n    {LINE}\nreturn x"),
    "name used twice": forward("g = self.gate(x)\nreturn self.down(self.act(g) * g)"),
    "name bound twice": forward("g = self.gate(x)\ng = self.act(g)\nreturn self.down(g * self.up(x))"),
    "input bound": forward("g = self.gate(x)\nx = self.up(x)\nreturn self.down(self.act(g) * x)"),
    "self bound": forward(f"self = self.mlps\n{LINE}"),
    "walrus": forward("return self.down(self.act(g := self.gate(x)) * self.up(x))"),
    "unused call": forward(f"o = self.other(x)\n{LINE}"),
    "sum": forward("return self.down(self.act(self.gate(x)) + self.up(x))"),
    "two targets": forward("g = h = self.gate(x)\nreturn self.down(self.act(g) * self.up(x))"),
    "in place": forward("g = self.act(self.gate(x))\ng *= self.up(x)\nreturn self.down(g)"),
    "attribute set": forward(f"self.seen = x\n{LINE}"),
    "only a docstring": forward('"""None."""'),
    "two returned": forward("return self.down(self.act(self.gate(x)) * self.up(x)), x"),
    "keyword": forward("return self.down(self.act(self.gate(input=x)) * self.up(x))"),
    "further argument": forward("return self.down(self.act(self.gate(x), True) * self.up(x))"),
    "no grad": forward(f"with torch.no_grad():\n    {LINE}"),
    **{f"({given})": forward(LINE, f"def forward({given}):") for given in (
        "self", "self, x, y", "self, x, y=None", "self, x=None", "self, *, x", "self, x, *, y=None", "self, *x",
        "self, x, *args", "self, x, **kwargs")},
    "decorated": forward(LINE, "@torch.no_grad()\ndef forward(self, x):"),
    "async": forward(LINE, "async def forward(self, x):"),
    "lambda": "forward = lambda self, x: self.down(self.act(self.gate(x)) * self.up(x))\n",
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str, tmp_path: Path) -> None:
    module = written(FOUND[name], tmp_path / "forward.py")()
    found = gate_of(module)
    assert found == (replace(GATE, act="fn") if name == "function" else GATE)
    check(module, found)


@pytest.mark.parametrize("name", NOT_FOUND)
def test_not_found(name: str, tmp_path: Path) -> None:
    assert gate_of(written(NOT_FOUND[name], tmp_path / "forward.py")()) is None


def test_a_wrong_formula_would_be_seen() -> None:
    """The negative control of `check`."""
    for broken in (None, replace(GATE, up="other"), replace(GATE, gate="up", up="gate")):
        with pytest.raises(AssertionError):
            check(Gated(), broken)
    check(Gated(), GATE)


class Mixin(AdaptedLayer):
    """As ours: it adds around the class's own forward."""


def heir(**body: Any) -> Any:
    return type("Heir", (Gated,), body)


def renamed(module: nn.Module, **values: Any) -> None:
    for name, value in values.items():
        module.__delattr__(name)
        module.__setattr__(name, value)


MODULES: dict[str, tuple[Callable[[Any], object], Gate | None]] = {
    "as it is": (lambda m: m, GATE),
    "linears with our mixins": (lambda m: setattr(m.up, "__class__", mix((Mixin,), nn.Linear)), GATE),
    "a class that follows its subclasses": (lambda m: setattr(m, "__class__", mix((Mixin,), Gated)), None),
    "activation of unknown kind": (lambda m: renamed(m, act=nn.Tanh()), GATE),
    "function": (lambda m: renamed(m, act=F.relu), GATE),
    "own forward": (lambda m: setattr(m, "forward", m.forward), None),
    "forward of the subclass": (lambda m: setattr(m, "__class__", heir(forward=lambda s, x: s.up(x))), None),
    "static forward": (lambda m: setattr(m, "__class__", heir(forward=staticmethod(Gated.forward))), None),
    "partial": (lambda m: setattr(m, "__class__", heir(forward=functools.partialmethod(Gated.forward))), None),
    "wrapped": (lambda m: setattr(m, "__class__", heir(
        forward=functools.wraps(Gated.forward)(lambda self, x: 2 * Gated.forward(self, x)))), None),
    "property": (lambda m: setattr(m, "__class__", heir(act=property(lambda self: F.relu))), None),
    "attribute of the class": (lambda m: setattr(m, "__class__", heir(up=None)), None),
    "getattr": (lambda m: setattr(m, "__class__", heir(__getattr__=lambda s, n: nn.Module.__getattr__(s, n))), None),
    "getattribute": (lambda m: setattr(m, "__class__", heir(
        __getattribute__=lambda s, n: nn.Module.__getattribute__(s, n))), None),
    "shadowed": (lambda m: m.__dict__.update(gate=nn.Linear(4, 6)), None),
    "no linear": (lambda m: renamed(m, gate=nn.Conv1d(4, 6, 1)), None),
    "no module": (lambda m: renamed(m, down=F.silu), None),
    "absent": (lambda m: setattr(m, "gate", None), None),
    "gate is up": (lambda m: setattr(m, "up", m.gate), None),
    "act is up": (lambda m: setattr(m, "act", m.up), None),
    "one column": (lambda m: setattr(m, "gate", nn.Linear(4, 1)), None),
    "other input": (lambda m: setattr(m, "gate", nn.Linear(5, 6)), None),
    "method": (lambda m: renamed(m, act=m.cast), None),
    "no activation": (lambda m: setattr(m, "act", None), None),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_the_module_at_hand_counts(name: str) -> None:
    module = Gated()
    change, found = MODULES[name]
    change(module)
    assert gate_of(module) == found
    assert gate_of(Gated()) == GATE


def test_copies_and_other_classes() -> None:
    assert gate_of(copy.deepcopy(Gated())) == gate_of(pickle.loads(pickle.dumps(Gated()))) == GATE
    assert all(gate_of(module) is None for module in (Parts(), nn.Module(), nn.Linear(2, 2), nn.ModuleList()))


def test_source_that_does_not_tell(tmp_path: Path) -> None:
    """No source, and one that changed since it was imported: what runs is not what is read."""
    text = FOUND["one line"]
    changes = {
        "same": (text, GATE),
        "moved": (text.replace("    return", "    # gate\n    return"), GATE),
        "swapped": (text.replace("gate", "_").replace("up", "gate").replace("_", "up"), None),
        "one argument more": (text.replace("self, x", "self, x, y"), None),
        "cut": ("def forward(self, x):\n    return (self.down(\n", None),
        "unmatched": ("def forward(self, x):\n    return )\n", None),
        "string": ('def forward(self, x):\n    """\n', None),
        "zero byte": (text.replace("gate", "gate\0"), None),
        "empty": ("", None),
    }
    for name, (after, found) in changes.items():
        path = tmp_path / f"{name}.py"
        made = written(text, path)
        path.write_text(after)
        assert gate_of(made()) == found, name
    path.unlink()
    space: dict[str, Any] = {}
    exec(text, space)
    assert gate_of(heir(forward=space["forward"])()) is None


ACTIVATIONS: dict[str, tuple[Any, str | None]] = {
    **{name: (ACT2FN[name], "silu") for name in ("silu", "swish")},
    "in place": (nn.SiLU(inplace=True), "silu"),
    "function": (F.silu, "silu"),
    "gelu_pytorch_tanh": (ACT2FN["gelu_pytorch_tanh"], "gelu_tanh"),
    **{name: (ACT2FN[name], None) for name in ("gelu", "gelu_new", "gelu_fast", "gelu_python_tanh", "relu", "xielu")},
    **{str(act): (act, None) for act in (F.gelu, nn.GELU(approximate="tanh"), nn.SiLU, [], None)},
    "subclass": (type("MySiLU", (nn.SiLU,), {})(), None),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    act, found = ACTIVATIONS[name]
    assert activation_of(act) == found
    if found:
        x = torch.linspace(-9, 9, 1001)
        expected = act(x.clone())
        assert not differ(FORMULAS[found](x), expected)
        assert all(differ(FORMULAS[other](x), expected) for other in FORMULAS.keys() - {found})


def test_variants_of_gelu_are_other_functions_in_bfloat16() -> None:
    x = torch.linspace(-4, -2, 1001).bfloat16()
    exact = F.gelu(x.double(), approximate="tanh")
    errors = {name: ((ACT2FN[name](x) - exact) / exact).abs().max() for name in ("gelu_pytorch_tanh", "gelu_new")}
    assert errors["gelu_pytorch_tanh"] < 0.01 and errors["gelu_new"] > 0.5


# architecture -> activations of its gated MLPs by their names in the layers; experts in one tensor are no linears
MODELS: dict[str, dict[str, str]] = {
    **{name: {"mlp": "silu"} for name in ("llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "cohere")},
    **{name: {"mlp": "gelu_tanh"} for name in ("gemma2", "gemma3")},
    "qwen2_moe": {"mlp.shared_expert": "silu"},
    "qwen3_next": {"mlp.shared_expert": "silu"},
    "deepseek_v3": {"mlp": "silu", "mlp.shared_experts": "silu"},
    "glm4_moe": {"mlp": "silu", "mlp.shared_experts": "silu"},
    "llama4": {"feed_forward": "silu", "feed_forward.shared_expert": "silu"},
    **{name: {} for name in ("phi3", "glm4", "starcoder2", "falcon", "falcon_h1", "lfm2", "mixtral", "gpt_oss")},
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    if ARCHITECTURES[name].missing:
        pytest.skip(f"the installed Transformers has no {name}")
    found = {}
    for path, module in ARCHITECTURES[name].build().named_modules():
        if gate := gate_of(module):
            check(module, gate)
            found[path.split(".", 3)[3]] = activation_of(getattr(module, gate.act))
    assert found == MODELS[name]
