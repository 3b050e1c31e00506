"""MultiLoRACollator: rows that name their adapter -> a padded batch with `adapter_ids`."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .catalogue import Catalogue, UnknownAdapterError


class Batch(dict[str, torch.Tensor]):
    """Tensors of a batch by name. A real dict: accelerate's `split_between_processes` leaves a BatchEncoding whole."""

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Batch:
        return Batch({name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.items()})


class MultiLoRACollator:
    """Tokenizes and pads rows and attaches one adapter id per row.

    A row is a mapping with "adapter" (a name, or None / "__base__") or "adapter_ids" (an id, 0 for the base), and with
    either "text" (str, and "text_pair" beside it where the model reads pairs), "messages" (chat turns, through the
    tokenizer's chat template) or tokenized fields ("input_ids", ...). "label" or "labels" comes along: a number, or one
    per token of the row (padded with -100); for an encoder-decoder a target of any length, token ids or a str (padded
    with -100 on the right; the model makes its decoder inputs from it). Other fields are left out.

    Args:
        tokenizer: its own padding side and pad token are used.
        model: a MultiLoRAModel; only a snapshot of its names and ids is kept, so the collator can travel to workers.
            Adapters registered later are unknown to it.
        tokenize_kwargs: passed to the tokenizer for texts and targets and to the chat template.

    Returns (per call) a Batch of tensors, "adapter_ids" int64 [rows] (0: the base) among them. Raises
    UnknownAdapterError, and ValueError for a row that names no adapter or holds no text or tokens: `Trainer` takes away
    the fields that the model's forward does not have, unless it is told remove_unused_columns=False.
    """

    def __init__(self, tokenizer: Any, model: Any, **tokenize_kwargs: Any) -> None:
        runtime = getattr(model, "_multilora", None)
        if runtime is None:
            raise TypeError(
                f"MultiLoRACollator(tokenizer, model): model must be a MultiLoRAModel, got {type(model).__name__}"
            )
        self.tokenizer = tokenizer
        self.catalogue: Catalogue = runtime.store.catalogue.names_only()
        self.tokenize_kwargs = tokenize_kwargs
        self.targets = bool(getattr(model.config, "is_encoder_decoder", False))  # labels are sequences of their own

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        ids = [self._id(row) for row in rows]
        tokens = [self._tokens(row) for row in rows]
        batch = Batch(self.tokenizer.pad(tokens, return_tensors="pt"))
        batch["adapter_ids"] = torch.tensor(ids, dtype=torch.int64)
        labels = [row.get("labels", row.get("label")) for row in rows]
        if any(label is not None for label in labels):
            batch["labels"] = self._labels(labels, [len(row["input_ids"]) for row in tokens])
        return batch

    def _id(self, row: Mapping[str, Any]) -> int:
        if ("adapter" in row) == ("adapter_ids" in row):
            raise ValueError(
                f'a row must name its adapter once, in "adapter" (None for the base) or "adapter_ids", got '
                f"{sorted(row)}; with Trainer pass remove_unused_columns=False, which keeps these fields"
            )
        if "adapter" in row:
            try:
                return self.catalogue.ids_of([row["adapter"]])[0]
            except UnknownAdapterError as error:
                raise UnknownAdapterError(f"{error}; this collator knows the names from when it was made") from None
        value = row["adapter_ids"]
        adapter_id = value.item() if isinstance(value, torch.Tensor) else value
        if isinstance(adapter_id, bool) or not hasattr(adapter_id, "__index__"):
            raise TypeError(f'"adapter_ids" of a row must be an integer, got {value!r}')
        adapter_id = operator.index(adapter_id)
        if adapter_id:
            self.catalogue.by_id(adapter_id)
        return adapter_id

    def _labels(self, labels: Sequence[Any], lengths: Sequence[int]) -> torch.Tensor:
        """A number per row [rows], or one per token [rows, tokens], or a target per row [rows, longest target]."""
        rows = [torch.as_tensor(self._target(label)) for label in labels if label is not None]
        dims, complete = {row.dim() for row in rows}, len(rows) == len(labels)
        if complete and dims == {0}:
            return torch.stack(rows)
        shapes = [tuple(row.shape) for row in rows]
        if complete and dims == {1} and (self.targets or shapes == [(length,) for length in lengths]):
            side = "right" if self.targets else self.tokenizer.padding_side
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100, padding_side=side)
        per_token = "a target" if self.targets else "one per token"
        raise ValueError(
            f"labels must be a number or {per_token} in every row, got shapes {shapes} for {len(labels)} rows of "
            f"{list(lengths)} tokens"
        )

    def _target(self, label: Any) -> Any:
        if not isinstance(label, str):
            return label
        if not self.targets:
            raise TypeError(f"labels must be numbers where the model has no decoder of its own, got {label!r}")
        return self.tokenizer(text_target=label, **self.tokenize_kwargs)["input_ids"]

    def _tokens(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if "input_ids" in row:
            tokens = {k: v for k, v in row.items() if k in self.tokenizer.model_input_names}
            return {"attention_mask": [1] * len(row["input_ids"]), **tokens}
        if "messages" in row:
            return dict(
                self.tokenizer.apply_chat_template(
                    row["messages"], add_generation_prompt=True, tokenize=True, return_dict=True, **self.tokenize_kwargs
                )
            )
        if "text" in row:
            return dict(self.tokenizer(row["text"], row.get("text_pair"), **self.tokenize_kwargs))
        raise ValueError(f'a row must hold "text", "messages" or "input_ids", got {sorted(row)}')
