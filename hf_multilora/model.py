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
from .inherited import InheritedVerbs
from .layers.base import state_of
from .runtime import Reader, Runtime

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .plan import MemoryPlan
    from .reports import MemoryReport, WarmupReport
    from .verify import VerifyReport


class MultiLoRAModel(InheritedVerbs):
    """Mixed in front of a model's own class by `from_pretrained`: the object is the real model, with these verbs.

    `forward` and `generate` take `adapter_names` (one name, or None for the base, per row) or `adapter_ids` (int64
    [rows], 0 for the base). A call that names none gets the default adapter (`set_adapter`), at first the base.
    """

    _multilora: Runtime

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
            fully_sharded_loras: for tensor-parallel bases, which are not supported yet: must be False.
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

    # -- adapters --------------------------------------------------------------------------------------------
    def load_adapter(
        self, path: str, adapter_name: str | None = None, *, revision: str | None = None, subfolder: str = "",
        pinned: bool = False, load_inplace: bool = False,
    ) -> str:  # fmt: skip
        """Read a PEFT checkpoint and register it; returns its name (None: the last part of the path).

        load_inplace: replace the weights of the adapter registered under that name; its id stays, what was cached under
        the old content must not be used again. Raises AdapterError, FileNotFoundError, ValueError for a name that is
        taken, UnknownAdapterError for one to replace that is not registered, AdapterInUseError where a call uses it;
        the model then answers as before.
        """
        from .loading import last_part

        runtime = self._multilora
        name = last_part(path) if adapter_name is None else adapter_name
        reader = Reader(runtime, str(path), revision, subfolder)
        known = name in runtime.store.catalogue
        if known and not load_inplace:
            runtime.store.refuse_taken(name)
        if load_inplace:
            runtime.store.catalogue.entry(name)
        if pinned:
            runtime.store.refuse_pin(name)
        runtime.register(name, reader(), reader, replace=known)
        if pinned:
            self.pin_adapter(name)
        return name

    def delete_adapter(self, adapter_name: str | Sequence[str]) -> None:
        """Forget an adapter (or several). Raises AdapterInUseError where a call uses it or it is the default."""
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        for name in names:
            self._multilora.require_not_default(name, "deleted")
        self._multilora.store.delete(*names)

    def pin_adapter(self, adapter_name: str) -> None:
        """Keep an adapter in host memory, where it is read if need be, and a slot for it. Raises CapacityError past
        max_loras."""
        self._multilora.store.pin(adapter_name)

    def unpin_adapter(self, adapter_name: str) -> None:
        """Let an adapter be evicted again."""
        self._multilora.store.unpin(adapter_name)

    def list_adapters(self) -> list[dict[str, Any]]:
        """One row per adapter: name, id, source, base_model, digest, max_rank, modules (how many), bytes, on_device,
        in_host_memory, pinned, default.
        """
        from .reports import list_adapters

        return list_adapters(self._multilora)

    def memory_report(self) -> MemoryReport:
        """Bytes that adapters take on the device, per module and in all, and in host memory."""
        from .reports import memory_report

        return memory_report(self._multilora)

    def verify(self, adapter_name: str, inputs: Mapping[str, Any] | None = None) -> VerifyReport:
        """Compare this adapter's rows with the adapter merged into the weights; says where they differ first."""
        from .verify import verify

        return verify(self, adapter_name, inputs)

    def warmup(
        self, inputs: Mapping[str, Any] | None = None, *, rows: Sequence[int] | None = None,
        tokens: Sequence[int] = (1, 64, 512), max_seconds: float = 60.0, **generate_kwargs: Any,
    ) -> WarmupReport:  # fmt: skip
        """Have done what the first requests would wait for: pools and weights in place, kernels compiled, adapters in
        slots.

        Calls the model with mixed rows of every shape in rows x tokens, none of which starts after max_seconds. rows
        None: 1 and max_loras. inputs: one row of forward's arguments where the model takes no token ids. With
        generate_kwargs (max_new_tokens=8, cache_implementation="static", ...) it also generates, which compiles what
        Transformers compiles. Needs no files: where no adapter is registered, dummies of rank max_lora_rank stand in,
        and nothing of them is left but the pools. Raises ValueError where there is neither.
        """
        from .warmup import warmup

        return warmup(self, inputs, rows, tokens, max_seconds, generate_kwargs)

    def unpatch(self) -> PreTrainedModel:
        """Give the bare model back, exactly as it was: same object, classes and weights, no trace of adapters."""
        from .loading import unpatch

        return unpatch(self)

    # -- nn.Module -------------------------------------------------------------------------------------------
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deepcopy through the base class: the mixed class has no import path of its own."""
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
