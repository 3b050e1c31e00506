"""What broke heads, full embeddings, norms and token rows: each case was wrong once."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers as tf
from peft import PeftModel

from hf_multilora import AdapterError, MultiLoRAModel, RoutingError
from hf_multilora.layers import whole
from tests.heads import PAD, SIZES, VOCAB, Heads, Made, bert, ids, llama, vocabulary
from tests.test_heads import assert_rows, rows_of

LINEAR_ATTENTION = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1], "num_experts": 0,
}  # fmt: skip


def mamba() -> Any:
    settings = {"state_size": 4, "time_step_rank": 2, "num_hidden_layers": 2, "initializer_range": 0.3}
    return tf.MambaForCausalLM(tf.MambaConfig(vocab_size=VOCAB, hidden_size=16, **settings))


def lfm2() -> Any:
    settings = {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 1}
    return tf.Lfm2ForCausalLM(tf.Lfm2Config(**SIZES, **settings))


def qwen3_next() -> Any:
    settings = {"head_dim": 8, "num_key_value_heads": 1} | LINEAR_ATTENTION
    return tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**SIZES, **settings))


@pytest.mark.parametrize(("build", "target"), [(mamba, "conv1d"), (lfm2, "conv.conv"), (qwen3_next, "conv1d")])
def test_a_convolution_whose_weight_is_read_is_refused(build: Any, target: str, tmp_path: Path) -> None:
    made = {"target_modules": ["in_proj", "q_proj"], "modules_to_save": [target]}
    heads = Heads(build(), tmp_path, {"a": Made(made), "norm": Made(made | {"modules_to_save": ["layers.0.norm"]})})
    with pytest.raises(AdapterError, match=r"conv.*no adapter may save it here: \w+ uses its weight directly"):
        heads.model("a")
    if build is mamba:  # control: what is called may be saved
        model, inputs, names = heads.model("norm"), ids(2), ["norm", None]
        with torch.no_grad():
            got = model(input_ids=inputs, adapter_names=names).logits
        assert_rows(got, heads.truth(rows_of({"input_ids": inputs}), names, "logits"))


def test_gradients_through_token_rows_of_a_head(tmp_path: Path) -> None:
    """A row with fewer trained tokens than another of its batch, or none."""
    torch.manual_seed(0)
    base = llama(tf.LlamaForCausalLM, tie_word_embeddings=True)
    with torch.no_grad():
        base.lm_head.weight[PAD].normal_()  # of rows without trained tokens, the first logit's gradient
    tokens = {"three": Made({"trainable_token_indices": [5, 9, 17]}), "one": Made({"trainable_token_indices": [4]})}
    heads = Heads(base, tmp_path, tokens | {"plain": Made({})})
    model, names = heads.model(), ["three", "one", None, "plain"]
    x, wanted = torch.randn(4, 5, 16), torch.randn(VOCAB)

    def gradient(model: Any, embeds: torch.Tensor, **more: Any) -> torch.Tensor:
        embeds = embeds.clone().requires_grad_()
        (model(inputs_embeds=embeds, **more).logits * wanted).sum().backward()
        assert embeds.grad is not None
        return embeds.grad

    got = gradient(model, x, adapter_names=names)
    want = [gradient(heads.alone[name], x[i : i + 1])[0] for i, name in enumerate(names)]
    assert_rows(got, want)
    with pytest.raises(AssertionError):
        assert_rows(got.roll(1, 0), want)


def test_packed_rows_with_every_role_on_one_embedding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    adapters = {
        "saved": Made({"modules_to_save": ["embed_tokens"]}),
        "wide": Made({"modules_to_save": ["embed_tokens", "lm_head"]}, vocabulary(47)),
        "tokens": Made({"trainable_token_indices": [5, 9]}),
        "lora": Made({"target_modules": ["embed_tokens", "q_proj"]}),
    }
    heads = Heads(llama(tf.LlamaForCausalLM), tmp_path, adapters)
    model, names, lengths = heads.model(), ["saved", "tokens", None, "lora", "wide"], [3, 2, 4, 3, 2]
    packed = ids(1, sum(lengths), low=5)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    alone = [{"input_ids": part} for part in packed.split(lengths, 1)]
    with torch.no_grad():
        got = model(input_ids=packed, position_ids=positions, adapter_names=names).logits[0].split(lengths)
        assert_rows(got, heads.truth(alone, names, "logits"))
        with pytest.raises(AssertionError):
            assert_rows(got, heads.truth(alone, [*names[1:], names[0]], "logits"))


def test_verify_of_a_model_with_relative_positions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "initializer_factor": 3.0}
    base = tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **settings))
    heads = Heads(base, tmp_path, {"a": Made({"target_modules": ["q", "v"], "modules_to_save": ["lm_head"]})})
    model = heads.model()
    report = model.verify("a")
    assert report and report.effect > report.tolerance
    _, slots = model._multilora.sites["lm_head:saved"]
    slots.tenant(0)[0].mul_(1.5)  # control
    assert not model.verify("a")


def test_verify_gives_a_weight_back_without_rank_rows(tmp_path: Path) -> None:
    """Of the head that one adapter saves and another, evicted since, trains with LoRA."""
    torch.manual_seed(0)
    adapters = {"saved": Made({"modules_to_save": ["score"]}), "lora": Made({"target_modules": ["score"]})}
    heads = Heads(llama(), tmp_path, adapters)
    model, inputs = heads.model(max_loras=1), ids(2)
    with torch.no_grad():
        model(input_ids=inputs, adapter_names=["lora", None])
    assert model.score.weight.untyped_storage().nbytes() > model.score.weight.nbytes, "else there is nothing to see"
    assert model.verify("saved")
    for key, tensor in model.state_dict().items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, key


def test_a_norm_that_does_not_get_rows_says_its_shape(tmp_path: Path) -> None:
    torch.manual_seed(0)
    heads = Heads(qwen3_next(), tmp_path, {"a": Made({"modules_to_save": ["linear_attn.norm"]}), "plain": Made({})})
    model, inputs = heads.model(), ids(3)
    with torch.no_grad():
        with pytest.raises(RoutingError, match=r"linear_attn.norm: .* must be the 3 rows .*got shape \(30, 8\)"):
            model(input_ids=inputs, adapter_names=["a", "plain", None])
        got = model(input_ids=inputs, adapter_names=["a"] * 3).logits
        assert_rows(got, heads.truth(rows_of({"input_ids": inputs}), ["a"] * 3, "logits"))


def test_a_peft_model_with_token_rows_of_a_tied_embedding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    adapters = {"a": Made({"trainable_token_indices": [5, 9]}), "b": Made({"trainable_token_indices": [4]})}
    heads = Heads(llama(tf.LlamaForCausalLM, tie_word_embeddings=True), tmp_path, adapters)
    peft_model = PeftModel.from_pretrained(copy.deepcopy(heads.base), str(tmp_path / "a"), adapter_name="a")
    peft_model.load_adapter(str(tmp_path / "b"), "b")
    model, inputs, names = MultiLoRAModel.from_pretrained(peft_model), ids(3), ["a", "b", None]
    assert "lm_head:tokens" in model._multilora.sites, "PEFT trains the rows of the tied head too"
    model.set_adapter(None)
    with torch.no_grad():
        got, rows = model(input_ids=inputs, adapter_names=names).logits, rows_of({"input_ids": inputs})
    assert_rows(got, heads.truth(rows, names, "logits"))
    with pytest.raises(AssertionError):
        assert_rows(got, heads.truth(rows, ["b", None, "a"], "logits"))


def test_an_interrupt_leaves_no_tensor_of_an_adapter_in_a_norm(tmp_path: Path) -> None:
    """At every line of what puts them into the module and takes them out again."""
    torch.manual_seed(0)
    heads = Heads(bert(), tmp_path, {"a": Made({"modules_to_save": ["embeddings.LayerNorm"]})})
    model, inputs = heads.model(), ids(2)
    norm = model.bert.embeddings.LayerNorm
    own, done, points = dict(norm._parameters), False, 0

    def interrupt_at(line: int) -> Any:
        left = [line]

        def trace(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_filename != whole.__file__:
                return None if frame.f_back is not None and event == "call" else trace
            left[0] -= event == "line"
            if left[0] == 0 and event == "line":
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        return trace

    while not done:
        points += 1
        before = sys.gettrace()
        sys.settrace(interrupt_at(points))
        try:
            with torch.no_grad():
                model(input_ids=inputs, adapter_names=["a", None])
            done = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert all(norm._parameters[name] is tensor for name, tensor in own.items()), points
    assert points > 50, "lines of whole.py that were interrupted"


@pytest.mark.parametrize("name", ["norm", "head"])
def test_offloaded_modules_that_adapters_save(name: str, tmp_path: Path) -> None:
    """The hook of accelerate loads the base's tensors when the module is called."""
    torch.manual_seed(0)
    adapters = {"norm": Made({"modules_to_save": ["LayerNorm"]}), "head": Made({"task_type": "SEQ_CLS"})}
    heads = Heads(bert(), tmp_path, adapters)
    base = copy.deepcopy(heads.base)
    accelerate.cpu_offload(base, execution_device=torch.device("cpu"))
    model, inputs = MultiLoRAModel.from_pretrained(base, {name: str(tmp_path / name)}), ids(3)
    for names in ([name, None, name], [name] * 3, [None] * 3):
        with torch.no_grad():
            got = model(input_ids=inputs, adapter_names=names).logits
        assert_rows(got, heads.truth(rows_of({"input_ids": inputs}), names, "logits"))
    with pytest.raises(NotImplementedError, match="offloaded"):
        model.verify(name)


def test_a_norm_of_relative_positions_is_not_mixed(tmp_path: Path) -> None:
    """Its input [8, 16], the table of relative positions, looks like that of 8 rows."""
    torch.manual_seed(0)
    settings = {"relative_attention": True, "position_buckets": 4, "norm_rel_ebd": "layer_norm"}
    settings |= {"pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 32}
    base = tf.DebertaV2ForSequenceClassification(tf.DebertaV2Config(**SIZES, **settings))
    with torch.no_grad():
        base.deberta.encoder.rel_embeddings.weight.normal_()
    made = {"target_modules": ["query_proj"]}
    heads = Heads(base, tmp_path, {"a": Made(made | {"modules_to_save": ["LayerNorm"]}), "plain": Made(made)})
    model, inputs, names = heads.model(), ids(8), ["a", "plain", None, "a"] * 2
    with torch.no_grad():
        got = model(input_ids=inputs, adapter_names=names).logits
        want = heads.truth(rows_of({"input_ids": inputs}), names, "logits")
    assert_rows(got, want)
    with pytest.raises(AssertionError):
        assert_rows(got.roll(1, 0), want)


def test_a_norm_of_flattened_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = {"ffn_dim": 20, "max_position_embeddings": 32, "word_embed_proj_dim": 16, "init_std": 0.3}
    base = tf.OPTForCausalLM(tf.OPTConfig(**SIZES, **settings))
    heads = Heads(base, tmp_path, {"a": Made({"modules_to_save": ["final_layer_norm"]}), "plain": Made({})})
    model, inputs, names = heads.model(), ids(3), ["a", "plain", None]
    with torch.no_grad():
        got = model(input_ids=inputs, adapter_names=names).logits
        want = heads.truth(rows_of({"input_ids": inputs}), names, "logits")
    assert_rows(got, want)
    with pytest.raises(AssertionError):
        assert_rows(got.roll(1, 0), want)


def test_guidance_needs_vocabularies_of_one_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    full = {"modules_to_save": ["embed_tokens", "lm_head"]}
    heads = Heads(
        llama(tf.LlamaForCausalLM), tmp_path, {"a": Made(full), "wide": Made(full, vocabulary(47)), "plain": Made({})}
    )
    model, inputs = heads.model(), ids(3)
    settings = {"guidance_scale": 1.5, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    for names in (["wide", "a", None], ["wide", "plain", "wide"]):
        with pytest.raises(ValueError, match=r"one size for all its rows, got \[40, 47\]"):
            model.generate(inputs, adapter_names=names, **settings)
        with pytest.raises(ValueError, match=r"got \[40, 47\]"), model.adapters(names):
            model.generate(inputs, **settings)
    for names in (["a", "plain", None], ["wide"] * 3):
        got = model.generate(inputs, attention_mask=torch.ones_like(inputs), adapter_names=names, **settings)
        for row, name, prompt in zip(got, names, inputs, strict=True):
            alone = {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt[None])}
            assert row.tolist() == heads.alone[name].generate(**alone, **settings)[0].tolist(), name


def test_a_module_without_rows_says_so(tmp_path: Path) -> None:
    """Swin's table of relative positions is called without an argument."""
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1], "window_size": 4}
    base = tf.SwinForImageClassification(tf.SwinConfig(**sizes, initializer_range=0.3))
    table = next(n for n, m in base.named_modules() if any("relative_position_bias_table" in k for k in m._parameters))
    made = {"target_modules": ["classifier"], "modules_to_save": [table.rpartition(".")[2]]}
    if made["modules_to_save"] == ["self"]:
        pytest.skip("this version of Transformers keeps the table in the attention itself")
    heads = Heads(base, tmp_path, {"a": Made(made)})
    model, inputs = heads.model(), {"pixel_values": torch.randn(3, 3, 32, 32)}
    with torch.no_grad():
        with pytest.raises(RoutingError, match=r"relative_position_bias: its first argument must be a tensor"):
            model(**inputs, adapter_names=["a", None, "a"])
        got = model(**inputs, adapter_names=["a"] * 3).logits
    assert_rows(got, heads.truth(rows_of(inputs), ["a"] * 3, "logits"))
