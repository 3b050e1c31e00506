"""Which children a module's class calls with one input, read from the source of its `forward`.

A hint for speed: who uses it checks at each call that the input is the same tensor. In traced code only its identity
can be checked, so what may change a tensor in place counts as a change of every name: one may be a view of another.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from torch import nn

from .sources import source_of

ABOUT = {"dtype", "device", "shape", "ndim", "is_cuda", "requires_grad"}  # of a tensor, and none of its memory
IN_PLACE = {"out", "inplace"}  # arguments

Key = tuple[str, int, int, int]  # name, its version, changes in place so far, block
Arms = tuple[tuple[int, int], ...]  # (a branch of the source, which of its arms), outermost first


@dataclass(frozen=True)
class Call:
    """`self.<child>(...)` that gets a name. plain: that and nothing else. places: all calls of the child, each (its
    number, what it gets, arms)."""

    child: str
    number: int  # of the calls of children before it
    arms: Arms
    plain: bool
    places: tuple[tuple[Any, ...], ...] = ()

    def goes_with(self, other: Call) -> bool:
        """Whether the later of them, if it is called at all, comes after each call of the earlier before anything
        changes: what the earlier leaves for it is not for another time. One in an arm may go with one outside of it."""
        first, then = sorted((self, other), key=lambda call: call.number)
        if self.arms == other.arms:
            return all(any(p[0] < q[0] and p[1:] == q[1:] for q in then.places) for p in first.places)
        outer, inner = sorted((self.arms, other.arms), key=len)
        return inner[: len(outer)] == outer and all(len({p[1:] for p in call.places}) == 1 for call in (self, other))


def siblings_of(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of two or more direct children that get one input, in the order of the calls; no child is in two groups.

    Only calls with one positional argument, a plain name, count. One in an arm of a branch goes with one outside where
    neither child is called anywhere else: which arm runs cannot be told. No groups where the class has no source, or
    the module a `forward` of its own that does not wrap the class's.
    """
    cls: Any = type(module)
    if "forward" in module.__dict__ and _unwrapped(module.forward) is not _unwrapped(cls.forward):
        return ()
    found = [group for calls in _calls_of(cls.forward) for group in _groups(module, calls) if len(group) > 1]
    taken: set[nn.Module] = set()
    chosen: list[list[Call]] = []
    for group in sorted(found, key=len, reverse=True):
        members = {getattr(module, call.child) for call in group}
        if taken.isdisjoint(members):
            taken |= members
            chosen.append(group)
    return tuple(tuple(call.child for call in group) for group in sorted(chosen, key=lambda group: group[0].number))


def _groups(module: nn.Module, calls: Iterable[Call]) -> list[list[Call]]:
    """Those of the calls that this module can make, by what may be called together."""
    done: list[list[Call]] = []
    groups: list[list[Call]] = []
    for call in calls:
        child = getattr(module, call.child, None)
        if not isinstance(child, nn.Module):
            if child is not None:  # a method may change what it gets
                done, groups = done + groups, []
        elif any(getattr(part, "inplace", False) is True for part in child.modules()):  # as nn.ReLU may
            done, groups = done + groups, []
        elif call.plain:
            group = next((group for group in groups if all(call.goes_with(other) for other in group)), None)
            if group is None:
                groups.append([call])
            elif all(getattr(module, other.child) is not child for other in group):
                group.append(call)
    return done + groups


def _unwrapped(forward: Any) -> Any:
    """The function behind wrappers that say what they wrap: accelerate's hooks, torch.compile, decorators."""
    forward = inspect.unwrap(forward)
    return getattr(forward, "__func__", forward)


def code_of(cls: Any) -> CodeType | None:
    """The code whose source `siblings_of` reads."""
    return getattr(_unwrapped(cls.forward), "__code__", None)


@functools.cache
def _calls_of(forward: Any) -> tuple[tuple[Call, ...], ...]:
    """The calls of children in a `forward`, those together that get a name while it stays the same."""
    text = source_of(forward)
    try:
        tree = ast.parse("if True:\n" + text if text[:1].isspace() else text)
    except SyntaxError:  # a lambda in the middle of a line, a file changed since it was imported
        return ()
    function = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    arguments = [] if function is None else [*function.args.posonlyargs, *function.args.args]
    return _Reader(arguments[0].arg).read(function.body) if function and arguments else ()


class _Reader(ast.NodeVisitor):
    """Follows a function in the order in which it is evaluated, and notes when names change."""

    def __init__(self, owner: str) -> None:
        self.owner = owner  # what it calls `self`
        self.versions: dict[str, int] = {}  # name -> how often it was bound, or handed to what may change it
        self.epoch = 0  # changes in place
        self.arms: Arms = ()
        self.block = 0
        self.count = 0  # of branches and blocks
        self.outside = True  # of loops and nested functions
        self.lost = False  # names change at times that cannot be told
        self.found: dict[Key, list[Call]] = {}
        self.places: dict[str, list[tuple[Any, ...]]] = {}  # child -> those of its calls
        self.number = 0

    def read(self, body: Iterable[ast.AST]) -> tuple[tuple[Call, ...], ...]:
        self.all(body)
        found = () if self.lost else self.found.values()
        return tuple(tuple(replace(call, places=tuple(self.places[call.child])) for call in calls) for calls in found)

    def all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def change(self, name: str | None) -> None:
        if name is not None:
            self.versions[name] = self.versions.get(name, 0) + 1
            self.lost |= name == self.owner

    def branch(self, *arms: Sequence[ast.AST]) -> None:
        before, branch, ends = self.arms, self.count, False
        self.count += 1
        for arm, nodes in enumerate(arms):
            self.arms = inside = (*before, (branch, arm))
            self.all(nodes)
            ends |= self.arms != inside or any(isinstance(node, (ast.Return, ast.Raise)) for node in nodes)
        self.arms = (*before, (branch, len(arms))) if ends else before  # what follows runs where no arm has ended

    def apart(self, nodes: Iterable[ast.AST]) -> None:
        """A block that runs under conditions of its own: autocast, gradients, an error."""
        before, self.count = self.block, self.count + 1
        self.block = self.count
        self.all(nodes)
        self.block = before

    def repeated(self, nodes: Iterable[ast.AST]) -> None:
        """What runs any number of times: its calls do not count, what it changes does."""
        before, self.outside = (self.outside, self.arms), False
        self.all(nodes)
        self.outside, arms = before
        self.arms, self.count = arms if self.arms == arms else (*arms, (self.count, 0)), self.count + 1

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function, given = node.func, [*node.args, *(keyword.value for keyword in node.keywords)]
        name = getattr(function, "attr", getattr(function, "id", ""))
        names = {name for argument in given for name in _handed(argument)} - {self.owner}
        if name.endswith("_") or any(keyword.arg in IN_PLACE for keyword in node.keywords):
            self.epoch += 1
        of_owner = isinstance(function, ast.Attribute) and _is_name(function.value, self.owner)
        if not of_owner or not self.outside:  # whoever gets a tensor may change it
            for handed in names:
                self.change(handed)
        if of_owner:
            plain = len(given) == len(node.args) == 1 and isinstance(node.args[0], ast.Name) and self.outside
            keys = tuple((handed, self.versions.get(handed, 0), self.epoch, self.block) for handed in names)
            for key in keys if self.outside else ():
                self.found.setdefault(key, []).append(Call(name, self.number, self.arms, plain))
            self.places.setdefault(name, []).append((self.number, keys if plain else self.number, self.arms))
            self.number += 1

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call whose result nobody takes is made for what it changes."""
        self.visit(node.value)
        self.epoch += isinstance(node.value, ast.Call)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.change(node.id)

    def visit_Attribute(self, node: ast.Attribute | ast.Subscript) -> None:
        self.generic_visit(node)
        self.epoch += not isinstance(node.ctx, ast.Load)

    visit_Subscript = visit_Attribute

    def visit_Assign(self, node: ast.Assign) -> None:
        self.all((node.value, *node.targets))

    def visit_AnnAssign(self, node: ast.AnnAssign | ast.NamedExpr | ast.AugAssign) -> None:
        self.all((node.value, node.target))
        self.epoch += isinstance(node, ast.AugAssign)

    visit_NamedExpr = visit_AugAssign = visit_AnnAssign

    def visit_Yield(self, node: ast.AST) -> None:
        self.generic_visit(node)
        self.epoch += 1

    visit_YieldFrom = visit_Await = visit_Yield

    def visit_Dict(self, node: ast.Dict) -> None:
        for pair in zip(node.keys, node.values, strict=True):
            self.all(pair)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self.branch(node.body, node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self.branch([node.body], [node.orelse])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self.branch(node.values[1:])

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        self.branch(*([case.pattern, *([case.guard] if case.guard else []), *case.body] for case in node.cases))

    def visit_MatchAs(self, node: ast.AST) -> None:
        self.generic_visit(node)
        self.change(getattr(node, "rest", getattr(node, "name", None)))

    visit_MatchStar = visit_MatchMapping = visit_MatchAs

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.repeated((node.target, *node.body))
        self.branch(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.repeated((node.test, *node.body))
        self.branch(node.orelse)

    def visit_With(self, node: ast.With) -> None:
        self.all(node.items)
        self.apart(node.body)

    def visit_Try(self, node: ast.Try) -> None:
        self.apart(node.body)
        for handler in node.handlers:
            self.change(handler.name)
            self.apart(handler.body)
        self.apart(node.orelse)
        self.apart(node.finalbody)

    visit_TryStar = visit_Try

    def visit_ListComp(self, node: ast.AST) -> None:
        self.repeated(ast.iter_child_nodes(node))

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_Lambda(self, node: ast.AST) -> None:
        """A nested function or class: what it changes in place, it changes whenever it is called."""
        before = self.epoch
        self.repeated(ast.iter_child_nodes(node))
        self.lost |= self.epoch != before
        self.change(getattr(node, "name", None))

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda

    def visit_Global(self, node: ast.AST) -> None:
        self.lost = True

    visit_Nonlocal = visit_Global

    def visit_alias(self, node: ast.alias) -> None:
        self.change((node.asname or node.name).split(".")[0])


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _handed(node: ast.AST) -> set[str]:
    """Names whose memory the value of an expression may be: not what calls return."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Call) or (isinstance(node, ast.Attribute) and node.attr in ABOUT):
        return set()
    return {name for child in ast.iter_child_nodes(node) for name in _handed(child)}
