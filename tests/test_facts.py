"""Facts about architectures: aliases, settings, what is read from the source, and what would happen without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from hf_multilora import MultiLoRAModel
from hf_multilora.census import take_census
from hf_multilora.formats import AdapterError
from hf_multilora.patches.facts import FACTS, Facts, configs_in, facts_of
from hf_multilora.routing import RoutingError

from .architecture_table import ARCHITECTURES
from .experts import MIXTURES
from .formats.tiny import edit_weights
from .test_architectures import ROWS, TOLERANCE, Tenants, accepted, built, distance, outputs

EMBEDDINGS = {  # architecture -> what an adapter of before Transformers 5 targets, and what does its work now
    "t5": ("shared", ["encoder.embed_tokens", "decoder.embed_tokens"]),
    "t5-encoder": ("shared", ["encoder.embed_tokens"]),
    "mbart": ("model.shared", ["model.encoder.embed_tokens", "model.decoder.embed_tokens"]),
    "prophetnet": (
        "prophetnet.word_embeddings",
        ["prophetnet.encoder.word_embeddings", "prophetnet.decoder.word_embeddings"],
    ),
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_adapter_of_a_shared_embedding_goes_to_all_that_do_its_work(name: str, tmp_path: Path) -> None:
    arch, model = built(name)
    alias, targets = EMBEDDINGS[name]
    assert facts_of(model.config).aliases_in(take_census(model, facts_of(model.config))) == {alias: tuple(targets)}
    tenants = Tenants(model, {"a": targets}, tmp_path)
    layers = [tenants.peft.get_base_model().get_submodule(target) for target in targets]
    with torch.no_grad():
        for layer in layers[1:]:
            layer.lora_embedding_A["a"].copy_(layers[0].lora_embedding_A["a"])
            layer.lora_embedding_B["a"].copy_(layers[0].lora_embedding_B["a"])

    def old(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        first = {key: value for key, value in tensors.items() if f".{targets[0]}.lora" in key}
        return {key.replace(targets[0], alias): value for key, value in first.items()}

    edit_weights(tmp_path / "a", old)
    served = MultiLoRAModel.from_pretrained(model, {"a": tenants.path("a")})
    rows = ["a", None, "a"]
    inputs = arch.inputs(len(rows), 5)
    want = tenants.truth(inputs, rows)
    assert distance(outputs(served, inputs, adapter_names=rows), want) < TOLERANCE
    assert distance(outputs(served, inputs, adapter_names=["a", "a", None]), want) > 500 * TOLERANCE


def test_a_block_of_adapters_refuses_to_mix_where_rows_cannot_be_told(tmp_path: Path) -> None:
    """With as many tokens as rows, T5's [T, T] relative positions look like one row per prompt."""
    arch, model = built("t5")
    mixable, unmixable = accepted(model)
    tenants = Tenants(model, {"a": unmixable, "b": mixable[:1] + unmixable, "c": mixable[:2]}, tmp_path)
    served = MultiLoRAModel.from_pretrained(model, {name: tenants.path(name) for name in tenants.targets})
    inputs = arch.inputs(4, 4)
    with (
        served.adapters(ROWS),
        pytest.raises(RoutingError, match=r"relative_attention_bias.*not the rows of the batch"),
    ):
        outputs(served, inputs)
    with served.adapters(["b"] * 4):
        got = outputs(served, inputs)
    assert distance(got, tenants.truth(inputs, ["b"] * 4)) < TOLERANCE
    with served.adapters(["c", None, "c", None]):  # "c" trains nothing of the kind
        got = outputs(served, inputs)
    assert distance(got, tenants.truth(inputs, ["c", None, "c", None])) < TOLERANCE


def test_without_its_fact_a_time_first_model_would_answer_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sweep's batch with as many tokens as rows is for: the layout shows in no error there."""
    monkeypatch.delitem(FACTS, "xlnet")
    arch, model = built("xlnet")
    mixable = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    tenants = Tenants(model, {"a": mixable, "b": mixable[::2], "c": mixable[1::2]}, tmp_path)
    served = MultiLoRAModel.from_pretrained(model, {name: tenants.path(name) for name in tenants.targets})
    with pytest.raises(RoutingError, match="rows cannot be attributed"):
        outputs(served, arch.inputs(4, 6), adapter_names=ROWS)
    inputs = arch.inputs(4, 4)
    assert distance(outputs(served, inputs, adapter_names=ROWS), tenants.truth(inputs, ROWS)) > 500 * TOLERANCE


@pytest.mark.parametrize("exact", [False, True])
def test_facts_that_hang_on_a_setting(exact: bool) -> None:
    """BLOOM computes its output projections from their weight's slices when it is told to."""
    settings = {"vocab_size": 40, "hidden_size": 16, "n_layer": 1, "n_head": 2, "slow_but_exact": exact}
    model = transformers.BloomForCausalLM(transformers.BloomConfig(**settings))
    census = take_census(model, facts_of(model.config))
    refused = {name.rpartition("h.0.")[2] for name, shape in census.items() if shape.kind == "linear" and shape.refused}
    assert refused == ({"self_attention.dense", "mlp.dense_4h_to_h"} if exact else set())


def test_facts_of_a_model_inside_a_model() -> None:
    """OPT's linears get their tokens flattened also as the language model of another one."""
    text = transformers.OPTConfig(hidden_size=16, ffn_dim=24, num_attention_heads=2)
    config = transformers.Blip2Config(text_config=text.to_dict())
    assert facts_of(config).matches("flat", "language_model.model.decoder.layers.0.fc1")
    assert not facts_of(transformers.LlamaConfig()).matches("flat", "model.layers.0.fc1")


def test_every_fact_is_of_an_architecture_in_the_sweep() -> None:
    architectures = [arch for arch in ARCHITECTURES.values() if not arch.missing]
    configs = [arch.make_config() for arch in architectures]
    mixtures = [mixture for mixture in MIXTURES.values() if not mixture.missing]
    configs += [getattr(transformers, m.model).config_class(**m.settings) for m in mixtures]
    kinds = {getattr(part, "model_type", "") for config in configs for part in configs_in(config)}
    newer = {f"{name}_text" for name, mixture in MIXTURES.items() if mixture.missing}
    assert set(FACTS) <= kinds | newer


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only_read = nn.Embedding(4, 4)
        self.read_and_called = nn.Linear(4, 4)
        self.asked_for_dtype = nn.Linear(4, 4)
        self.unnamed = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.read_and_called(x.to(self.asked_for_dtype.weight.dtype)) + self.only_read.weight[0]
        x = x @ self.read_and_called.weight
        for module in (self.asked_for_dtype, *self.unnamed):
            x = module(x)
        return x


def test_a_weight_that_is_read_but_never_called_is_refused() -> None:
    census = take_census(Reads(), Facts())
    assert {name for name, shape in census.items() if shape.kind != "other" and shape.refused} == {"only_read"}
    assert census["only_read"].refused == "it is never called: Reads uses its weight directly"


def test_refused_module_is_named(tmp_path: Path) -> None:
    _, model = built("deberta-v2")
    tenants = Tenants(model, {"a": ["deberta.encoder.rel_embeddings"]}, tmp_path)
    with pytest.raises(AdapterError, match=r"rel_embeddings: no adapter may target it here: it is never called"):
        MultiLoRAModel.from_pretrained(model, {"a": tenants.path("a")})


def test_images_of_a_row_are_not_counted_on() -> None:
    """Two images for row 0 and none for row 1 are as many as rows: modules that see images never mix."""
    _, model = built("llava")
    census = take_census(model, facts_of(model.config))
    outside = [n for n, shape in census.items() if shape.kind != "other" and not shape.mixable]
    assert outside and all(n.startswith(("model.vision_tower.", "model.multi_modal_projector.")) for n in outside)
    assert census["lm_head"].mixable and census["model.language_model.embed_tokens"].mixable
    _, clip = built("clip")  # one image per row, compared with texts: no image is put into a text
    assert all(shape.mixable for shape in take_census(clip, facts_of(clip.config)).values())
