"""The same prompts with the base and with adapters, side by side."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .catalogue import BASE_NAMES
from .display import html_table, text_table
from .passes import plan_passes, setting
from .routing import RoutingError
from .runtime import Runtime

BASE = "__base__"
CUT = "\N{HORIZONTAL ELLIPSIS}"  # after a text that its limit ended
MAX_NEW_TOKENS = 40


@dataclass(frozen=True)
class Comparison:
    """answers[i][j] is what prompt i got with adapters[j] ("__base__": the base).

    Of a model that generates: "text" and "finished" (False: the limit ended it). Of a classifier: "label" and
    "probability"; with several labels at once "labels" and "probabilities"; of a head with one output: "score".
    """

    prompts: tuple[str, ...]
    adapters: tuple[str, ...]
    answers: tuple[tuple[Mapping[str, Any], ...], ...]

    def rows(self) -> list[dict[str, Any]]:
        """One dict per prompt and adapter: "prompt", "adapter" and the answer; pandas.DataFrame takes them."""
        return [
            {"prompt": prompt, "adapter": name, **answer}
            for prompt, answers in zip(self.prompts, self.answers, strict=True)
            for name, answer in zip(self.adapters, answers, strict=True)
        ]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows())

    def __len__(self) -> int:
        return len(self.prompts) * len(self.adapters)

    def __str__(self) -> str:
        return text_table(*self._table(), shutil.get_terminal_size().columns)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows as text."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return html_table(*self._table())

    def _table(self) -> tuple[list[str], list[list[str]]]:
        header = ["prompt", *("base" if name == BASE else name for name in self.adapters)]
        pairs = zip(self.prompts, self.answers, strict=True)
        return header, [[prompt, *map(shown, answers)] for prompt, answers in pairs]


def shown(answer: Mapping[str, Any]) -> str:
    """An answer as a cell shows it."""
    if "text" in answer:
        return f"{answer['text']}{'' if answer['finished'] else CUT}"
    if "label" in answer:
        return f"{answer['label']} {answer['probability']:.0%}"
    if "labels" in answer:
        found = zip(answer["labels"], answer["probabilities"], strict=True)
        return ", ".join(f"{label} {chance:.0%}" for label, chance in found) or "none"
    return f"{answer['score']:.2f}"


def compare(
    model: Any,
    prompts: Any,
    adapters: Sequence[str | None] | None,
    tokenizer: Any,
    max_new_tokens: int | None,
    batch_size: int,
    generate_kwargs: Mapping[str, Any],
) -> Comparison:
    """See MultiLoRAModel.compare."""
    runtime: Runtime = model._multilora
    items = _prompts(prompts)
    names = _names(runtime, adapters)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}")
    _check_tokenizer(tokenizer)
    generates = bool(model.can_generate())
    if not generates and (max_new_tokens is not None or generate_kwargs):
        given = sorted([*generate_kwargs, *(["max_new_tokens"] if max_new_tokens is not None else [])])
        raise TypeError(f"{type(model).__name__} does not generate, so compare takes no arguments of generate: {given}")
    tokens = [_tokens(item, tokenizer, pairs=not generates) for item in items]
    rows = [(i, name) for name in names for i in range(len(items))]
    ids = runtime.store.catalogue.ids_of(name for _, name in rows)
    answers: dict[tuple[int, str], Mapping[str, Any]] = {}
    for some in plan_passes(ids, runtime.limits(ids)):  # so that each call has the adapters that fit
        for start in range(0, len(some), batch_size):
            chunk = [rows[k] for k in some[start : start + batch_size]]
            batch, own = [tokens[i] for i, _ in chunk], [name for _, name in chunk]
            if generates:
                found = _generate(model, tokenizer, batch, own, max_new_tokens, generate_kwargs)
            else:
                found = _classify(model, tokenizer, batch, own)
            answers.update(zip(chunk, found, strict=True))
    return Comparison(
        tuple(_text(item) for item in items),
        tuple(names),
        tuple(tuple(answers[i, name] for name in names) for i in range(len(items))),
    )


def _generate(
    model: Any, tokenizer: Any, rows: list[dict[str, Any]], names: list[str], limit: int | None,
    kwargs: Mapping[str, Any],
) -> list[dict[str, Any]]:  # fmt: skip
    """The texts of one mixed `generate`."""
    seq2seq = bool(model.config.is_encoder_decoder)
    inputs = _padded(model, tokenizer, rows, "right" if seq2seq else "left")  # new tokens follow the right edge
    settings: dict[str, Any] = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id, **kwargs}
    if limit is None and "max_length" not in settings and "generation_config" not in settings:
        limit = MAX_NEW_TOKENS
    if limit is not None:
        settings["max_new_tokens"] = limit
    if "stop_strings" in settings:
        settings["tokenizer"] = tokenizer
    output = model.generate(**inputs, adapter_names=names, **settings)
    sequences: Tensor = getattr(output, "sequences", output)
    if len(sequences) != len(names):
        raise ValueError(
            f"compare shows one answer per prompt and adapter, generate gave {len(sequences)} for {len(names)}; leave "
            f"out num_return_sequences"
        )
    new = sequences if seq2seq else sequences[:, inputs["input_ids"].shape[1] :]
    configs = [config for config in (settings.get("generation_config"), model.generation_config) if config is not None]
    stops = setting("eos_token_id", settings, configs)
    ends = torch.as_tensor([] if stops is None else stops, device=new.device).flatten()
    finished = torch.isin(new, ends).any(1) | (new[:, -1] == settings["pad_token_id"])
    if limit is not None:
        finished |= new.shape[1] - seq2seq < limit
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    return [{"text": text.strip(), "finished": done} for text, done in zip(texts, finished.tolist(), strict=True)]


@torch.no_grad()
def _classify(model: Any, tokenizer: Any, rows: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Labels or scores of one mixed `forward`."""
    # positions count from the first column, unless the model is told others
    side = "right" if "position_ids" in model._multilora.parameters else tokenizer.padding_side
    output = model(**_padded(model, tokenizer, rows, side), adapter_names=names)
    logits = output.get("logits")
    if logits is None or logits.dim() != 2:
        got = "no logits" if logits is None else f"logits {tuple(logits.shape)}"
        raise TypeError(
            f"compare shows generated text, or one label or score per row; {type(model).__name__} gives {got}"
        )
    several = model.config.problem_type == "multi_label_classification"
    return [
        _labelled(row.double().cpu(), model.id2label(name), several)
        for row, name in zip(model.split_logits(logits, names), names, strict=True)
    ]


def _labelled(logits: Tensor, labels: Mapping[int, str], several: bool) -> dict[str, Any]:
    if len(logits) == 1:
        return {"score": logits.item()}
    if several:
        chances = logits.sigmoid().tolist()
        found = [i for i, chance in enumerate(chances) if chance > 0.5]
        return {"labels": [labels[i] for i in found], "probabilities": [chances[i] for i in found]}
    chance, best = logits.softmax(0).max(0)
    return {"label": labels[int(best)], "probability": chance.item()}


# -- arguments -------------------------------------------------------------------------------------------------
def _prompts(prompts: Any) -> list[Any]:
    """One string or chat stands for a list of it."""
    if isinstance(prompts, str) or (isinstance(prompts, (list, tuple)) and prompts and _is_message(prompts[0])):
        prompts = [prompts]
    if not isinstance(prompts, (list, tuple)) or not prompts:
        raise ValueError(f"prompts must be a list of strings, of chats, or of pairs of strings, got {prompts!r}")
    for item in prompts:
        chat = isinstance(item, (list, tuple)) and len(item) > 0 and all(map(_is_message, item))
        if not (isinstance(item, str) or chat or _is_pair(item)) or not item:
            raise ValueError(
                f"a prompt must be a string, a chat (a list of messages with role and content), or a pair of strings, "
                f"got {item!r}"
            )
    return list(prompts)


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and {"role", "content"} <= item.keys()


def _is_pair(item: Any) -> bool:
    return isinstance(item, (list, tuple)) and len(item) == 2 and all(isinstance(text, str) for text in item)


def _names(runtime: Runtime, adapters: Sequence[str | None] | None) -> list[str]:
    """Names to compare, "__base__" for the base; None: all that have what a call needs. Raises UnknownAdapterError."""
    if adapters is None:
        known = {0: BASE, **{entry.id: entry.name for entry in runtime.store.catalogue}}
        return [name for adapter_id, name in known.items() if _has_head(runtime, adapter_id)]
    if isinstance(adapters, str) or not isinstance(adapters, Sequence):
        raise TypeError(f"adapters must be a list of names (None for the base), got {adapters!r}")
    runtime.resolve(list(adapters), None)
    names = [BASE if name in BASE_NAMES else str(name) for name in adapters]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"adapters must be different names, at least one, got {list(adapters)!r}")
    return names


def _has_head(runtime: Runtime, adapter_id: int) -> bool:
    """Not so where the base's checkpoint lacks the head that other adapters bring, and this one brings none."""
    try:
        runtime.require_heads([adapter_id])
    except RoutingError:
        return False
    return True


def _check_tokenizer(tokenizer: Any) -> None:
    if not callable(getattr(tokenizer, "pad", None)) or not hasattr(tokenizer, "pad_token_id"):
        hint = "; pass its .tokenizer" if hasattr(tokenizer, "tokenizer") else ""
        raise TypeError(f"tokenizer must be a tokenizer of Transformers, got {type(tokenizer).__name__}{hint}")
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "the tokenizer must have a pad token, as prompts of different lengths run in one batch; set "
            "tokenizer.pad_token = tokenizer.eos_token"
        )


def _tokens(item: Any, tokenizer: Any, *, pairs: bool) -> dict[str, Any]:
    """Token ids of one prompt, without padding."""
    if isinstance(item, str):
        tokens = tokenizer(item)
    elif _is_pair(item):
        if not pairs:
            raise ValueError(f"pairs of strings are for classifiers, this model generates; got {item!r}")
        tokens = tokenizer(*item)
    else:
        tokens = tokenizer.apply_chat_template(list(item), add_generation_prompt=True, tokenize=True, return_dict=True)
    length = len(tokens["input_ids"])
    if not 0 < length <= tokenizer.model_max_length:
        raise ValueError(
            f"a prompt must have 1 to {tokenizer.model_max_length} tokens, got {length}: {_text(item)[:80]!r}"
        )
    return dict(tokens)


def _padded(model: Any, tokenizer: Any, rows: list[dict[str, Any]], side: str) -> dict[str, Tensor]:
    batch = tokenizer.pad(rows, return_tensors="pt", padding_side=side)
    known = {"input_ids", "attention_mask", *model._multilora.parameters}
    return {name: tensor.to(model.device) for name, tensor in batch.items() if name in known}


def _text(item: Any) -> str:
    """A prompt as a table shows it: of a chat with one message the message alone."""
    if isinstance(item, str) or _is_pair(item):
        return item if isinstance(item, str) else "\n".join(item)
    texts = [_content(message["content"]) for message in item]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"{message['role']}: {text}" for message, text in zip(item, texts, strict=True))


def _content(content: Any) -> str:
    """A message's text; of one in parts those that are text."""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return str(content)
    return " ".join(part["text"] for part in content if isinstance(part, Mapping) and "text" in part)
