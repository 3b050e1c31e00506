"""What Transformers' model class has and a MultiLoRAModel must answer for: its verbs for adapters, and the weights."""

from __future__ import annotations

from typing import Any

from .layers.augmented import without_buffers
from .runtime import Runtime


class InheritedVerbs:
    """Mixed in front of a model's own class, under MultiLoRAModel."""

    _multilora: Runtime

    def set_adapter(self, adapter_name: str | None) -> None:
        """What rows get when a call names none: an adapter, which then keeps a slot, or None for the base."""
        self._multilora.set_default(adapter_name)

    def _expand_inputs_for_generation(self, *args: Any, expand_size: int = 1, **kwargs: Any) -> Any:
        if self._multilora.routing.open:
            self._multilora.routing.stack[-1].factors.add(expand_size)
        return super()._expand_inputs_for_generation(*args, expand_size=expand_size, **kwargs)  # type: ignore[misc]

    # -- Transformers' own verbs for adapters ----------------------------------------------------------------
    def add_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Not here: adapters are loaded, not trained."""
        raise NotImplementedError(
            "adapters are read from checkpoints here: train with PEFT, then load_adapter(path, name)"
        )

    def enable_adapters(self) -> None:
        """Not here: there is no one set of active adapters."""
        raise NotImplementedError(
            "name the adapter: pass adapter_names to the call, or set_adapter(name) for all calls"
        )

    def disable_adapters(self) -> None:
        """Rows of calls that name no adapter get the base."""
        self.set_adapter(None)

    def active_adapters(self) -> list[str]:
        """The default adapter, if there is one."""
        default = self._multilora.default
        return [] if default is None else [default]

    @property
    def active_adapter(self) -> list[str]:
        """`active_adapters()`, as Transformers has it."""
        return self.active_adapters()

    # -- nn.Module and PreTrainedModel -----------------------------------------------------------------------
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[misc]
        self._multilora.apply_to_parts(fn)
        self._multilora.moved()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The base's state dict: no name and no byte of an adapter, also where another module shares a laid weight."""
        state = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        sites = self._multilora.sites.values()
        return state if kwargs.get("keep_vars") else without_buffers(state, (slots.buffer for _, slots in sites))

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers' own; raises ValueError where an adapter trains the embedding or the head."""
        self._multilora.give_up_embeddings("resize_token_embeddings")
        return super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]

    def set_input_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers' own; raises ValueError where an adapter trains the embedding or the head."""
        self._multilora.give_up_embeddings("set_input_embeddings")
        return super().set_input_embeddings(*args, **kwargs)  # type: ignore[misc]

    def set_output_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers' own; raises ValueError where an adapter trains the embedding or the head."""
        self._multilora.give_up_embeddings("set_output_embeddings")
        return super().set_output_embeddings(*args, **kwargs)  # type: ignore[misc]
