"""Single rows of an embedding that adapters trained (PEFT's trainable_token_indices), and of the head tied to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import AdaptedLayer
from .rows import BASE_ONLY, ONE, SlotRows
from .saved import outputs, token_rows

NO_TOKEN = torch.iinfo(torch.int64).max  # sorts behind every token id


class TokenSlots(SlotRows):
    """a [P, width] trained rows and b int64 [P, 1] their token ids, ascending within a slot."""

    role = "tokens"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, whole_numbers=True)

    def ids(self, width: int) -> Tensor:
        """The token ids that each row's adapter trained, [R, width], NO_TOKEN behind its own."""
        assert self.layout is not None
        first, count = self.layout.own[0][:, None], self.layout.own[1][:, None]
        at = torch.arange(width, device=self.b.device)
        own = self.b[:, 0][(first + at).clamp(max=self.b.shape[0] - 1)]
        return torch.where(at < count, own, NO_TOKEN)


class TokenEmbedding(AdaptedLayer, role="tokens", kind="embedding"):
    """The base's row, or that of the row's adapter where it trained the token; ids int [R, T]."""

    _tokens: TokenSlots

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        slots = self._tokens
        path = slots.path()
        if path == BASE_ONLY:
            return super().__call__(*args, **kwargs)
        ids: Tensor = args[0] if args else next(iter(kwargs.values()))
        scale = getattr(self, "embed_scale", 1.0)
        if path == ONE:
            a, b = slots.own()
            y, rows, known = super().__call__(ids), ids, b[:, 0]
            first: Tensor | int = 0
            at = torch.searchsorted(known, rows.long()).clamp(max=known.shape[0] - 1)
            found = known[at] == rows
        else:
            rows, view = token_rows(ids, slots)
            y = super().__call__(rows.view(view))
            y = y.reshape(*rows.shape, y.shape[-1])
            width = slots.bound()
            a, known = slots.a, slots.ids(width)  # [R, width]
            at = torch.searchsorted(known, rows.long()).clamp(max=width - 1)
            found = known.gather(1, at) == rows
            first = slots.layout.own[0][:, None]  # type: ignore[union-attr]
        own = F.embedding(torch.where(found, first + at, 0), a) * scale
        out = torch.where(found[..., None], own.to(y.dtype), y)
        return out if path == ONE else out.view(*view, out.shape[-1])


class TokenLinear(AdaptedLayer, role="tokens", kind="linear"):
    """The base's logits, those of trained tokens with their trained rows."""

    _tokens: TokenSlots

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        slots = self._tokens
        path = slots.path()
        y = super().__call__(*args, **kwargs)
        if path == BASE_ONLY:
            return y
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        bias: Tensor | None = self._parameters.get("bias")  # type: ignore[attr-defined]
        if path == ONE:
            a, b = slots.own()
            own = F.linear(x, a, None if bias is None else bias[b[:, 0]])
            return y.index_copy(-1, b[:, 0], own.to(y.dtype))
        layout = slots.layout
        assert layout is not None
        rows = slots.routing.align(x, layout.own.shape[1], slots.name, flat=slots.flat)  # [R, T, K]
        out = y.reshape(*rows.shape[:2], y.shape[-1])
        width = slots.bound()
        known = slots.ids(width)  # [R, width]
        # Columns beyond a row's own repeat its first; a row without any writes its own first logit
        at = torch.where(known == NO_TOKEN, torch.where(layout.own[1] > 0, known[:, 0], 0)[:, None], known)
        own = outputs(rows, slots, width, None)
        if bias is not None:
            own = own + bias[at][:, None]
        own = torch.where((known == NO_TOKEN)[:, None], own[..., :1], own)
        wide = at[:, None].expand(-1, rows.shape[1], -1)
        own = torch.where((layout.own[1] > 0)[:, None, None], own.to(y.dtype), out.gather(2, wide))
        first = torch.arange(width, device=at.device) == 0  # `scatter` gives each of several equal columns the gradient
        own = torch.where((first | (known != NO_TOKEN))[:, None], own, own.detach())
        return out.scatter(2, wide, own).view(y.shape)
