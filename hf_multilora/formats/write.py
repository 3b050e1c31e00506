"""Writes an adapter as a PEFT checkpoint that PEFT and `read_adapter` both take for the same adapter."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_multilora.formats.base import LORA, SAVED, TOKENS, Adapter, AdapterError, LoraFactors, ModuleShape, split_site
from hf_multilora.formats.checks import own_value
from hf_multilora.formats.config import DEFAULTS
from hf_multilora.formats.files import CONFIG, PICKLES, SAFETENSORS
from hf_multilora.formats.matching import lora_targets, require_own_names, task_heads, token_targets
from hf_multilora.formats.saved import has_bias, wanted
from hf_multilora.formats.write_experts import (
    VERSION,
    Target,
    expert_targets,
    require_own_parameters,
    weights_as_parameters,
)

PREFIX = "base_model.model."
KEPT = ("auto_mapping", "id2label", "revision", "task_type")  # of the adapter's own config
Sites = Mapping[str, LoraFactors]


def write_adapter(
    folder: str | os.PathLike[str],
    adapter: Adapter,
    modules: Mapping[str, ModuleShape],
    *,
    aliases: Mapping[str, Sequence[str]] | None = None,
    overwrite: bool = False,
) -> None:
    """Write `adapter` into a local folder: `adapter_config.json` and `adapter_model.safetensors`.

    modules: the modules of its base, by path. aliases: those that are never called -> the modules that do their work.
    Tensors keep their dtype and bits, and scales are exact where a number gives them (else within one unit in the last
    place). A base with another number of labels or token ids must be resized before PEFT can load the adapter.

    Raises FileExistsError where the folder holds an adapter and `overwrite` is off, AdapterError for what PEFT could
    not read as it is meant. After an error the folder holds what it held before.
    """
    roles: dict[str, dict[str, LoraFactors]] = {LORA: {}, SAVED: {}, TOKENS: {}}
    experts: dict[str, dict[str, LoraFactors]] = {}  # module -> its sites by role
    for site, factors in adapter.factors.items():
        module, role = split_site(site)
        if module not in modules:
            raise AdapterError(f"{adapter.source}: the base has no module {module}, which the adapter trains")
        if role in roles:
            roles[role][module] = factors
        else:
            experts.setdefault(module, {})[role] = factors
    lora, saved, tokens = roles.values()
    targets = [t for m, sites in experts.items() for t in expert_targets(adapter.source, m, modules[m], sites)]
    rows = token_targets(adapter.source, tokens, modules, aliases or {})
    tensors = _tensors(adapter.source, lora, saved, rows, modules)
    tensors |= _owned(
        {f"{PREFIX}{t.name}.lora_{half}.weight": x for t in targets for half, x in (("A", t.a), ("B", t.b))}
    )
    heads = task_heads(adapter.config.get("task_type"), modules)
    for head, inside in heads.items():
        tensors |= _base_copies(adapter.source, head, [m for m in inside if m not in saved], lora, modules)
    whole = {m for inside in heads.values() for m in inside}
    to_save = sorted({*heads, *(m for m in saved if m not in whole)})
    require_own_names(adapter.source, to_save, {*saved, *whole}, {*lora, *experts}, modules)
    require_own_names(adapter.source, [*rows], set(), {}, modules)
    config = _config(adapter, lora, targets, modules) | {
        "modules_to_save": to_save or None,
        "trainable_token_indices": {module: factors.b[0].tolist() for module, factors in rows.items()} or None,
    }
    _put(Path(folder), config, tensors, overwrite)


# -- the config -----------------------------------------------------------------------------------------------
def _config(
    adapter: Adapter, lora: Sites, targets: Sequence[Target], modules: Mapping[str, ModuleShape]
) -> dict[str, Any]:
    given = adapter.config
    rslora = bool(given.get("use_rslora", False))
    weights = weights_as_parameters(lora, modules)
    plain = [module for module in lora if module not in weights]
    parameters = [*(f"{module}.weight" for module in weights), *(target.parameter for target in targets)]
    require_own_parameters(adapter.source, parameters, modules)
    turned = any(modules[module].transposed for module in plain)
    if turned and parameters:
        raise AdapterError(
            f"{adapter.source}: PEFT takes no adapter with a Conv1D and parameters ({parameters[0]}) at once, so it "
            f"cannot be written"
        )
    sizes = {f"{m}.weight" if m in weights else m: (pair.r, pair.scaling) for m, pair in lora.items()}
    sizes |= {target.parameter: (target.r, target.scaling) for target in targets}
    ranks = {name: r for name, (r, _) in sizes.items()}
    alphas = {name: alpha_of(r, scaling, rslora) for name, (r, scaling) in sizes.items()}
    r = Counter(ranks.values()).most_common(1)[0][0] if ranks else given.get("r", DEFAULTS["r"])
    alpha = Counter(alphas.values()).most_common(1)[0][0] if alphas else given.get("lora_alpha", DEFAULTS["lora_alpha"])
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": adapter.base_model,
        **{key: given[key] for key in KEPT if given.get(key) is not None},
        "inference_mode": True,
        "init_lora_weights": True,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": turned,
        "use_rslora": rslora,
        "r": r,
        "lora_alpha": alpha,
        # anchored: PEFT takes the first pattern that fits the end of a name
        "rank_pattern": {f"^{re.escape(m)}": rank for m, rank in ranks.items() if rank != r},
        "alpha_pattern": {f"^{re.escape(m)}": own for m, own in alphas.items() if own != alpha},
        "target_modules": lora_targets(plain, modules) if plain or not parameters else [],
        **({"target_parameters": parameters, "peft_version": VERSION} if parameters else {}),
    }
    if adapter.labels is not None:
        config["id2label"] = {str(n): name for n, name in enumerate(adapter.labels)}
    return config


def alpha_of(r: int, scaling: float, rslora: bool) -> float:
    """The number whose quotient with the rank is the scale, a whole one if there is one."""
    divisor = math.sqrt(r) if rslora else r
    alpha = scaling * divisor
    near = [alpha, math.nextafter(alpha, math.inf), math.nextafter(alpha, -math.inf)]
    exact = [number for number in (float(round(alpha)), *near) if number / divisor == scaling]
    alpha = exact[0] if exact else alpha
    return int(alpha) if alpha.is_integer() else alpha


# -- the tensors ----------------------------------------------------------------------------------------------
def _tensors(
    source: str, lora: Sites, saved: Sites, rows: Sites, modules: Mapping[str, ModuleShape]
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for module, pair in lora.items():
        names = ("lora_A.weight", "lora_B.weight")
        if modules[module].kind == "embedding":
            names = ("lora_embedding_A", "lora_embedding_B")
        tensors |= {f"{PREFIX}{module}.{name}": tensor for name, tensor in zip(names, (pair.a, pair.b), strict=True)}
    for module, factors in saved.items():
        own = saved_tensors(source, module, factors, modules[module])
        tensors |= {f"{PREFIX}{module}.{name}": tensor for name, tensor in own.items()}
    for module, factors in rows.items():
        tensors[f"{PREFIX}{module}.token_adapter.trainable_tokens_delta"] = factors.a
    return _owned(tensors)


def _owned(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each with memory of its own: a safetensors file holds no views, and modules may share one pair."""
    return {
        key: tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()
    }


def saved_tensors(source: str, module: str, factors: LoraFactors, shape: ModuleShape) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a saved site under their names in the base."""
    if shape.kind == "other":
        parts = factors.a[0].split([size.numel() for size in shape.own.values()])
        own = {name: part.view(size) for (name, size), part in zip(shape.own.items(), parts, strict=True)}
        if "running_mean" in own:  # PEFT asks for this counter of torch's norms, which evaluation does not use
            own["num_batches_tracked"] = torch.tensor(0)
        return own
    weight = factors.a.t() if shape.transposed else factors.a
    if shape.kind == "embedding":
        return {"weight": weight}
    if has_bias(shape):
        return {"weight": weight, "bias": factors.b[0]}
    if factors.b.any():
        raise AdapterError(
            f"{source}: module {module} has a bias in the adapter and none in the base, so PEFT would leave it out; it "
            f"cannot be written for this base"
        )
    return {"weight": weight}


def _base_copies(
    source: str, head: str, inside: Sequence[str], lora: Sites, modules: Mapping[str, ModuleShape]
) -> dict[str, torch.Tensor]:
    """What the base holds of a head that PEFT asks for, though the adapter did not train it."""
    tensors = {}
    for module in inside:
        if module in lora:
            raise AdapterError(
                f"{source}: module {module} is trained with LoRA, but PEFT saves {head} in full for the adapter's "
                f"task_type; set task_type to null in its config"
            )
        for name in wanted(modules[module]):
            own = own_value(modules[module], name)
            if own is None:
                raise AdapterError(
                    f"{source}: module {module} must be written too, as PEFT saves {head} in full for the adapter's "
                    f"task_type, but the base's own {name} is not known here; set task_type to null in its config"
                )
            tensors[f"{PREFIX}{module}.{name}"] = own
    return _owned(tensors)


# -- the files ------------------------------------------------------------------------------------------------
def _put(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], overwrite: bool) -> None:
    """Both files, or neither: they are made beside and moved in, and what they replace is moved back on an error."""
    names = (SAFETENSORS, CONFIG)
    old = [name for name in (*names, *PICKLES) if (folder / name).exists()]
    if old and not overwrite:
        raise FileExistsError(f"{folder} must hold no adapter, it holds {', '.join(old)}; pass overwrite=True")
    fresh = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".adapter-", dir=folder))
    kept = made / "replaced"
    moving = False
    try:
        save_file(dict(tensors), made / SAFETENSORS, metadata={"format": "pt"})
        (made / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
        kept.mkdir()
        for name in old:
            os.replace(folder / name, kept / name)
        moving = True
        for name in names:
            os.replace(made / name, folder / name)
    except BaseException:
        for name in names if moving else ():
            if not (made / name).exists():
                (folder / name).unlink(missing_ok=True)
        for name in old:
            if (kept / name).exists():
                os.replace(kept / name, folder / name)
        shutil.rmtree(made)
        if fresh:
            folder.rmdir()
        raise
    shutil.rmtree(made)
