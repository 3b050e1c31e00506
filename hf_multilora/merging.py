"""An adapter's part merged into the tensors of the modules it trains."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .formats import (
    A_EACH,
    A_ONE,
    B_EACH,
    B_ONE,
    LORA,
    SAVED,
    TOKENS,
    LoraFactors,
    site_name,
    split_half,
    split_site,
)  # fmt: skip
from .layers.whole import own_names
from .moe import experts_of


def whole_pairs(factors: Mapping[str, LoraFactors]) -> dict[str, LoraFactors]:
    """The same, with the halves of experts' projections put together: what all experts share once for each."""
    whole, halves = dict[str, LoraFactors](), dict[str, dict[str, LoraFactors]]()
    for site, pair in factors.items():
        path, role = split_site(site)
        projection, half = split_half(role)
        if half:
            halves.setdefault(site_name(path, projection), {})[half] = pair
        else:
            whole[site] = pair
    for site, found in halves.items():
        whole[site] = _joined(found.get(A_EACH, found.get(A_ONE)), found.get(B_EACH, found.get(B_ONE)))  # type: ignore[arg-type]
    return whole


def _joined(a: LoraFactors, b: LoraFactors) -> LoraFactors:
    parts = a.parts or b.parts
    if parts is None:  # shared both: one part, which is every expert's
        return LoraFactors(a.a, b.b, b.scaling)
    shared = max(a.rank, b.rank)
    held = [shared if part else 0 for part in parts]
    rows = a.a if a.parts is not None else torch.cat([a.a[:r] for r in held])
    columns = b.b if b.parts is not None else torch.cat([b.b[:, :r] for r in held], 1)
    return LoraFactors(rows, columns, b.scaling, tuple(held))


def merged_tensors(site: str, module: nn.Module, pair: LoraFactors) -> dict[str, Tensor]:
    """What the module's own tensors become with the adapter's part of the site merged in, by name."""
    _, role = split_site(site)
    if role not in (LORA, SAVED, TOKENS):
        return _merged_experts(site, module, pair)
    weight = module._parameters.get("weight")
    if weight is not None and weight.is_meta:
        raise NotImplementedError(f"{site}: its weight is offloaded, so nothing can be merged into it")
    if role == SAVED and not isinstance(module, (nn.Linear, nn.Embedding, Conv1D)):
        names = [*own_names(module, module._parameters), *own_names(module, module._buffers)]
        own = {name: getattr(module, name) for name in names}
        parts = pair.a[0].split([tensor.numel() for tensor in own.values()])
        return {name: part.view(own[name].shape).to(own[name]) for part, name in zip(parts, names, strict=True)}
    if weight is None or not weight.is_floating_point():
        raise NotImplementedError(f"{site}: only a plain weight can be merged, it is {type(weight).__name__}")
    if role == SAVED:
        saved = pair.a.t() if isinstance(module, Conv1D) else pair.a
        tensors = {"weight": saved.to(weight)}
        if module._parameters.get("bias") is not None or bool(pair.b.any()):
            tensors["bias"] = pair.b[0].to(weight)
        return tensors
    if role == TOKENS:
        return {"weight": weight.detach().index_copy(0, pair.b[0].to(weight.device), pair.a.to(weight))}
    delta = pair.scaling * (pair.b.double() @ pair.a.double())  # [out, in], embedding: [H, V]
    if weight.numel() != delta.numel():
        raise NotImplementedError(f"{site}: only a plain weight can be merged, it is {type(weight).__name__}")
    if isinstance(module, (Conv1D, nn.Embedding)):  # [in, out], [V, H]
        delta = delta.t()
    return {"weight": (weight.double() + delta.to(weight.device)).to(weight.dtype)}


def _merged_experts(site: str, module: nn.Module, pair: LoraFactors) -> dict[str, Tensor]:
    """The parameter of one projection with each expert's delta in its columns."""
    shape = experts_of(module)
    if shape is None or shape.experts is None:
        raise NotImplementedError(f"{site}: only plain parameters can be merged, its module is {type(module).__name__}")
    projection = shape.experts.projections[split_site(site)[1]]
    tensor = module._parameters[projection.parameter]
    assert tensor is not None
    if tensor.is_meta:
        raise NotImplementedError(f"{site}: its weights are offloaded, so nothing can be merged into them")
    parts = pair.parts or (pair.r,) * shape.experts.count
    start, deltas = 0, []
    for r in parts:
        rows = slice(start, start + r) if pair.parts is not None else slice(None)
        deltas.append(pair.scaling * (pair.b[:, rows].double() @ pair.a[rows].double()))  # [out, in]
        start += r
    delta = torch.stack(deltas).to(tensor.device)  # [E, out, in]
    merged = tensor.detach().double().clone()
    columns = slice(projection.first, projection.first + projection.out_features)
    if tensor.dim() == 2:  # a bias [E, out]
        merged[:, columns] += delta[..., 0]
    elif shape.experts.transposed:
        merged[:, :, columns] += delta.mT
    else:
        merged[:, columns] += delta
    return {projection.parameter: merged.to(tensor.dtype)}
