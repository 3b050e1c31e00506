"""The factors of one projection of all experts, and the sites that they become (see formats/base.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from hf_multilora.formats.base import A_EACH, A_ONE, B_EACH, B_ONE, LoraFactors


@dataclass(frozen=True)
class Stack:
    """The factors of one projection of all experts; expert e's delta is scaling * b_e (a_e x).

    a [sum of parts, in] and b [out, sum of parts], expert after expert; where all experts share one of them
    (`one_a`, `one_b`), that one is [r, in] or [out, r].
    """

    a: torch.Tensor
    b: torch.Tensor
    parts: tuple[int, ...]
    scaling: float
    one_a: bool = False
    one_b: bool = False

    def of_each(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A [r, in] and B [out, r] of each expert."""
        count, parts = len(self.parts), list(self.parts)
        a = [self.a] * count if self.one_a else self.a.split(parts, 0)
        b = [self.b] * count if self.one_b else self.b.split(parts, 1)
        return list(zip(a, b, strict=True))


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def joined(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """One after another on the CPU, in the widest of their dtypes."""
    return torch.cat([tensor.detach().cpu() for tensor in tensors], dim).contiguous()


def common_scale(scales: Iterable[float]) -> float:
    """The scale that most have; 0 (alpha 0) only where all have it, since no other is a multiple of it."""
    found = Counter(scale for scale in scales if scale).most_common(1)
    return found[0][0] if found else 0.0


def scaled(b: torch.Tensor, scale: float, common: float) -> torch.Tensor:
    """B for the scale that all have in common, at least in float32 where it is another than its own."""
    if scale == common:
        return b
    return b.to(torch.promote_types(b.dtype, torch.float32)) * (scale / common)


def shared(stack: Stack, count: int) -> Stack:
    """With A, or B, once where all experts have the same."""
    r = stack.parts[0]
    if count == 1 or set(stack.parts) != {r}:
        return stack
    if not stack.one_a:
        a = stack.a.view(count, r, -1)
        if torch.equal(a[0], a[1]) and bool((a == a[:1]).all()):
            stack = replace(stack, a=a[0].clone(), one_a=True)
    if not stack.one_b:
        b = stack.b.view(-1, count, r)
        if torch.equal(b[:, 0], b[:, 1]) and bool((b == b[:, :1]).all()):
            stack = replace(stack, b=b[:, 0].contiguous(), one_b=True)
    return stack


def alternating(halves: Sequence[Stack | None], count: int) -> Stack:
    """Gate and up as one, where their columns take turns: B is zero in the other's columns."""
    held = [(i, half) for i, half in enumerate(halves) if half is not None]
    scaling = common_scale(half.scaling for _, half in held)
    parts = tuple(sum(half.parts[e] for _, half in held) for e in range(count))
    each = list(zip(*(half.of_each() for _, half in held), strict=True))  # expert -> its pairs
    wide = []
    for pairs in each:
        for (i, half), (_, b) in zip(held, pairs, strict=True):
            own = scaled(b, half.scaling, scaling)
            turns = own.new_zeros(2 * own.shape[0], own.shape[1])
            turns[i::2] = own
            wide.append(turns)
    return Stack(joined([a for pairs in each for a, _ in pairs], 0), joined(wide, 1), parts, scaling)


def sites_of(site: str, stack: Stack) -> dict[str, LoraFactors]:
    """The stack as one site, or as halves where one of A and B is that of all experts."""
    if not (stack.one_a or stack.one_b):
        return {site: LoraFactors(stack.a, stack.b, stack.scaling, stack.parts)}
    none_b, none_a = stack.a.new_zeros(0, stack.a.shape[0]), stack.b.new_zeros(stack.b.shape[1], 0)
    half_a = LoraFactors(stack.a, none_b, 1.0, None if stack.one_a else stack.parts)
    half_b = LoraFactors(none_a, stack.b, stack.scaling, None if stack.one_b else stack.parts)
    return {site + (A_ONE if stack.one_a else A_EACH): half_a, site + (B_ONE if stack.one_b else B_EACH): half_b}
