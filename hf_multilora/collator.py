"""MultiLoRACollator: rows that name their adapter -> a padded batch with `adapter_ids`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .catalogue import BASE_NAMES, Catalogue


class MultiLoRACollator:
    """Tokenizes and pads rows and attaches one adapter id per row.

    A row is a mapping with "adapter" (a name, or None / "__base__"; absent: the base) or "adapter_ids" (an id), and
    either "text" (str), "messages" (chat turns, through the tokenizer's chat template) or tokenized fields
    ("input_ids", ...).

    Args:
        tokenizer: its own padding side and pad token are used.
        model: a MultiLoRAModel; only a snapshot of its names and ids is kept, so the collator can travel to workers.
            Adapters registered later are unknown to it.
        tokenize_kwargs: passed to the tokenizer for text and to the chat template.

    Returns (per call) a BatchEncoding of tensors, "adapter_ids" int64 [rows] (0: the base) among them. Raises
    UnknownAdapterError, and ValueError for a row that holds no text or tokens.
    """

    def __init__(self, tokenizer: Any, model: Any, **tokenize_kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.catalogue: Catalogue = model._multilora.store.catalogue.names_only()
        self.tokenize_kwargs = tokenize_kwargs

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        batch = self.tokenizer.pad([self._tokens(row) for row in rows], return_tensors="pt")
        batch["adapter_ids"] = torch.tensor([self._id(row) for row in rows], dtype=torch.int64)
        return batch

    def _id(self, row: Mapping[str, Any]) -> int:
        if "adapter" in row and "adapter_ids" in row:
            raise ValueError('a row must name its adapter once: "adapter" or "adapter_ids", not both')
        if "adapter_ids" in row:
            adapter_id = int(row["adapter_ids"])
            if adapter_id:
                self.catalogue.by_id(adapter_id)
            return adapter_id
        name = row.get("adapter")
        return 0 if name in BASE_NAMES else self.catalogue.ids_of([name])[0]

    def _tokens(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if "input_ids" in row:
            return {k: v for k, v in row.items() if k in self.tokenizer.model_input_names}
        if "messages" in row:
            return dict(
                self.tokenizer.apply_chat_template(
                    row["messages"], add_generation_prompt=True, tokenize=True, return_dict=True, **self.tokenize_kwargs
                )
            )
        if "text" in row:
            return dict(self.tokenizer(row["text"], **self.tokenize_kwargs))
        raise ValueError(f'a row must hold "text", "messages" or "input_ids", got {sorted(row)}')
