"""Parameters and modules of experts and routers that an adapter may not train, refused by name."""

from __future__ import annotations

from collections.abc import Sequence

from hf_multilora.formats.keys import ParsedKey
from hf_multilora.formats.reading import Reading


def refuse_saved_experts(reading: Reading, keys: Sequence[ParsedKey]) -> None:
    """Raises AdapterError where one of these keys (of modules saved in full) is for experts or a router."""
    for p in keys:
        for module in reading.resolver.resolve(p.module):
            if reading.modules[module].kind in ("experts", "router"):
                raise reading.place(p, module).error(
                    f"{reading.modules[module].kind} cannot be saved in full here (modules_to_save); train LoRA on it "
                    f"(target_parameters), or merge the adapter into its own copy of the base"
                )


def weight_is_target(reading: Reading, p: ParsedKey, names: Sequence[str], module: str) -> bool:
    """Whether `target_parameters` names the weight of a module that is a linear or router, not of experts.

    Raises AdapterError where it names another parameter of the module instead, or one of a module of another kind.
    """
    shape, settings = reading.modules[module], reading.settings
    named = [own for own in shape.own if any(settings.targets_parameter(f"{name}.{own}") for name in names)]
    if not named:
        return False
    if "weight" not in named or shape.kind not in ("linear", "router"):
        raise reading.place(p, module).error(
            f"target_parameters trains {', '.join(f'{module}.{own}' for own in named)}, and only the weights of "
            f"linears, routers and experts, and experts' biases, can be served; retrain without it"
        )
    return True
