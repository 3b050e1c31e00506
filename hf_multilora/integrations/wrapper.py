"""What the sentence-transformers classes share: a MultiLoRAModel inside, rows that carry their adapter, the verbs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ..model import MultiLoRAModel
from ..pool import FILL
from .scoring import adapters_of

try:
    from sentence_transformers.base.model import BaseModel
    from sentence_transformers.base.modules import Transformer
except ImportError as error:
    raise ImportError(
        "sentence-transformers 5.4 or newer must be installed: pip install 'hf-multilora[sentence-transformers]'"
    ) from error

POOLS = (
    "pool=, and device= with several devices, must be left out: a pool's processes hold copies of the model, which see "
    "no later load_adapter or set_adapter. Call it on one device, or start a process of your own for each device"
)
NAMES, WIDTH = "adapter_names", "_adapter_width"  # features of a batch: one name per row; labels of its scores


@dataclass(frozen=True)
class Row:
    """One input on its way through sentence-transformers' sorting and batching, with its adapter."""

    value: Any
    adapter: str | None
    width: int | None = None  # scores of all batches of the call get as many labels


class Adapted(BaseModel):
    """Mixed in front of CrossEncoder or SentenceTransformer.

    Settings of the adapters are those of `MultiLoRAModel.from_pretrained`; its `backend` is `lora_backend` here, as
    `backend` is sentence-transformers' own, which must be "torch".
    """

    plain: ClassVar[type]

    def __init__(
        self, model_name_or_path: str | None = None, *args: Any, adapters: Sequence[str] | Mapping[str, str] = (),
        max_loras: int = 8, max_cpu_loras: int | None = None, max_lora_rank: int | None = None,
        lora_dtype: str | torch.dtype = "auto", target_modules: Sequence[str] | str | None = None,
        lora_backend: str = "auto", deterministic: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Load a base as sentence-transformers does, from a folder or Hub id (or `modules`), and adapters on it.

        args and kwargs go to sentence-transformers. Raises as `MultiLoRAModel.from_pretrained` does, and
        NotImplementedError for a model that is more than one Transformers model called through its forward.
        """
        if isinstance(model_name_or_path, torch.nn.Module):
            raise TypeError(
                f"model_name_or_path must be a folder or a Hub id, got a {type(model_name_or_path).__name__}; a loaded "
                f"model goes to {type(self).__name__}.from_pretrained(model, adapters), which changes it in place"
            )
        super().__init__(model_name_or_path, *args, **kwargs)
        _adapt(
            self, adapters, max_loras=max_loras, max_cpu_loras=max_cpu_loras, max_lora_rank=max_lora_rank,
            lora_dtype=lora_dtype, target_modules=target_modules, lora_backend=lora_backend,
            deterministic=deterministic,
        )  # fmt: skip
        if model_name_or_path is not None:
            self._lora_model._multilora.fresh = _fresh(self[0])

    @classmethod
    def from_pretrained(cls, base: Any, adapters: Sequence[str] | Mapping[str, str] = (), **settings: Any) -> Any:
        """As MultiLoRAModel.from_pretrained: base is a folder, a Hub id, or a loaded model of the plain class, which is
        changed in place and returned; `unpatch()` undoes it. settings: as the constructor's.
        """
        if not isinstance(base, torch.nn.Module):
            return cls(base, adapters=adapters, **settings)
        if isinstance(base, Adapted):
            raise ValueError(f"base is a {type(base).__name__} already; add adapters with load_adapter(path, name)")
        if type(base) is not cls.plain:
            raise TypeError(
                f"base must be a folder, a Hub id or a {cls.plain.__name__}, got {type(base).__name__}; a subclass of "
                f"your own must inherit from {cls.__name__} itself"
            )
        _adapt(base, adapters, **settings)
        base.__class__ = cls
        return base

    def unpatch(self) -> Any:
        """Give the plain model back: same object, classes and weights, no trace of adapters."""
        self._lora_model.unpatch()
        expected = getattr(self[0], "model_forward_params", None)
        if expected is not None:
            expected.discard(NAMES)
        self.__class__ = self.plain
        return self

    @property
    def _lora_model(self) -> Any:
        return self[0].model

    # -- rows on their way ------------------------------------------------------------------------------------
    def _rows(
        self, inputs: Any, names: Any, name: Any, caller: str, unit: str, pool: Any, device: Any
    ) -> tuple[bool, list[Any], list[str | None] | None]:
        """(whether it was one input, the inputs as a list, an adapter for each or None where the call names none)."""
        if pool is not None or isinstance(device, (list, tuple)):
            raise NotImplementedError(POOLS)
        if inputs is None:
            raise TypeError(f"{caller} must get inputs")
        single = self.is_singular_input(inputs)
        if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "UO":
            inputs = inputs.tolist()
        rows = [inputs] if single else list(inputs)
        return single, rows, adapters_of(self._lora_model, len(rows), names, name, caller, unit)

    def is_singular_input(self, inputs: Any) -> bool:
        if isinstance(inputs, list) and inputs and isinstance(inputs[0], Row):
            return False
        return super().is_singular_input(inputs)

    @staticmethod
    def _input_length(sample: Any) -> int:
        return BaseModel._input_length(sample.value if isinstance(sample, Row) else sample)

    def preprocess(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """sentence-transformers' own; features of rows with adapters hold their names."""
        if not (isinstance(inputs, list) and inputs and isinstance(inputs[0], Row)):
            return super().preprocess(inputs, *args, **kwargs)
        features = super().preprocess([row.value for row in inputs], *args, **kwargs)
        features[NAMES] = [row.adapter for row in inputs]
        features[WIDTH] = inputs[0].width
        return features

    def __call__(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        if self._compiled_call_impl is None or NAMES not in input:
            return super().__call__(input, *args, **kwargs)
        with self._lora_model.adapters(input.pop(NAMES)):  # after compile() rows are routed outside the traced call
            return super().__call__(input, *args, **kwargs)

    def forward(self, input: Any, **kwargs: Any) -> Any:
        """sentence-transformers' own; scores are as wide as the call's widest head, -inf behind each row's own labels.

        A batch's scores are as wide as its own widest head; a compiled model's as the widest of all adapters.
        """
        width = input.pop(WIDTH, None)
        output = super().forward(input, **kwargs)
        output.pop(NAMES, None)
        if width is not None:
            scores = output["scores"][..., :width]
            output["scores"] = torch.nn.functional.pad(scores, (0, width - scores.shape[-1]), value=FILL)
        return output

    def start_multi_process_pool(self, *args: Any, **kwargs: Any) -> Any:
        """Not here: the processes of a pool hold copies, which see no later load_adapter or set_adapter."""
        raise NotImplementedError(POOLS)

    # -- adapters: load_adapter, delete_adapter, set_adapter, ... come from sentence-transformers, which asks the model
    def pin_adapter(self, adapter_name: str) -> None:
        """See MultiLoRAModel.pin_adapter."""
        self._lora_model.pin_adapter(adapter_name)

    def unpin_adapter(self, adapter_name: str) -> None:
        """See MultiLoRAModel.unpin_adapter."""
        self._lora_model.unpin_adapter(adapter_name)

    def list_adapters(self) -> list[dict[str, Any]]:
        """See MultiLoRAModel.list_adapters."""
        return self._lora_model.list_adapters()

    def memory_report(self) -> Any:
        """See MultiLoRAModel.memory_report."""
        return self._lora_model.memory_report()

    def verify(self, adapter_name: str, inputs: Mapping[str, Any] | None = None) -> Any:
        """See MultiLoRAModel.verify."""
        return self._lora_model.verify(adapter_name, inputs)

    def warmup(self, *args: Any, **kwargs: Any) -> Any:
        """See MultiLoRAModel.warmup."""
        return self._lora_model.warmup(*args, **kwargs)

    def active_adapter(self) -> list[str]:
        """The default adapter, if there is one."""
        return self._lora_model.active_adapters()

    def get_adapter_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Not here: adapters stay in their own files."""
        raise NotImplementedError("adapters stay in their own files: list_adapters() tells each one's source")


def _adapt(
    model: Any, adapters: Sequence[str] | Mapping[str, str], *, lora_backend: str = "auto", **settings: Any
) -> None:
    """Make the Transformers model inside a MultiLoRAModel, in place; on an error nothing is changed."""
    MultiLoRAModel.from_pretrained(_adaptable(model), adapters, backend=lora_backend, **settings)
    expected = getattr(model[0], "model_forward_params", None)  # arguments that reach a forward without **kwargs
    if expected is not None:
        expected.add(NAMES)


def _adaptable(model: Any) -> Any:
    """The one Transformers model inside. Raises NotImplementedError where rows could pass it by."""
    if model.backend != "torch":
        raise NotImplementedError(f'backend must be "torch" for adapters, got {model.backend!r}')
    if not isinstance(model[0], Transformer):
        raise NotImplementedError(f"the first module must be a Transformer, got a {type(model[0]).__name__}")
    more = [name for name, module in model.named_modules() if isinstance(module, Transformer)][1:]
    if more:
        raise NotImplementedError(f"adapters are for one Transformers model, modules {more} hold others")
    other = {key: how["method"] for key, how in model[0].modality_config.items() if how["method"] != "forward"}
    if other:
        raise NotImplementedError(
            f"inputs must go through the model's forward, which routes their rows, some go through others: {other}"
        )
    return model[0].model


def _fresh(transformer: Any) -> frozenset[str]:
    """Modules of a model just loaded that hold random values, as the checkpoint is an encoder's without a classifier:
    rows whose adapter brings none are refused.
    """
    model, suffix = transformer.model, "ForSequenceClassification"
    made_of = model.config.architectures
    if transformer.transformer_task != "sequence-classification" or not made_of or made_of[0].endswith(suffix):
        return frozenset()
    return frozenset(
        name
        for name, module in model.named_modules()
        if module._parameters and name.split(".")[0] not in ("", model.base_model_prefix)
    )
