"""Gated MLPs: modules whose `forward` is down(act(gate(x)) * up(x)) and nothing else, read from its source.

What is reported may be computed in another way without a look at the module's `forward`, so all must be known: what is
written, that it is what runs, and what each name stands for.
"""

from __future__ import annotations

import ast
import functools
import inspect
import tokenize
from dataclasses import astuple, dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.nn import functional as F
from transformers.activations import GELUTanh, SiLUActivation

from .sources import source_of

# type of a module, the function in its attribute `act`, its forward (kernel packages give classes others) ->
# activation. Other variants of GELU round at each of their steps: in bfloat16 they are far from this one.
MODULES: dict[tuple[type, Any, Any], str] = {
    (nn.SiLU, None, nn.SiLU.forward): "silu",
    (SiLUActivation, None, SiLUActivation.forward): "silu",
    (GELUTanh, F.gelu, GELUTanh.forward): "gelu_tanh",
}
CALL, SILU = nn.Module.__call__, F.silu  # what those modules run
FUNCTIONS: dict[Any, str] = {F.silu: "silu"}
CODE = ("co_code", "co_names", "co_varnames", "co_argcount", "co_kwonlyargcount")  # what a function does

Form = tuple[Any, ...]  # ("x",), ("*", form, form) or (child, form)


@dataclass(frozen=True)
class Gate:
    """Names of a module's children. Its `forward` of [..., K] is down(act(gate(x)) * up(x))."""

    gate: str
    up: str
    act: str
    down: str


def gate_of(module: nn.Module) -> Gate | None:
    """The children of a gated MLP by their parts in it; None wherever the module is not surely one.

    gate, up and down are three `nn.Linear`s (or of subclasses) of fitting widths, act a module or a plain function.
    Hooks, an own `forward` of a child, dtypes and devices are left to the caller.
    """
    cls: Any = type(module)
    forward = inspect.getattr_static(cls, "forward", None)
    if "forward" in module.__dict__ or not isinstance(forward, FunctionType):
        return None
    if cls.__getattribute__ is not object.__getattribute__ or cls.__getattr__ is not nn.Module.__getattr__:
        return None
    found = _read(forward, forward.__code__)
    if found is None or any("__init_subclass__" in vars(base) for base in cls.__mro__[:-1]) or type(cls) is not type:
        return None  # classes are made from it, which such a one may refuse or note
    gate, up, act, down = (_child(module, name) for name in astuple(found))
    if (
        not all(isinstance(child, nn.Linear) for child in (gate, up, down))
        or len({*map(id, (gate, up, act, down))}) < 4
    ):
        return None
    if gate.in_features != up.in_features or not gate.out_features == up.out_features == down.in_features:
        return None
    return None if act is None else found


def activation_of(act: Any) -> str | None:
    """Which of "silu" and "gelu_tanh" it is, by exact types; None for others. Hooks and a `forward` of its own are
    left to the caller."""
    if not isinstance(act, nn.Module):
        return FUNCTIONS.get(act) if isinstance(act, FunctionType) else None
    cls: Any = type(act)
    if cls.__call__ is not CALL or F.silu is not SILU:
        return None
    inner = act.__dict__.get("act")  # GELUTanh: a partial of F.gelu, or a method of its own
    if inner is not None and getattr(inner, "keywords", None) != {"approximate": "tanh"}:
        return None
    return MODULES.get((cls, getattr(inner, "func", None), cls.forward))


def _child(module: nn.Module, name: str) -> Any:
    """The child module or plain function that `module.<name>` is; None for others, as properties and methods."""
    if any(name in vars(cls) for cls in type(module).__mro__):
        return None
    found = {**module._modules, **module._buffers, **module._parameters, **module.__dict__}.get(name)
    return found if isinstance(found, FunctionType) or found is module._modules.get(name) else None


@functools.cache
def _read(forward: FunctionType, code: CodeType) -> Gate | None:
    """The names of the parts, from the source of a `forward` that is what its source says. code: its own, which may be
    replaced."""
    if hasattr(forward, "__wrapped__") or forward.__defaults__ or forward.__kwdefaults__:
        return None
    try:
        text = source_of(forward)
        tree = ast.parse("if True:\n" + text if text[:1].isspace() else text)
    except (SyntaxError, ValueError, tokenize.TokenError):  # a file changed since it was imported
        return None
    body: list[Any] = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.If) else tree.body
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef) or body[0].decorator_list:
        return None
    found = _matched(_form(body[0]))
    return found if found and _parts_of(code) in _compiled(tree, body[0].name) else None


def _compiled(tree: ast.Module, name: str) -> list[tuple[Any, ...]]:
    """What the source compiles to, of the functions of that name."""
    codes = compile(tree, "<forward>", "exec", dont_inherit=True).co_consts
    return [_parts_of(code) for code in codes if isinstance(code, CodeType) and code.co_name == name]


def _parts_of(code: CodeType) -> tuple[Any, ...]:
    return tuple(getattr(code, part) for part in CODE)


def _form(function: ast.FunctionDef) -> Form | None:
    """What it returns, as a form; None where it is not written with calls of children, products and names alone."""
    given = function.args
    arguments = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    if len(arguments) != 2 or given.vararg or given.kwonlyargs or given.kwarg:
        return None
    owner, x = arguments
    known: dict[str, Form] = {}  # locals that were not used so far
    bound = {owner, x}

    def form_of(node: ast.AST | None) -> Form | None:
        match node:
            case ast.Name(id=name):
                return ("x",) if name == x else known.pop(name, None)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                parts = (form_of(left), form_of(right))
                return None if None in parts else ("*", *parts)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=child), args=[argument], keywords=[]):
                inner = form_of(argument)
                return None if inner is None or name != owner else (child, inner)
        return None

    lines = function.body[ast.get_docstring(function) is not None :]
    for line in lines[:-1]:
        match line:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                form = form_of(line.value)
            case _:
                return None
        if form is None or name in bound:
            return None
        known[name] = form
        bound.add(name)
    result = form_of(lines[-1].value) if lines and isinstance(lines[-1], ast.Return) else None
    return None if known else result


def _matched(form: Form | None) -> Gate | None:
    match form:
        case (down, ("*", (act, (gate, ("x",))), (up, ("x",)))) | (down, ("*", (up, ("x",)), (act, (gate, ("x",))))):
            return Gate(gate, up, act, down)
    return None
