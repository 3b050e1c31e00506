"""Generative rerankers: how much likelier "yes" than "no" is as the next token of a prompt with query and document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# the prompt that Qwen3-Reranker was trained on
TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class Prompts:
    """Token ids of a template with {query}, {document} and perhaps {instruction}; only documents are cut to fit.

    Special tokens are those that the template spells, none is added. What comes after {document} is tokenized apart.
    """

    tokenizer: Any
    template: str
    instruction: str
    max_length: int

    def __post_init__(self) -> None:
        if self.template.count("{document}") != 1 or "{query}" not in self.template:
            raise ValueError(f"template must hold {{document}} once, and {{query}}, got {self.template!r}")

    def ids(self, query: str, document: str) -> list[int]:
        """Raises ValueError where all but the document is longer than max_length already."""
        before, after = (part.format(query=query, instruction=self.instruction) for part in self._parts())
        tail = self._tokens(after)
        tokens, room = self._tokens(before + document), self.max_length - len(tail)
        if len(tokens) > room and len(self._tokens(before)) >= room:
            raise ValueError(
                f"a prompt must leave room for its document in max_length={self.max_length} tokens, query, instruction "
                f"and template have {len(self._tokens(before)) + len(tail)}"
            )
        return tokens[:room] + tail

    def _parts(self) -> tuple[str, str]:
        before, after = self.template.split("{document}")
        return before, after

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def padded(rows: Sequence[Sequence[int]], pad: int, side: str) -> dict[str, Tensor]:
    """input_ids and attention_mask, int64 [rows, longest]."""
    ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    how: dict[str, Any] = {"batch_first": True, "padding_side": side}
    mask = [torch.ones_like(row) for row in ids]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(ids, padding_value=pad, **how),
        "attention_mask": torch.nn.utils.rnn.pad_sequence(mask, padding_value=0, **how),
    }


def token_id(tokenizer: Any, token: str | int) -> int:
    """The id of an answer. Raises ValueError where it is not one known token."""
    if isinstance(token, int):
        return token
    found = tokenizer(token, add_special_tokens=False)["input_ids"]
    if len(found) != 1 or found[0] == tokenizer.unk_token_id:
        raise ValueError(f"an answer must be one token that the tokenizer knows, {token!r} is {found}; pass its id")
    return int(found[0])


def answer_logits(model: Any, batch: dict[str, Any], tokens: Sequence[int], names: Any) -> Tensor:
    """Logits [rows, len(tokens)] of some tokens at the last position of a batch that is padded on the left.

    Only their rows of the output head are multiplied, where the head is a plain linear that no adapter trains. Scales
    and caps of the architecture still apply, as its own forward runs.
    """
    runtime, mask = model._multilora, batch["attention_mask"]
    batch = batch | {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "logits_to_keep": 1, "use_cache": False}
    arguments = {name: value for name, value in batch.items() if name in runtime.parameters}
    head = model.get_output_embeddings()
    with runtime.lock:  # other threads' calls must not meet the cut head
        cut = is_plain(head) and model._compiled_call_impl is None
        if cut:
            head.forward = partial(_some_rows, head, torch.tensor(tokens, device=head.weight.device))
        try:
            logits = model(**arguments, adapter_names=names).logits[:, -1]
        finally:
            if cut:
                del head.forward
    return logits if cut and logits.shape[-1] == len(tokens) else logits[:, list(tokens)]


def is_plain(head: nn.Module) -> bool:
    """Whether the head's output is its weight's rows times its input, and its bias: no adapter, hook or own forward."""
    hooks = [*head._forward_hooks, *head._forward_pre_hooks]
    return type(head) is nn.Linear and not hooks and not {"forward", "_hf_hook"} & vars(head).keys()


def _some_rows(head: nn.Linear, rows: Tensor, hidden: Tensor) -> Tensor:
    return nn.functional.linear(hidden, head.weight[rows], None if head.bias is None else head.bias[rows])
