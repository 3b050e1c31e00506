"""Siblings as read from the source: each rule with a twin that differs in one line, and a sweep over architectures.

Every body also runs, and what was reported as siblings must have got one tensor at one version.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import pickle
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_multilora.layers.base import AdaptedLayer, mix
from hf_multilora.siblings import siblings_of

from .architecture_table import ARCHITECTURES

Groups = tuple[tuple[str, ...], ...]
QK: Groups = (("q", "k"),)
NONE: Groups = ()


class Children(nn.Module):
    """Linears q, k, v and w; `same` is w; `wide` takes further arguments; `act` works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.w = (nn.Linear(4, 4) for _ in range(4))
        self.same = self.w
        self.wide = Wide(4, 4)
        self.act, self.relu = nn.Sequential(nn.ReLU(inplace=True)), nn.Sequential(nn.ReLU())
        self.absent = None
        self.seen: list[Tensor] = []
        self.eval().requires_grad_(False)

    def helper(self, x: Tensor) -> Tensor:
        return x


class Wide(nn.Linear):
    def forward(self, input: Tensor, *more: Any) -> Tensor:
        return super().forward(input)


def written(body: str, path: Path) -> nn.Module:
    """A module whose forward(self, x, y, c) is this body, in a file of its own."""
    text = "def forward(self, x, y, c):\n" + "".join(f"    {line}\n" for line in body.split("\n"))
    path.write_text(text)
    linecache.checkcache(str(path))
    space: dict[str, Any] = {"torch": torch, "F": F, "Any": Any, "contextlib": contextlib}
    exec(compile(text, str(path), "exec"), space)
    made: Any = type("Written", (Children,), {"forward": space["forward"]})
    return made()


Record = tuple[str, Tensor, int]  # child, its input, the input's version


def recorded(model: nn.Module, run: Callable[[], object]) -> dict[nn.Module, list[Record]]:
    """What linears that are direct children got while it ran, by their parents."""
    found: dict[nn.Module, list[Record]] = defaultdict(list)
    handles = []
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):

                def note(_: Any, args: Any, parent: nn.Module = parent, name: str = name) -> None:
                    if args:
                        found[parent].append((name, args[0], args[0]._version))

                handles.append(child.register_forward_pre_hook(note))
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return found


def wrong(calls: list[Record], groups: Groups) -> list[tuple[str, ...]]:
    """Groups with members that ran but did not get the same: of members that also run elsewhere, at each call of the
    one that runs least."""
    found = []
    for group in groups:
        each = [[(id(x), version) for name, x, version in calls if name == child] for child in group]
        ran = [inputs for inputs in each if inputs]
        if any(not set(min(ran, key=len)) <= set(inputs) for inputs in ran):
            found.append(group)
    return found


# rule -> siblings, groups, the twin, its groups (none where left out)
RULES: dict[str, tuple[str, Groups, str] | tuple[str, Groups, str, Groups]] = {
    "assignment": ("q = self.q(x)\nk = self.k(x)", QK, "q = self.q(x)\nx = x + 1\nk = self.k(x)"),
    "value before target": ("x = self.q(x) + self.k(x)", QK, "x = self.q(x)\nk = self.k(x)"),
    "order of calls": ("k, q = self.k(x), self.q(x)", (("k", "q"),), "k, x = self.k(x), self.q(y)\nself.q(x)"),
    "nested": ("n = self.v(F.silu(self.q(x)) * self.k(x))", QK, "n = self.k(self.q(x))"),
    "two inputs": ("q, v, k, w = self.q(x), self.v(y), self.k(x), self.w(y)", (("q", "k"), ("v", "w")),
                   "q, v, k, w = self.q(x), self.v(y), self.k(x), self.w(x + 1)", QK),
    "annotated": ("n: Any = self.q(x)\nk = self.k(x)", QK, "x: Any = self.q(x)\nk = self.k(x)"),
    "augmented": ("n = 1\nq = self.q(x)\nk = self.k(x)\nn += 1", QK, "q = self.q(x)\nx += 1\nk = self.k(x)"),
    "augmented view": ("n = x[0]\nn += 1\nq = self.q(x)\nk = self.k(x)", QK,
                       "n = x[0]\nq = self.q(x)\nn += 1\nk = self.k(x)"),
    "walrus": ("n = self.q(x) + (z := y + 1) + self.k(x)", QK, "n = self.q(x) + (x := y + 1) + self.k(x)"),
    "walrus in a comprehension": ("q = self.q(x)\nn = [(z := i) for i in (y,)]\nk = self.k(x)", QK,
                                  "q = self.q(x)\nn = [(x := i) for i in (y,)]\nk = self.k(x)"),
    "dict": ("n = {0: self.q(x), 1: self.k(x)}", QK, "n = {0: self.q(x), str(x := y): self.k(x)}"),
    "delete": ("q = self.q(x)\ndel q\nk = self.k(x)", QK, "q = self.q(x)\ndel x\n[x] = [y]\nk = self.k(x)"),
    "swap": ("q = self.q(x)\ny, z = x, y\nk = self.k(x)", QK, "q = self.q(x)\ny, x = x, y\nk = self.k(x)"),
    "starred": ("q = self.q(x)\nz, *y = x, x\nk = self.k(x)", QK,
                "q = self.q(x)\nz, *x = x, y\nx = x[0]\nk = self.k(x)"),
    "method in place": ("q = self.q(x)\nn = x.relu()\nk = self.k(x)", QK,
                        "q = self.q(x)\nn = x.relu_()\nk = self.k(x)"),
    "data in place": ("q = self.q(x)\nn = x.data.mul(2)\nk = self.k(x)", QK,
                      "q = self.q(x)\nn = x.data.mul_(2)\nk = self.k(x)"),
    "item": ("q = self.q(x)\nn = x[..., 0]\nk = self.k(x)", QK, "q = self.q(x)\nx[..., 0] = 1\nk = self.k(x)"),
    "attribute": ("q = self.q(x)\nn = x.data\nk = self.k(x)", QK, "q = self.q(x)\nx.data = y\nk = self.k(x)"),
    "child replaced": ("q = self.q(x)\nn = self.w\nk = self.k(x)", QK, "q = self.q(x)\nself.k = self.w\nk = self.k(x)"),
    "out": ("q = self.q(x)\nn = torch.add(y, 1)\nk = self.k(x)", QK,
            "n = x.view(-1)\nq = self.q(x)\nz = torch.mul(y.view(-1), 2, out=n)\nk = self.k(x)"),
    "inplace": ("q = self.q(x)\nn = F.relu(x.abs())\nk = self.k(x)", QK,
                "q = self.q(x)\nn = F.relu(x.abs(), inplace=True)\nk = self.k(x)"),
    "handed over": ("q = self.q(x)\nn = torch.ones(x.shape)\nk = self.k(x)", QK,
                    "q = self.q(x)\nn = F.relu(x, True)\nk = self.k(x)"),
    "handed over in a list": ("q = self.q(x)\nn = list([y])\nk = self.k(x)", QK,
                              "q = self.q(x)\nn = list([x])\nk = self.k(x)"),
    "handed over in part": ("q = self.q(x)\nn = F.relu(y[0], True)\nk = self.k(x)", QK,
                            "q = self.q(x)\nn = F.relu(x[0], True)\nk = self.k(x)"),
    "result dropped": ("q = self.q(x)\nn = list.append(self.seen, y)\nk = self.k(x)", QK,
                       "q = self.q(x)\nself.seen.append(y)\nk = self.k(x)"),
    "method of the module": ("q = self.q(x)\nn = self.helper(y)\nk = self.k(x)", QK,
                             "q = self.q(x)\nn = self.helper(x)\nk = self.k(x)"),
    "child in place": ("q = self.q(x)\nn = self.relu(x)\nk = self.k(x)", (("q", "relu", "k"),),
                       "q = self.q(x)\nn = self.act(x)\nk = self.k(x)"),
    "further argument": ("q = self.q(x)\nn = self.wide(x, 1)\nk = self.k(x)", QK, "q = self.q(x)\nn = self.wide(x, 1)"),
    "keyword": ("n = self.q(x) + self.k(x)", QK, "n = self.q(x) + self.k(input=x)"),
    "plain name": ("n = self.q(x) + self.k(x)", QK, "n = self.q(x) + self.k(x.data)"),
    "direct child": ("n = self.q(x) + self.k(x)", QK, "n = self.q(x) + self.act[0](x) + self.k.forward(x)"),
    "absent child": ("n = self.q(x) + self.k(x) if self.absent is None else self.absent(x)", QK,
                     "n = self.q(x) if self.absent is None else self.absent(x)"),
    "twice": ("n = self.q(x) + self.q(x) + self.k(x)", QK, "n = self.q(x) + self.q(x)"),
    "one module, two names": ("n = self.q(x) + self.w(x) + self.same(x)", (("q", "w"),),
                              "n = self.w(x) + self.same(x)"),
    "no child in two groups": ("n = self.v(x) + self.q(x)\nx = y\nn = self.k(x) + self.w(x) + self.q(x)",
                               (("k", "w", "q"),), "n = self.q(x)\nx = y\nn = self.k(x)"),
    "same arm": ("if c:\n    n = self.q(x) + self.k(x)", QK, "if c:\n    n = self.q(x)\nelse:\n    n = self.k(x)"),
    "change in an arm": ("q = self.q(x)\nif c:\n    y = x\nk = self.k(x)", QK,
                         "q = self.q(x)\nif c:\n    x = y\nk = self.k(x)"),
    "in one arm": ("q = self.q(x)\nif c:\n    k = self.k(x)", QK,
                   "q = self.q(x)\nif c:\n    k = self.k(x)\nelse:\n    k = self.k(y)"),
    "in every place": ("n = self.q(x) + self.k(x)\nx = x.mul_(2)\nn = self.q(x) + self.k(x)", QK,
                       "n = self.q(x) + self.k(x)\nx = x.mul_(2)\nn = self.q(x)"),
    "in arms of two branches": ("if c:\n    q = self.q(x)\nk = self.k(x)", QK,
                                "if c:\n    q = self.q(x)\nif x is y:\n    k = self.k(x)"),
    "return in an arm's arm": ("if c:\n    q = self.q(x)\n    if y is x:\n        n = 1\nk = self.k(x)", QK,
                               "if c:\n    q = self.q(x)\n    if y is x:\n        return\nk = self.k(x)"),
    "return in an arm's loop": ("if c:\n    q = self.q(x)\n    for n in y:\n        n = 1\nk = self.k(x)", QK,
        "if c:\n    q = self.q(x)\n    for n in y:\n        if y is x:\n            return\nk = self.k(x)"),
    "of absent children": ("q = self.absent(x) if self.absent else self.q(x)\nk = self.k(x)", QK,
                           "q = self.absent(x) if self.absent else self.q(y)\nk = self.k(x)"),
    "conditional": ("n = self.q(x) + (self.k(x) if c else 0)", QK, "n = self.q(x) if c else self.k(x)"),
    "or": ("n = c or self.q(x) + self.k(x)", QK, "n = c and self.q(x)\nn = n if c else self.k(x)\nn = self.k(y)"),
    "returning arm": ("if c:\n    return y\nreturn self.q(x) + self.k(x)", QK,
                      "if c:\n    return self.q(x)\nreturn self.k(x)"),
    "after a loop": ("q = self.q(x)\nfor i in range(2):\n    n = i\nk = self.k(x)", QK,
                     "q = self.q(x)\nfor x in (y, y):\n    n = 1\nk = self.k(x)"),
    "in a loop": ("n = self.q(x) + self.k(x)", QK, "for i in range(2):\n    n = self.q(x) + self.k(x)"),
    "while": ("q = self.q(x)\nwhile c:\n    c = False\nk = self.k(x)", QK,
              "q = self.q(x)\nwhile c:\n    x, c = y, False\nk = self.k(x)"),
    "in a comprehension": ("n = [self.q(x), self.k(x)]", QK, "n = [self.q(x) + self.k(x) for i in range(2)]"),
    "with": ("with torch.no_grad():\n    n = self.q(x) + self.k(x)", QK,
             "with torch.autocast('cpu', torch.bfloat16):\n    q = self.q(x)\nk = self.k(x)"),
    "with as": ("q = self.q(x)\nwith contextlib.nullcontext(y) as n:\n    pass\nk = self.k(x)", QK,
                "q = self.q(x)\nwith contextlib.nullcontext(y) as x:\n    pass\nk = self.k(x)"),
    "try": ("try:\n    n = self.q(x) + self.k(x)\nfinally:\n    pass", QK,
            "try:\n    q = self.q(x)\nfinally:\n    k = self.k(x)"),
    "match": ("q = self.q(x)\nmatch c:\n    case n:\n        k = self.k(x)", QK,
              "q = self.q(x)\nmatch y:\n    case x:\n        k = self.k(x)"),
    "match arms": ("match c:\n    case True:\n        n = self.q(x) + self.k(x)", QK,
                   "match c:\n    case True:\n        q = self.q(x)\n    case _:\n        k = self.k(x)"),
    "lambda": ("f = lambda: x + 1\nq = self.q(x)\nn = f()\nk = self.k(x)", QK,
               "f = lambda: x.add_(1)\nq = self.q(x)\nn = f()\nk = self.k(x)"),
    "in a lambda": ("n = self.q(x) + self.k(x)", QK, "n = (lambda: self.q(x) + self.k(x))()"),
    "nested function": ("def f():\n    return y\nq = self.q(x)\nn = f()\nk = self.k(x)", QK,
                        "def f():\n    nonlocal x\n    x = y\nq = self.q(x)\nn = f()\nk = self.k(x)"),
    "named as a function": ("q = self.q(x)\ndef f(): ...\nk = self.k(x)", QK,
                            "q = self.q(x)\nclass x(torch.Tensor): ...\nx = torch.ones(4)\nk = self.k(x)"),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_and_its_twin(rule: str, tmp_path: Path) -> None:
    body, groups, twin, *others = RULES[rule]
    for text, expected in ((body, groups), (twin, others[0] if others else NONE)):
        module = written(text, tmp_path / f"{len(text)}.py")
        assert siblings_of(module) == expected, text
        for c in (True, False):
            calls = recorded(module, functools.partial(module, torch.randn(2, 4), torch.randn(2, 4), c))[module]
            assert not wrong(calls, siblings_of(module)), text


@pytest.mark.parametrize("text", ["n = yield", "global x2", "import math as x", "self = y"])
def test_what_may_happen_between_two_calls_is_not_known(text: str, tmp_path: Path) -> None:
    assert siblings_of(written(f"q = self.q(x)\nk = self.k(x)\nn = {text!r}", tmp_path / "plain.py")) == QK
    assert siblings_of(written(f"q = self.q(x)\n{text}\nk = self.k(x)", tmp_path / "other.py")) == NONE


def test_a_wrong_group_would_be_seen(tmp_path: Path) -> None:
    """The negative control of `wrong`: a view changed between two calls, a copy, and a member that ran alone."""
    x = torch.randn(2, 4)
    for change, is_wrong in (("n[0] = 1", True), ("x = x.clone()", True), ("n = n + 1", False)):
        module = written(f"n = x[0]\nq = self.q(x)\n{change}\nk = self.k(x)", tmp_path / f"{len(change)}.py")
        calls = recorded(module, functools.partial(module, x.clone(), x, True))[module]
        assert bool(wrong(calls, QK)) is is_wrong
        assert not wrong(calls, (("q", "v"),))


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def anonymous(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: function(self, *args)


class Pair(Children):
    @quietly
    @torch.no_grad()
    def forward(this, hidden: Tensor, /) -> Tensor:
        """A text of
        several lines."""
        text = """
one at the margin
"""
        assert text
        return this.q(hidden) * this.k(hidden)


class Hidden(Children):
    @anonymous
    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x)


class Heir(Pair): ...


class Overriding(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.v(x)


class Mixin(AdaptedLayer):
    """As ours: it adds around the class's own forward."""


def test_whose_forward_is_read() -> None:
    assert siblings_of(Pair()) == siblings_of(Heir()) == QK
    assert siblings_of(Overriding()) == siblings_of(Hidden()) == NONE
    mixed = Pair()
    mixed.__class__ = mix((Mixin,), Pair)
    assert type(mixed) is not Pair and siblings_of(mixed) == QK
    assert siblings_of(mix((Mixin,), Hidden)()) == NONE


def test_a_forward_of_the_module_itself() -> None:
    """Hooks of accelerate wrap the class's, and say so; what says nothing may do anything."""
    module = Pair()
    before = module.forward
    module.forward = functools.update_wrapper(functools.partial(lambda module, *args: before(*args), module), before)
    assert siblings_of(module) == QK
    module.forward = lambda x: before(x)  # type: ignore[method-assign, misc]
    assert siblings_of(module) == NONE
    del module.forward
    assert siblings_of(module) == QK


def test_children_of_the_module_at_hand_count() -> None:
    module = Pair()
    module.k = None  # type: ignore[assignment]
    assert siblings_of(module) == NONE and siblings_of(Pair()) == QK
    module.k = module.q
    assert siblings_of(module) == NONE
    module.k = nn.Linear(4, 4)
    assert siblings_of(module) == QK
    assert siblings_of(pickle.loads(pickle.dumps(module))) == QK


def test_classes_without_source() -> None:
    text = "def forward(self, x):\n    return self.q(x) + self.k(x)"
    space: dict[str, Any] = {}
    exec(text, space)
    made: Any = type("Made", (Children,), {"forward": space["forward"]})
    for module in (made(), nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2), nn.Module(), Children()):
        assert siblings_of(module) == NONE
    odd: Any = type("Odd", (Children,), {"forward": lambda self, x: self.q(x) + self.k(x)})
    assert siblings_of(odd()) == NONE


# Classes of the sweep with linears that get one tensor and are not reported. `current_states = a if cross else b` and
# the like are a second name for the tensor in the module's own attention, and another tensor in cross attention.
TWO_NAMES = {
    "Attention", "BartAttention", "BigBirdPegasusDecoderAttention", "BigBirdPegasusSelfAttention", "BioGptAttention",
    "Blip2QFormerMultiHeadAttention", "DisentangledSelfAttention", "FunnelRelMultiheadAttention", "LEDDecoderAttention",
    "LongT5Attention", "M2M100Attention", "MBartAttention", "MT5Attention", "MarianAttention",
    "MobileBertSelfAttention", "MvpAttention", "NllbMoeAttention", "PegasusAttention", "PegasusXAttention",
    "ProphetNetAttention", "SwitchTransformersAttention", "T5Attention", "UMT5Attention", "Wav2Vec2Attention",
    "Wav2Vec2BertSelfAttention", "Wav2Vec2ConformerSelfAttention", "WhisperAttention", "XGLMAttention",
}  # fmt: skip
MISSED = {
    *TWO_NAMES,
    "LongformerSelfAttention",  # something is changed in place between the calls
    "MiniMaxLightningAttention",  # a call whose result is dropped is
}


def test_siblings_of_architectures_get_one_tensor() -> None:
    reported, linears, missed = 0, 0, defaultdict(set)
    for name, arch in ARCHITECTURES.items():
        if arch.missing:
            continue
        model = arch.build()
        inputs = arch.inputs(4, 6)
        for parent, calls in recorded(model, functools.partial(model, **inputs)).items():
            groups = siblings_of(parent)
            assert not wrong(calls, groups), (name, type(parent))
            ran = {child for child, *_ in calls}
            of_linears = [named for group in groups if len(named := ran.intersection(group)) > 1]
            reported, linears = reported + len(of_linears), linears + sum(map(len, of_linears))
            together = defaultdict(set)
            for child, x, version in calls:
                together[id(x), version].add(child)
            for children in together.values():
                if len(children) > 1 and not any(children <= set(group) for group in groups):
                    missed[type(parent).__name__].add(tuple(sorted(children)))
    print(f"{reported} groups of {linears} linears; missed: {dict(missed)}")
    assert reported > 250 and linears > 700
    assert missed.keys() <= MISSED, missed
