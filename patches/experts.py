"""Experts outside Transformers' experts interface: by class, how the pairs of token and expert are told in a call.

Read from the classes' sources, which are the same in Transformers 5.17 to 5.24.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Held:
    """Experts that hold all weights in parameters of their own, [experts, out, in] or transposed.

    multiplies: "stacked": `torch.bmm` of [E, T, in], every expert with all tokens, and the parameter [E, in, out];
    "sorted": pairs come sorted by expert, with the number of each expert's as a list that the module `router` beside
    gives; "looped": one expert after another gathers its tokens (`hidden_states[tokens]`), for `F.linear`.
    """

    multiplies: str
    parameters: tuple[str, ...]
    transposed: bool = False


PARAMETERS = {
    "Llama4TextExperts": Held("stacked", ("gate_up_proj", "down_proj"), transposed=True),
    "JetMoeParallelExperts": Held("sorted", ("weight",)),
    "Step3p7Experts": Held("looped", ("gate_up_proj", "down_proj")),
}
REFUSED = {
    "DbrxExpertGLU": "PEFT trains no such adapter, since DbrxExperts reads the weights of the module that PEFT wraps"
}

# Experts that are modules of linears: the class that holds them takes tokens [T, H] first, and gathers those of one
# expert (`hidden_states[None, tokens]`) right before it calls that expert
GATHERING = ("SwitchTransformersExperts", "NllbMoeExperts")

# Modules that get some of the tokens only, those of one kind (text, images): whose they are is not known inside
PARTIAL = ("Ernie4_5_VLMoeSparseMoeBlock",)


def teller_of(model: nn.Module, path: str) -> tuple[str, nn.Module] | None:
    """The module, with its path, that knows which tokens the module at `path` gets; None where it gets all of them."""
    parts = path.split(".")
    for n in range(len(parts) - 1, 0, -1):
        outer = ".".join(parts[:n])
        holder = model.get_submodule(outer)
        if type(holder).__name__ in GATHERING:
            return outer, holder
        held = PARAMETERS.get(type(model.get_submodule(path)).__name__)
        if n == len(parts) - 1 and held is not None and held.multiplies == "sorted":
            return f"{outer}.router", holder.get_submodule("router")
    return None
