"""What is mixed in front of a pipeline's class, so that its calls take one adapter per input.

An input's adapter id travels beside its tensors: `preprocess` attaches it as int64 [1], batches concatenate it to
[rows], and `forward` routes with it. A classifier's outputs carry the labels of each row's adapter to `postprocess`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping, MutableMapping, Set
from typing import Any

import torch
from transformers.utils.chat_template_utils import is_valid_message

from ..calls import TYPOS
from ..model import MultiLoRAModel
from ..runtime import Runtime
from .pipeline_rows import SOME, Namer, Row, SizedRows, first_row, named_twice, names_adapter, split

IDS = "adapter_ids"  # among a pipeline's parameters, and its inputs: int64 [rows], 0 for the base
LABELS = "adapter_labels"  # among a classifier's outputs: id -> name, one for each row
# Pipelines whose _forward calls the model, or its generate, once and with the rows of its inputs: the ids go with that
# call, which may then run in passes. All others run inside a request for the ids of their batch.
ONE_CALL = frozenset({
    "TextClassificationPipeline", "TokenClassificationPipeline", "ZeroShotClassificationPipeline", "FillMaskPipeline",
    "FeatureExtractionPipeline", "TextGenerationPipeline", "ImageClassificationPipeline",
})  # fmt: skip
# Pipelines whose logits [rows, ..., labels] are those of a head that an adapter may bring with it
LABELLED = frozenset({
    "TextClassificationPipeline", "TokenClassificationPipeline", "ZeroShotClassificationPipeline",
    "ImageClassificationPipeline", "AudioClassificationPipeline", "VideoClassificationPipeline",
})  # fmt: skip


class RowPipeline:
    """Mixed in front of a pipeline's own class. Keeps nothing between calls."""

    model: Any

    def __call__(self, *args: Any, adapter_names: Any = None, **kwargs: Any) -> Any:
        """The pipeline's own call; adapter_names: see `hf_multilora.integrations.pipelines`."""
        refuse_names(kwargs, "adapter_names is a list with one name per input, or one name for all")
        call = super().__call__  # type: ignore[misc]
        first = next(iter(inspect.signature(call).parameters))
        inputs = args[0] if args else kwargs.get(first)
        several = isinstance(inputs, list) and bool(inputs) and not is_valid_message(inputs[0])
        items: Any = inputs if several else [inputs]
        table = names_adapter(first_row(inputs))
        if table or any(names_adapter(item) for item in items):
            if adapter_names is not None:
                raise named_twice()
            if table:  # Transformers would take one of the datasets library for a single input
                inputs = SizedRows(Namer(None, self._id), inputs)
            else:
                pairs = [split(item, i) for i, item in enumerate(items)]
                inputs, adapter_names = [value for value, _ in pairs], [name for _, name in pairs]
                inputs = inputs if several else inputs[0]
        if args:
            args = (inputs, *args[1:])
        elif first in kwargs:
            kwargs[first] = inputs
        if isinstance(adapter_names, str):
            kwargs[IDS] = self._id(adapter_names)
        elif adapter_names is not None:
            kwargs[IDS] = self._runtime().resolve(adapter_names, None)
        return call(*args, **kwargs)

    def _sanitize_parameters(self, adapter_ids: int | list[int] | None = None, **kwargs: Any) -> Any:
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)  # type: ignore[misc]
        return preprocess if adapter_ids is None else {**preprocess, IDS: adapter_ids}, forward, postprocess

    def run_single(self, inputs: Any, preprocess_params: Mapping[str, Any], *params: Any) -> Any:
        rest, namer = self._namer(preprocess_params)
        (row,) = namer.rows([inputs])
        return super().run_single(row, rest, *params)  # type: ignore[misc]

    def get_iterator(
        self, inputs: Any, num_workers: int, batch_size: int, preprocess_params: Mapping[str, Any], *params: Any
    ) -> Any:
        rest, namer = self._namer(preprocess_params)
        return super().get_iterator(namer.rows(inputs), num_workers, batch_size, rest, *params)  # type: ignore[misc]

    def preprocess(self, inputs: Any, *args: Any, **params: Any) -> Any:
        if names_adapter(inputs):
            raise ValueError(f"{SOME}, got one that does, {sorted(inputs)}, after one that does not")
        value = inputs.value if isinstance(inputs, Row) else inputs
        made = super().preprocess(value, *args, **params)  # type: ignore[misc]
        if not isinstance(inputs, Row):
            return made
        attach = functools.partial(_attach, adapter_id=inputs.adapter_id)
        return map(attach, made) if isinstance(made, Iterator) else attach(made)

    def forward(self, model_inputs: Any, **params: Any) -> Any:
        runtime = self._runtime()
        ids = model_inputs.pop(IDS, None)
        if not _any_of(type(self), LABELLED):
            return self._forward_rows(model_inputs, ids, params)
        with runtime.lock:  # the labels must be those of what answers
            outputs = self._forward_rows(model_inputs, ids, params)
            rows = _standing(runtime, outputs) if ids is None else ids.tolist()
            if rows is not None:
                names = {i: runtime.store.catalogue.by_id(i).name if i else None for i in rows}
                labels = {i: self.model.id2label(name) for i, name in names.items()}
                if not isinstance(outputs, MutableMapping):
                    raise TypeError(
                        f"a classifier's outputs must be named, got a {type(outputs).__name__}; set "
                        f"model.config.return_dict = True"
                    )
                outputs[LABELS] = [labels[i] for i in rows]
        return outputs

    def _forward_rows(self, model_inputs: Any, ids: torch.Tensor | None, params: Mapping[str, Any]) -> Any:
        kind = type(self).__bases__[1]
        if ids is None:
            return super().forward(model_inputs, **params)  # type: ignore[misc]
        if kind.__name__ in ONE_CALL and kind.__module__.startswith("transformers."):
            seen = self._copy(_Seen(self.model, ids=ids))
            return super(RowPipeline, seen).forward(model_inputs, **params)  # type: ignore[misc]
        runtime = self._runtime()
        with runtime.request(runtime.resolve(None, ids) or []):
            return super().forward(model_inputs, **params)  # type: ignore[misc]

    def postprocess(self, model_outputs: Any, *args: Any, **params: Any) -> Any:
        chunks = model_outputs if isinstance(model_outputs, list) else [model_outputs]
        labels = next((chunk[LABELS] for chunk in chunks if isinstance(chunk, Mapping) and LABELS in chunk), None)
        if labels is None:
            return super().postprocess(model_outputs, *args, **params)  # type: ignore[misc]
        (labels,) = labels if isinstance(labels, list) else [labels]  # a list where batch_size is 1
        if isinstance(params.get("top_k"), int):  # audio: not more than the base has labels, by its own rule
            params["top_k"] = min(params["top_k"], len(labels))
        for chunk in chunks:
            chunk["logits"] = chunk["logits"][..., : len(labels)]
        seen = self._copy(_Seen(self.model, config=_with_labels(self.model.config, labels)))
        return super(RowPipeline, seen).postprocess(model_outputs, *args, **params)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle through the pipeline's own class: the mixed class has no import path of its own."""
        return rebuild_pipeline, (type(self).__bases__[1],), self.__dict__

    # -- helpers ---------------------------------------------------------------------------------------------
    def _runtime(self) -> Runtime:
        if not isinstance(self.model, MultiLoRAModel):
            raise TypeError(f"the pipeline's model must be a MultiLoRAModel, got a {type(self.model).__name__}")
        return self.model._multilora

    def _id(self, name: str | None) -> int:
        ids = self._runtime().resolve([name], None)
        assert ids is not None
        return ids[0]

    def _namer(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], Namer]:
        """The parameters of `preprocess`, and what gives its inputs their ids."""
        return {key: value for key, value in params.items() if key != IDS}, Namer(params.get(IDS), self._id)

    def _copy(self, model: Any) -> Any:
        """This pipeline with something else for its model; threads that share the pipeline do not see it."""
        seen = object.__new__(type(self))
        seen.__dict__.update(self.__dict__, model=model)
        return seen


class _Seen:
    """What a copy of a pipeline sees for its model: the model, called with these ids, or with another config."""

    def __init__(self, model: Any, ids: torch.Tensor | None = None, config: Any = None) -> None:
        self._model, self._ids, self.config = model, ids, model.config if config is None else config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, adapter_ids=self._ids, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.generate(*args, adapter_ids=self._ids, **kwargs)


@functools.cache
def mix_pipeline(base: type) -> type:
    """RowPipeline + a pipeline's class, under the name and module of the latter."""
    body = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (RowPipeline, base), body)


def rebuild_pipeline(base: type) -> Any:
    mixed: Any = mix_pipeline(base)
    return mixed.__new__(mixed)


def refuse_names(kwargs: Mapping[str, Any], remedy: str) -> None:
    """Raises TypeError for what a pipeline would hand to its tokenizer, or drop, and the rows get the base."""
    wrong = sorted(kwargs.keys() & {*TYPOS, "adapter_names", IDS})
    if wrong:
        raise TypeError(f"a pipeline takes its adapters as adapter_names, got {wrong}; {remedy}")


def _attach(made: Any, adapter_id: int) -> Any:
    made[IDS] = torch.tensor([adapter_id])
    return made


def _standing(runtime: Runtime, outputs: Any) -> list[int] | None:
    """Ids of the rows of a call that named none: those of the open block, else of the default; None: the base."""
    if runtime.routing.open:
        seated = {slot: adapter_id for adapter_id, slot in runtime.store.slots.items()}
        return [seated.get(slot, 0) for slot in runtime.routing.stack[-1].slots]
    if runtime.default is None:
        return None
    return [runtime.store.catalogue.entry(runtime.default).id] * len(outputs["logits"])


def _with_labels(config: Any, labels: Mapping[int, str]) -> Any:
    """The config with an adapter's labels. The base's problem is taken for the adapter's too, but for a regression of
    another width: Transformers sets that by itself where a base of one label is given labels."""
    if labels == config.id2label:
        return config
    own = copy.copy(config)
    own.id2label, own.label2id = dict(labels), {label: i for i, label in labels.items()}
    if config.problem_type == "regression" and config.num_labels != len(labels):
        own.problem_type = None
    return own


def _any_of(cls: type, names: Set[str]) -> bool:
    return any(base.__name__ in names for base in cls.__mro__)
