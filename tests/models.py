"""Tiny random base models, adapters that PEFT makes and saves, and what PEFT answers with one adapter alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model

from hf_multilora import MultiLoRAModel

VOCAB, PAD, BOS = 64, 2, 1  # beam search takes a pad token of 0 for none
NEW = 6  # tokens that tests generate
Targets = tuple[int, list[str]]  # rank, module names


def _llama() -> tf.PreTrainedModel:
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, tie_word_embeddings=False,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=None,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config)


def _gpt2() -> tf.PreTrainedModel:
    config = tf.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3, resid_pdrop=0.0,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=None,
    )  # fmt: skip
    return tf.GPT2LMHeadModel(config)


def _t5() -> tf.PreTrainedModel:
    config = tf.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
        initializer_factor=3.0, pad_token_id=PAD, decoder_start_token_id=PAD, eos_token_id=None,
    )  # fmt: skip
    return tf.T5ForConditionalGeneration(config)


def _bart() -> tf.PreTrainedModel:
    config = tf.BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=128, init_std=0.3,
        pad_token_id=PAD, bos_token_id=BOS, decoder_start_token_id=BOS, eos_token_id=None, forced_eos_token_id=None,
    )  # fmt: skip
    return tf.BartForConditionalGeneration(config)


def _opt() -> tf.PreTrainedModel:
    config = tf.OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, init_std=0.3,
        max_position_embeddings=128, word_embed_proj_dim=32, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=None,
    )  # fmt: skip
    return tf.OPTForCausalLM(config)


def _bert() -> tf.PreTrainedModel:
    config = tf.BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=128, initializer_range=0.3, num_labels=3, pad_token_id=PAD,
    )  # fmt: skip
    return tf.BertForSequenceClassification(config)


# family -> (base, task type, targets of the adapters "a", "b", "c")
FAMILIES: Mapping[str, tuple[Callable[[], tf.PreTrainedModel], str, tuple[Targets, Targets, Targets]]] = {
    "llama": (
        _llama,
        "CAUSAL_LM",
        (
            (4, ["q_proj", "v_proj"]),
            (8, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens"]),
            (3, ["o_proj", "down_proj", "lm_head"]),
        ),
    ),
    "gpt2": (_gpt2, "CAUSAL_LM", ((4, ["c_attn"]), (8, ["c_attn", "c_proj", "c_fc"]), (3, ["c_proj"]))),
    "t5": (
        _t5,
        "SEQ_2_SEQ_LM",
        ((4, ["q", "v"]), (8, ["q", "k", "v", "o", "wi_0", "wi_1", "wo"]), (3, ["o", "wo", "lm_head"])),
    ),
    "bart": (
        _bart,
        "SEQ_2_SEQ_LM",
        (
            (4, ["q_proj", "v_proj", "fc2"]),
            (8, ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]),
            (3, ["fc1", "out_proj"]),
        ),
    ),
    "opt": (_opt, "CAUSAL_LM", ((4, ["q_proj", "v_proj"]), (8, ["fc1", "fc2"]), (3, ["out_proj", "fc1"]))),
    "bert": (_bert, "FEATURE_EXTRACTION", ((4, ["query", "value"]), (8, ["query", "key", "dense"]), (3, ["dense"]))),
}


def save_adapter(base: tf.PreTrainedModel, folder: Path, rank: int, targets: list[str], task: str, seed: int) -> Path:
    """An adapter with large random weights, made and saved by PEFT."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type=task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(str(folder))
    return folder


@dataclass
class Family:
    """One tiny architecture: its base, folders of adapters "a", "b", "c", and PEFT's own model of them all."""

    name: str
    base: tf.PreTrainedModel  # never changed: take copies
    task: str
    targets: tuple[Targets, ...]
    folder: Path
    adapters: dict[str, Path] = field(default_factory=dict)
    peft: PeftModel | None = None

    @property
    def seq2seq(self) -> bool:
        return bool(self.base.config.is_encoder_decoder)

    def adapter(self, name: str) -> Path:
        """The folder of adapter `name`, made on first use: "a", "b", "c" as in FAMILIES, others by turns like them."""
        if name not in self.adapters:
            seed = sum(ord(c) << i for i, c in enumerate(name))
            rank, targets = self.targets[(ord(name[0]) - ord("a") + len(name) - 1) % len(self.targets)]
            self.adapters[name] = save_adapter(self.base, self.folder / name, rank, targets, self.task, seed)
        return self.adapters[name]

    def model(self, names: Sequence[str] = ("a", "b", "c"), **settings: Any) -> Any:
        """A new MultiLoRAModel with these adapters."""
        base = copy.deepcopy(self.base)
        return MultiLoRAModel.from_pretrained(base, {name: str(self.adapter(name)) for name in names}, **settings)

    @contextmanager
    def alone(self, name: str | None) -> Iterator[Any]:
        """The model that PEFT makes with this adapter only (None: with none)."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.peft is None:
                self.peft = PeftModel.from_pretrained(
                    copy.deepcopy(self.base), str(self.adapter("a")), adapter_name="a"
                ).eval()
            if name in (None, "__base__"):
                with self.peft.disable_adapter():
                    yield self.peft.get_base_model()
                return
            if name not in self.peft.peft_config:
                self.peft.load_adapter(str(self.adapter(name)), adapter_name=name)
            self.peft.set_adapter(name)
            yield self.peft.get_base_model()

    def truth(self, names: Sequence[str | None], inputs: Mapping[str, Any], **settings: Any) -> list[torch.Tensor]:
        """What PEFT generates for each row of `inputs` run by itself, [sequences of the row, tokens] each."""
        return [self.row(name, row_of(inputs, i), **settings) for i, name in enumerate(names)]

    def row(self, name: str | None, inputs: Mapping[str, Any], **settings: Any) -> torch.Tensor:
        """What PEFT generates for one row alone, without the padding on its left."""
        with self.alone(name) as model:
            mask = inputs.get("attention_mask")
            ids = inputs.get("input_ids", inputs.get("inputs_embeds"))
            start = 0 if mask is None or self.seq2seq else int(mask[0].argmax())
            inputs = {**inputs, **({} if mask is None else {"attention_mask": mask[:, start:]})}
            inputs["input_ids" if "input_ids" in inputs else "inputs_embeds"] = ids[:, start:]
            return generated(model.generate(**inputs, **settings), 0 if self.seq2seq else inputs_length(inputs))


def inputs_length(inputs: Mapping[str, Any]) -> int:
    """Tokens of the prompt that `generate` gives back in front of what is new."""
    return inputs["input_ids"].shape[1] if "input_ids" in inputs else 0


def row_of(inputs: Mapping[str, Any], i: int) -> dict[str, Any]:
    return {name: value[i : i + 1] if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def generated(output: Any, prompt: int) -> torch.Tensor:
    """The new tokens of a `generate` result."""
    return getattr(output, "sequences", output)[:, prompt:]


def prompts(lengths: Sequence[int], side: str = "left", seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths, padded on `side`."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for i, length in enumerate(lengths):
        at = slice(width - length, width) if side == "left" else slice(0, length)
        ids[i, at] = torch.randint(3, VOCAB, (length,), generator=generator)
        mask[i, at] = 1
    return {"input_ids": ids, "attention_mask": mask}


def same(got: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether two token blocks [n, tokens] agree, but for padding on the right of the longer one."""
    width = max(got.shape[1], truth.shape[1])
    pad = torch.nn.functional.pad
    return torch.equal(
        pad(got, (0, width - got.shape[1]), value=PAD), pad(truth, (0, width - truth.shape[1]), value=PAD)
    )


def right_rows(got: torch.Tensor, truth: Sequence[torch.Tensor]) -> list[bool]:
    """For every row of a batch, whether its block of `got` is what the row alone gives."""
    blocks = got.unflatten(0, (len(truth), -1))
    return [same(block, alone) for block, alone in zip(blocks, truth, strict=True)]


def check_generate(
    family: Family, model: Any, names: Sequence[str | None], inputs: Mapping[str, Any], **settings: Any
) -> torch.Tensor:
    """A mixed `generate` equals PEFT row by row; control: the rows of rotated names are all different."""
    settings = {"max_new_tokens": NEW, **settings}
    got = generated(
        model.generate(**inputs, adapter_names=list(names), **settings), 0 if family.seq2seq else inputs_length(inputs)
    )
    check_rows(family, got, names, inputs, **settings)
    return got


def check_rows(
    family: Family, got: torch.Tensor, names: Sequence[str | None], inputs: Mapping[str, Any], **settings: Any
) -> None:
    rotated = [*names[1:], names[0]]
    assert all(x != y for x, y in zip(names, rotated, strict=True)), "the control needs neighbours that differ"
    rights = right_rows(got, family.truth(names, inputs, **settings))
    assert all(rights), f"rows that are not PEFT's: {[i for i, ok in enumerate(rights) if not ok]} of {names}"
    wrong = right_rows(got, family.truth(rotated, inputs, **settings))
    assert not any(wrong), f"rows that another adapter answers in the same way: {wrong}: the test could not fail"


NAMES = ["a", None, "b", "c"]
LENGTHS = [3, 7, 5, 4]
INPUTS = prompts(LENGTHS)
