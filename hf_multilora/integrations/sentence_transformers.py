"""sentence-transformers' CrossEncoder and SentenceTransformer with adapters chosen row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .scoring import (
    Activation,
    convert,
    finish,
    plain_activation,
    ranked,
    refuse_typos,
    require_one_score,
    widths_of,
)
from .wrapper import Adapted, Row

# the import of .wrapper has told what to install where it is missing
from sentence_transformers import CrossEncoder, SentenceTransformer  # isort: skip


class MultiLoRACrossEncoder(Adapted, CrossEncoder):
    """CrossEncoder whose pairs each have an adapter: `predict(pairs, adapter_names=[...])`, `rank(..., adapter_name=)`.

    Adapters may have heads of their own, with other numbers of labels than the base. `load_adapter`, `delete_adapter`,
    `set_adapter`, `pin_adapter`, `list_adapters`, ... are those of MultiLoRAModel, which `.model` is.
    """

    plain = CrossEncoder

    @torch.inference_mode()
    def predict(
        self, inputs: Any = None, prompt_name: str | None = None, prompt: str | None = None, batch_size: int = 32,
        show_progress_bar: bool | None = None, activation_fn: Callable | None = None,
        apply_softmax: bool | None = False, convert_to_numpy: bool = True, convert_to_tensor: bool = False,
        device: Any = None, pool: Any = None, chunk_size: int | None = None, *,
        adapter_names: Sequence[str | None] | None = None, adapter_name: str | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """CrossEncoder.predict, each pair with its adapter.

        Args:
            adapter_names: one name per pair; None or "__base__" for the base.
            adapter_name: one for all pairs ("__base__": the base). Without either: the default adapter (set_adapter).
            activation_fn: None: the model's own; for rows whose head has another number of labels than the base,
                Sigmoid where that is one, else none.

        Returns what CrossEncoder does for a model with the rows' own head. Where rows have different numbers of labels:
        a list, each row at its own width (a number where that is one), as arrays, or as tensors with
        convert_to_numpy=False or convert_to_tensor=True; activation and softmax are applied per own width. Raises
        before any work: UnknownAdapterError, RoutingError for another number of names than pairs, NotImplementedError
        for pools of processes.
        """
        refuse_typos(kwargs, "predict", "pair")
        inputs = kwargs.pop("sentences", None) if inputs is None else inputs
        activation_fn = kwargs.pop("activation_fct", None) if activation_fn is None else activation_fn
        single, pairs, names = self._rows(inputs, adapter_names, adapter_name, "predict", "pair", pool, device)
        given = [self._lora_model._multilora.default] * len(pairs) if names is None else names
        widths = self._widths(given)
        rows = [Row(*both, max(widths)) for both in zip(pairs, given, strict=True)]
        options: dict[str, Any] = {"prompt_name": prompt_name, "prompt": prompt, "batch_size": batch_size}
        options |= {"show_progress_bar": show_progress_bar, "device": device, **kwargs}
        if set(widths) <= {self.num_labels}:
            scores = super().predict(
                rows, activation_fn=activation_fn, apply_softmax=apply_softmax, convert_to_numpy=convert_to_numpy,
                convert_to_tensor=convert_to_tensor, **options,
            )  # fmt: skip
        else:
            logits = super().predict(rows, activation_fn=nn.Identity(), convert_to_tensor=True, **options)
            cut = [row[:width] for row, width in zip(logits.reshape(len(rows), -1), widths, strict=True)]
            done = finish(cut, lambda width: self._activation(activation_fn, width), bool(apply_softmax))
            scores = convert(done, convert_to_numpy, convert_to_tensor, self.device)
        return scores[0] if single else scores

    def rank(
        self, query: Any, documents: Sequence[Any], top_k: int | None = None, return_documents: bool = False,
        prompt_name: str | None = None, prompt: str | None = None, batch_size: int = 32,
        show_progress_bar: bool | None = None, activation_fn: Callable | None = None, device: Any = None,
        pool: Any = None, chunk_size: int | None = None, *, adapter_name: str | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """CrossEncoder.rank with an adapter ("__base__": the base; None: the default adapter), whose head must have one
        label: else ValueError."""
        pairs = [[query, document] for document in documents]
        self._rows(pairs, None, adapter_name, "rank", "document", pool, device)
        ranking = self._lora_model._multilora.default if adapter_name is None else adapter_name
        require_one_score(ranking, *self._widths([ranking]))
        scores = self.predict(
            pairs, prompt_name, prompt, batch_size, show_progress_bar, activation_fn, convert_to_tensor=True,
            device=device, pool=pool, chunk_size=chunk_size, adapter_name=adapter_name,
        )  # fmt: skip
        return ranked(scores.tolist(), documents, top_k, return_documents)

    def _widths(self, names: Sequence[str | None]) -> list[int]:
        """Labels of each row; all as the base's where the scores come from another module than the model's head."""
        return widths_of(self._lora_model, names) if self[-1] is self[0] else [self.num_labels] * len(names)

    def _activation(self, given: Callable | None, width: int) -> Activation:
        if given is not None:
            return given
        return self.activation_fn if width == self.num_labels else plain_activation(width)


class MultiLoRASentenceTransformer(Adapted, SentenceTransformer):
    """SentenceTransformer whose inputs each have an adapter: `encode(sentences, adapter_names=[...])`, and so
    `encode_query` and `encode_document`. The verbs are those of MultiLoRAModel, as for MultiLoRACrossEncoder.
    """

    plain = SentenceTransformer

    def encode(
        self, inputs: Any = None, prompt_name: str | None = None, prompt: str | None = None, batch_size: int = 32,
        show_progress_bar: bool | None = None, output_value: Any = "sentence_embedding", precision: Any = "float32",
        convert_to_numpy: bool = True, convert_to_tensor: bool = False, device: Any = None,
        normalize_embeddings: bool = False, truncate_dim: int | None = None, pool: Any = None,
        chunk_size: int | None = None, *, adapter_names: Sequence[str | None] | None = None,
        adapter_name: str | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """SentenceTransformer.encode, each input with its adapter.

        adapter_names: one name per input; None or "__base__" for the base. adapter_name: one for all ("__base__": the
        base). Without either: the default adapter (set_adapter). All else is sentence-transformers'. Raises before any
        work: UnknownAdapterError, RoutingError for another number of names than inputs, NotImplementedError for pools
        of processes.
        """
        inputs = kwargs.pop("sentences", None) if inputs is None else inputs
        single, rows, names = self._rows(inputs, adapter_names, adapter_name, "encode", "input", pool, device)
        if names is not None:
            rows = [Row(*both) for both in zip(rows, names, strict=True)]
        embeddings = super().encode(
            rows, prompt_name=prompt_name, prompt=prompt, batch_size=batch_size, show_progress_bar=show_progress_bar,
            output_value=output_value, precision=precision, convert_to_numpy=convert_to_numpy,
            convert_to_tensor=convert_to_tensor, device=device, normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim, **kwargs,
        )  # fmt: skip
        return embeddings[0] if single else embeddings


__all__ = ["MultiLoRACrossEncoder", "MultiLoRASentenceTransformer"]
