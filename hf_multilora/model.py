"""MultiLoRAModel: any PreTrainedModel, with adapters chosen row by row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from . import calls
from .config import MultiLoRAConfig
from .layers.base import state_of
from .verbs import AdapterVerbs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .plan import MemoryPlan


class MultiLoRAModel(AdapterVerbs):
    """Mixed in front of a model's own class by `from_pretrained`: the object is the real model, with these verbs.

    `forward` and `generate` take `adapter_names` (one name, or None for the base, per row) or `adapter_ids` (int64
    [rows], 0 for the base). A call that names none gets the default adapter (`set_adapter`), at first the base.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if type(self) is MultiLoRAModel:
            raise TypeError("a MultiLoRAModel is made by MultiLoRAModel.from_pretrained(base, adapters)")
        super().__init__(*args, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        base: Any,
        adapters: Sequence[str] | Mapping[str, str] = (),
        *,
        max_loras: int = 8,
        max_cpu_loras: int | None = None,
        max_lora_rank: int | None = None,
        lora_dtype: str | torch.dtype = "auto",
        target_modules: Sequence[str] | str | None = None,
        fully_sharded_loras: bool = False,
        backend: str = "auto",
        deterministic: bool = False,
        auto_class: str | type | None = None,
        **transformers_kwargs: Any,
    ) -> Any:
        """Load a base with Transformers, or take a loaded one, and register adapters on it.

        Args:
            base: a folder or Hub id, a loaded PreTrainedModel (changed in place), or a PeftModel, whose own adapters
                are taken over (it is unloaded: use the result from then on).
            adapters: folders or Hub ids, named by their last path part, or {name: folder or Hub id}.
            max_loras: adapters on the device at once, so also distinct adapters in a batch that runs in one pass.
            max_cpu_loras: adapters kept in host memory, at least max_loras; None: what fits in a quarter of the free.
            max_lora_rank: upper bound per adapter; with it the pools have their full size from the start.
            lora_dtype: dtype of A and B; "auto": that of each base module.
            target_modules: narrows what adapters may have trained: names, a regex, or "all-linear".
            fully_sharded_loras: of a tensor-parallel base: each of N processes holds 1/N of A and of B, at the price
                of a sum of width r per linear.
            backend: what computes the deltas: "triton" (on CUDA devices), "torch", or "auto": Triton where it can.
            deterministic: a row's delta does not depend on what else is in the batch, at the price of speed.
            auto_class: Transformers class (or its name) for the base; None: from the adapters' task_type, else the
                config's architecture.
            transformers_kwargs: all else goes to Transformers' `from_pretrained`.

        Returns the model: an instance of MultiLoRAModel and of the base's own class. Raises AdapterError for an adapter
        that cannot be served as it is, FileNotFoundError for a missing one, ValueError for settings; a loaded base is
        then as it was.
        """
        from .loading import load

        config = MultiLoRAConfig(
            max_loras, max_cpu_loras, max_lora_rank, lora_dtype, target_modules, fully_sharded_loras, backend,
            deterministic,
        )  # fmt: skip
        return load(base, adapters, config, auto_class, transformers_kwargs)

    @classmethod
    def plan(
        cls, base: Any, adapters: Sequence[str] | Mapping[str, str] = (), *, max_loras: int = 8,
        max_cpu_loras: int | None = None, max_lora_rank: int | None = None, lora_dtype: str | torch.dtype = "auto",
        target_modules: Sequence[str] | str | None = None, fully_sharded_loras: bool = False, backend: str = "auto",
        deterministic: bool = False, auto_class: str | type | None = None, budget: int | str | None = None,
        **transformers_kwargs: Any,
    ) -> MemoryPlan:  # fmt: skip
        """The bytes that `from_pretrained` with the same arguments will need, reading no weight of the base: see
        `hf_multilora.planning.plan`. budget: bytes of device memory for adapters, or "2GB", to learn how many fit.
        """
        from .planning import plan

        config = MultiLoRAConfig(
            max_loras, max_cpu_loras, max_lora_rank, lora_dtype, target_modules, fully_sharded_loras, backend,
            deterministic,
        )  # fmt: skip
        return plan(base, adapters, config, auto_class, budget, transformers_kwargs)

    # -- calls -----------------------------------------------------------------------------------------------
    def __call__(self, *args: Any, adapter_names: Any = None, adapter_ids: Any = None, **kwargs: Any) -> Any:
        """`forward` with the hooks; also where accelerate gave the instance a forward that knows no adapters."""
        return calls.forward(self, super().__call__, args, kwargs, adapter_names, adapter_ids)  # type: ignore[misc]

    def generate(self, *args: Any, adapter_names: Any = None, adapter_ids: Any = None, **kwargs: Any) -> Any:
        """Transformers' `generate`; row i of the prompts uses adapter i, also all its beams and return sequences."""
        return calls.generate(self, super().generate, args, kwargs, adapter_names, adapter_ids)  # type: ignore[misc]

    def generate_batch(self, *args: Any, adapter_names: Any = None, adapter_ids: Any = None, **kwargs: Any) -> Any:
        """Transformers' continuous batching; all requests get the default adapter (`set_adapter`), or the base."""
        calls.require_one_adapter(self, adapter_names, adapter_ids)
        return super().generate_batch(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def adapters(self, adapter_names: Sequence[str | None]) -> Iterator[None]:
        """Route the rows of every call of the model inside the block, whoever makes it.

        Other threads' calls wait for the end of the block: to stream from a thread, pass adapter_names to its generate.
        """
        runtime = self._multilora
        ids = runtime.resolve(adapter_names, None)
        if ids is None:
            raise TypeError("adapter_names must be a list with one name (or None for the base) per row, got None")
        with runtime.request(ids):
            yield

    def unpatch(self) -> PreTrainedModel:
        """Give the bare model back, exactly as it was: same object, classes and weights, no trace of adapters."""
        from .loading import unpatch

        return unpatch(self)

    # -- nn.Module -------------------------------------------------------------------------------------------
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deepcopy through the base class: the mixed class has no import path of its own."""
        if self._multilora.sharded:
            raise NotImplementedError(
                "a sharded base cannot be copied or pickled: the parallel forwards of a copy would call the original's "
                "modules; load it again with from_pretrained"
            )
        return rebuild_model, (type(self).__bases__[1],), state_of(self)


@functools.cache
def mix_model(base: type) -> type:
    """MultiLoRAModel + base under the base's name and module, with the base's forward signature plus the adapters'."""
    signature = inspect.signature(base.forward)  # type: ignore[attr-defined]
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in ("adapter_names", "adapter_ids")
    ]
    parameters = list(signature.parameters.values())
    at = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)

    @functools.wraps(base.forward)  # type: ignore[attr-defined]
    def forward(self: Any, *args: Any, adapter_names: Any = None, adapter_ids: Any = None, **kwargs: Any) -> Any:
        run = functools.partial(base.forward, self)  # type: ignore[attr-defined]
        return calls.forward(self, run, args, kwargs, adapter_names, adapter_ids)

    forward.__signature__ = signature.replace(parameters=[*parameters[:at], *extra, *parameters[at:]])  # type: ignore[attr-defined]
    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "forward": forward,
        "from_pretrained": staticmethod(base.from_pretrained),  # type: ignore[attr-defined]
    }
    return type(base.__name__, (MultiLoRAModel, base), body)


def rebuild_model(base: type) -> Any:
    mixed: Any = mix_model(base)
    return mixed.__new__(mixed)
