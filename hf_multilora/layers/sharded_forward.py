"""A forward of Transformers' tensor parallelism around that of an adapted class, and back."""

from __future__ import annotations

from torch import nn

from ..parallel import installed

ENCLOSED = "sharded linear"  # the kind of layers whose class has the forward that is called inside
OUTER = "_multilora_outer"  # attribute of the module: the forward that it had


def enclose(module: nn.Module) -> None:
    """Install the parallel forward anew, so that it calls what the class became. What was there is kept."""
    own = installed(module)
    assert own is not None
    module.__dict__[OUTER] = module.__dict__.pop("forward")
    own.style.install_forward(module, own.mesh)


def disclose(module: nn.Module) -> None:
    """Give the module the parallel forward that it had."""
    if OUTER in module.__dict__:  # not so after an interrupt
        module.__dict__["forward"] = module.__dict__.pop(OUTER)
