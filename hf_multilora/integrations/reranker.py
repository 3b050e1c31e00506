"""Rerankers on plain Transformers: classifiers of pairs, and language models that answer yes or no."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .scoring import Activation, adapters_of, convert, finish, plain_activation, ranked, require_one_score, widths_of
from .yes_no import INSTRUCTION, TEMPLATE, Prompts, answer_logits, padded, token_id

Pair = Sequence[str]  # query and document


class Reranker:
    """Scores pairs of query and document, each with its adapter.

    Args:
        model: a MultiLoRAModel of a sequence-classification model, or of a decoder that answers "yes" or "no" (as
            Qwen3-Reranker does): its logit is that of yes minus that of no, so that Sigmoid gives the probability of
            yes among the two.
        tokenizer: the model's.
        activation_fn: applied to logits. None: what the base's config names, else Sigmoid for one label; for heads of
            adapters with another number of labels than the base, Sigmoid where that is one.
        max_length: tokens of a row at most; None: what tokenizer and model allow.
        template: text with {query}, {document} and perhaps {instruction}. None: the tokenizer's form for a pair with a
            classifier, Qwen3-Reranker's prompt else.
        instruction: for the template. None: Qwen3-Reranker's, for web search.
        yes, no: the answers, one token each, or their ids.

    Raises TypeError for other models, ValueError for settings that the model has no use for or that do not fit.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, activation_fn: Activation | None = None, max_length: int | None = None,
        template: str | None = None, instruction: str | None = None, yes: str | int | None = None,
        no: str | int | None = None,
    ) -> None:  # fmt: skip
        if getattr(model, "_multilora", None) is None:
            raise TypeError(
                f"model must be a MultiLoRAModel, got {type(model).__name__}: see MultiLoRAModel.from_pretrained"
            )
        name, config = type(model).__name__, model.config
        self.generative = not name.endswith("ForSequenceClassification")
        if self.generative and (not model.can_generate() or config.is_encoder_decoder):
            raise TypeError(f"model must be a ...ForSequenceClassification or a decoder that generates, got {name}")
        self.model, self.tokenizer, self.activation_fn = model, tokenizer, activation_fn
        limits = (
            max_length,
            tokenizer.model_max_length,
            getattr(config.get_text_config(), "max_position_embeddings", 0),
        )
        self.max_length = int(min(limit for limit in limits if limit is not None and limit > 0))
        if self.generative:
            self.answers = tuple(
                token_id(tokenizer, a) for a in ("no" if no is None else no, "yes" if yes is None else yes)
            )
            template = TEMPLATE if template is None else template
        elif yes is not None or no is not None:
            raise ValueError(f"yes and no are answers of language models, {name} is a classifier")
        else:
            _require_padding(config, tokenizer)
        if template is None and instruction is not None:
            raise ValueError("instruction must have a template that holds it")
        instruction = INSTRUCTION if instruction is None else instruction
        self.prompts = None if template is None else Prompts(tokenizer, template, instruction, self.max_length)

    @torch.inference_mode()
    def predict(
        self, pairs: Sequence[Pair] | Pair, adapter_names: Sequence[str | None] | None = None,
        adapter_name: str | None = None, batch_size: int = 32, activation_fn: Activation | None = None,
        apply_softmax: bool = False, show_progress_bar: bool = False, convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
    ) -> Any:  # fmt: skip
        """Scores of pairs, as CrossEncoder.predict returns them: [pairs], or [pairs, labels] from heads with several.

        Args:
            pairs: (query, document) each, or one such pair, whose score is then returned.
            adapter_names: one name per pair; None or "__base__" for the base.
            adapter_name: one for all pairs. Without either: the default adapter (set_adapter).
            apply_softmax: over the labels of heads with several.
            convert_to_numpy, convert_to_tensor: float32 array, tensor, or with neither a list of tensors. Rows with
                different numbers of labels always come as a list, each at its own width.

        Raises before any work: UnknownAdapterError, RoutingError for another number of names than pairs, TypeError for
        what is no pair of texts.
        """
        single = len(pairs) > 0 and isinstance(pairs[0], str)
        rows: list[Any] = [pairs] if single else list(pairs)
        odd = next((row for row in rows if len(row) != 2 or not all(isinstance(text, str) for text in row)), None)
        if odd is not None:
            raise TypeError(f"a pair must be two texts, query and document, got {odd!r}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        names = adapters_of(self.model, len(rows), adapter_names, adapter_name, "predict", "pair")
        widths = self._widths(names, len(rows))
        self.model.eval()
        order = sorted(range(len(rows)), key=lambda i: -sum(map(len, rows[i])))
        logits: dict[int, Tensor] = {}
        starts = range(0, len(order), batch_size)
        for start in logging.tqdm(starts, desc="Batches", disable=not show_progress_bar):
            at = order[start : start + batch_size]
            some = self._logits([rows[i] for i in at], None if names is None else [names[i] for i in at])
            logits |= {i: row[: widths[i]] for i, row in zip(at, some, strict=True)}
        scores = finish(
            [logits[i] for i in range(len(rows))], lambda w: self._activation(activation_fn, w), apply_softmax
        )
        scores = convert(scores, convert_to_numpy, convert_to_tensor, self.model.device)
        return scores[0] if single else scores

    def rank(
        self, query: str, documents: Sequence[str], adapter_name: str | None = None, top_k: int | None = None,
        return_documents: bool = False, batch_size: int = 32, activation_fn: Activation | None = None,
        show_progress_bar: bool = False,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """The best top_k documents, best first: {"corpus_id": place in documents, "score": float}, with
        return_documents also "text". Raises ValueError where the adapter's head has more than one label.
        """
        adapters_of(self.model, len(documents), None, adapter_name, "rank", "document")
        (width,) = self._widths(None if adapter_name is None else [adapter_name], 1)
        require_one_score(self.model._multilora.default if adapter_name is None else adapter_name, width)
        scores = self.predict(
            [(query, document) for document in documents], adapter_name=adapter_name, batch_size=batch_size,
            activation_fn=activation_fn, show_progress_bar=show_progress_bar, convert_to_tensor=True,
        )  # fmt: skip
        return ranked(scores.tolist(), documents, top_k, return_documents)

    def _logits(self, pairs: Sequence[Pair], names: Sequence[str | None] | None) -> Tensor:
        """[pairs, widest head] of one batch."""
        runtime, tokenizer = self.model._multilora, self.tokenizer
        pad = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if self.prompts is not None:
            side = "left" if self.generative else "right"
            batch: Any = padded([self.prompts.ids(*pair) for pair in pairs], pad, side)
        else:  # positions count from the first column, unless the model is told others
            side = "right" if "position_ids" in runtime.parameters else tokenizer.padding_side
            batch = tokenizer(
                [query for query, _ in pairs], [document for _, document in pairs], padding=True, padding_side=side,
                truncation=True, max_length=self.max_length, return_tensors="pt",
            )  # fmt: skip
        batch = {name: value.to(self.model.device) for name, value in batch.items()}
        if self.generative:
            no, yes = answer_logits(self.model, batch, self.answers, names).float().unbind(-1)
            return (yes - no)[:, None]
        known = {name: value for name, value in (batch | {"use_cache": False}).items() if name in runtime.parameters}
        return self.model(**known, adapter_names=names).logits

    def _widths(self, names: Sequence[str | None] | None, rows: int) -> list[int]:
        if self.generative:
            return [1] * rows
        return widths_of(self.model, [self.model._multilora.default] * rows if names is None else names)

    def _activation(self, given: Activation | None, width: int) -> Activation:
        given = self.activation_fn if given is None else given
        if given is not None:
            return given
        same = not self.generative and width == self.model.config.num_labels
        return _configured(self.model.config, width) if same else plain_activation(width)


def _configured(config: Any, width: int) -> Activation:
    """The activation that sentence-transformers wrote into a base's config, else its default."""
    named = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    if named is None:
        return plain_activation(width)
    found = getattr(nn, named.rsplit(".", 1)[-1], None) if named.startswith("torch.nn.") else None
    if found is None:
        raise ValueError(
            f"the base's config names the activation {named!r}, which torch.nn has not: pass activation_fn"
        )
    return found()


def _require_padding(config: Any, tokenizer: Any) -> None:
    """Decoders take a row's last token for the one before padding, and some encoders count positions by it."""
    if tokenizer.pad_token_id is None or config.pad_token_id not in (None, tokenizer.pad_token_id):
        raise ValueError(
            f"tokenizer and model must pad with the same token, got ids {tokenizer.pad_token_id} and "
            f"{config.pad_token_id}: set tokenizer.pad_token and model.config.pad_token_id"
        )
