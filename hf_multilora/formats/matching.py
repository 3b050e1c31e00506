"""How PEFT finds modules by their names, backwards: what a config must say so that it finds the right ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import torch

from hf_multilora.formats.base import AdapterError, LoraFactors, ModuleShape
from hf_multilora.formats.saved import wanted

NO_TARGETS = "dummy-target-modules"  # PEFT's name for an adapter without LoRA
# task_type -> the ends of names of the modules that PEFT saves in full for it, even where the config does not say so
TASK_HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}


def lora_targets(lora: Collection[str], modules: Mapping[str, ModuleShape]) -> list[str] | str:
    """Full paths; as one expression where PEFT would find a path at the end of another module's name, too."""
    if not lora:
        return NO_TARGETS
    ends = {module[n + 1 :] for module in modules if module not in lora for n, c in enumerate(module) if c == "."}
    if ends.isdisjoint(lora):
        return sorted(lora)
    return "|".join(re.escape(module) for module in sorted(lora))


def task_heads(task: object, modules: Mapping[str, ModuleShape]) -> dict[str, list[str]]:
    """The heads that PEFT saves for a task, whatever the config says -> the modules inside that it saves."""
    ends = TASK_HEADS.get(str(task))
    found: dict[str, list[str]] = {}
    for name in modules if ends else ():
        if name.endswith(ends) and not any(name.startswith(f"{head}.") for head in found):  # type: ignore[arg-type]
            inside = [m for m in modules if f"{m}.".startswith(f"{name}.") and wanted(modules[m])]
            found |= {name: inside} if inside else {}
    return found


def require_own_names(
    source: str, named: Sequence[str], saved: Collection[str], lora: Collection[str], modules: Collection[str]
) -> None:
    """PEFT finds modules to save, and those with token rows, by the ends of names: these must be ends of no others.

    named: what the config names. saved: what it may find beside. lora: what must stay a target of LoRA.
    """
    for module in named:
        others = [other for other in modules if other != module and other.endswith(module) and other not in saved]
        others += [other for other in lora if re.match(rf"(^|.*\.){module}($|\..*)", other)]
        if others:
            raise AdapterError(
                f"{source}: module {module} cannot be written for PEFT, which would take {others[0]} for it, too, as "
                f"it looks for the ends of names; write it for a base that holds this one under another name"
            )


def token_targets(
    source: str,
    tokens: Mapping[str, LoraFactors],
    modules: Mapping[str, ModuleShape],
    aliases: Mapping[str, Sequence[str]],
) -> dict[str, LoraFactors]:
    """Name for `trainable_token_indices` -> rows, so that PEFT gives each module in `tokens` its rows and no other any.

    Rows of the input embedding are those of all modules tied to it, too, unless these are given rows for other tokens.
    """
    targets = dict(tokens)
    for name, shape in modules.items():
        if shape.kind != "embedding" or not shape.resizable or not shape.tied:
            continue
        tied = [m for m in shape.tied if m not in aliases]
        group = tied if name in aliases else [name, *tied]
        held = [m for m in group if m in tokens]
        alike = len(held) == len(group) and all(_alike(tokens[held[0]], tokens[m]) for m in held)
        if alike and (name in tokens or name in aliases):
            targets = {m: rows for m, rows in targets.items() if m not in held} | {name: tokens[held[0]]}
        elif name not in tokens and len(held) > 1:
            raise _untied(source, held, f"without {name}, which they are tied to")
        elif name in tokens and len({tuple(tokens[m].b[0].tolist()) for m in held}) == 1:
            raise _untied(source, held, f"that are not those of all of {', '.join(group)}, which are tied")
    return targets


def _alike(one: LoraFactors, other: LoraFactors) -> bool:
    return torch.equal(one.b, other.b) and torch.equal(one.a, other.a)


def _untied(source: str, held: Sequence[str], how: str) -> AdapterError:
    return AdapterError(
        f"{source}: {', '.join(held)} must have trained token rows as PEFT ties them, but has rows {how}; it cannot be "
        f"written for PEFT"
    )
