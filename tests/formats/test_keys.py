from __future__ import annotations

import pytest

from hf_multilora.formats.base import AdapterError
from hf_multilora.formats.keys import NameResolver, covers, listed, parse_key

Q = "model.layers.0.q_proj"
E = "model.embed_tokens"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        # module, role, embedding, adapter, parameter
        (f"base_model.model.{Q}.lora_A.weight", (Q, "a", False, None, "")),
        (f"base_model.model.{Q}.lora_B.weight", (Q, "b", False, None, "")),
        (f"{Q}.lora_A.weight", (Q, "a", False, None, "")),
        (f"{Q}.lora_A.default.weight", (Q, "a", False, "default", "")),
        (f"{Q}.lora_A.lora_A.weight", (Q, "a", False, "lora_A", "")),
        (f"{Q}.lora_B.weight.weight", (Q, "b", False, "weight", "")),
        (f"base_model.model.{E}.lora_embedding_A", (E, "a", True, None, "")),
        (f"base_model.model.{E}.lora_embedding_B.default", (E, "b", True, "default", "")),
        (f"_orig_mod.base_model.model.{Q}.lora_A.weight", (Q, "a", False, None, "")),
        ("base_model.model._orig_mod.model.layers.0._orig_mod.q_proj.lora_A.weight", (Q, "a", False, None, "")),
        (f"base_model.model.{E}.base_layer.weight", (E, "copy", False, None, "weight")),
        (f"base_model.model.{E}.weight", (E, "copy", False, None, "weight")),
        ("lm_head.base_layer.bias", ("lm_head", "copy", False, None, "bias")),
        (f"{Q}.lora_B.bias", (Q, "other", False, None, "")),
        (f"{Q}.lora_magnitude_vector", (Q, "other", False, None, "lora_magnitude_vector")),
        ("score.modules_to_save.default.weight", ("score", "saved", False, "default", "weight")),
        ("score.modules_to_save.weight", ("score", "saved", False, None, "weight")),
        ("head.modules_to_save.default.dense.bias", ("head.dense", "saved", False, "default", "bias")),
        ("head.modules_to_save.default.norm.running_mean", ("head.norm", "saved", False, "default", "running_mean")),
        ("head.modules_to_save.lora_A.dense.bias", ("head.dense", "saved", False, "lora_A", "bias")),
        (f"{Q}.lora_A.modules_to_save.weight", (Q, "a", False, "modules_to_save", "")),
        (
            "head.modules_to_save.default.dense.lora_A.default.weight",
            ("head.dense.lora_A.default", "other", False, None, "weight"),
        ),
        ("head.original_module.dense.bias", ("head.dense", "copy", False, None, "bias")),
        ("head.running_mean", ("head", "copy", False, None, "running_mean")),
        (f"{E}.token_adapter.trainable_tokens_delta", (E, "tokens", False, None, "")),
        (f"{E}.token_adapter.trainable_tokens_delta.default", (E, "tokens", False, "default", "")),
        (f"{E}.token_adapter.base_layer.weight", (E, "copy", False, None, "weight")),
        (f"{E}.base_layer.token_adapter.base_layer.weight", (E, "copy", False, None, "weight")),
        (f"{E}.base_layer.token_adapter.trainable_tokens_delta", (E, "tokens", False, None, "")),
        (f"{E}.token_adapter.base_layer.modules_to_save.default.weight", (E, "saved", False, "default", "weight")),
        (f"{E}.token_adapter.trainable_tokens_original", (E, "other", False, None, "")),
        ("", ("", "copy", False, None, "")),
        ("_orig_mod", ("", "other", False, None, "")),
        ("weight", ("", "copy", False, None, "weight")),
    ],
)
def test_parse_key(key: str, expected: tuple[str, str, bool, str | None, str]) -> None:
    parsed = parse_key(key)
    assert (parsed.module, parsed.role, parsed.embedding, parsed.adapter, parsed.parameter) == expected
    assert parsed.key == key


def test_what_peft_wrapped_and_what_it_keeps_of_the_base() -> None:
    assert parse_key("a.head.modules_to_save.default.dense.bias").root == "a.head"
    assert parse_key("a.head.dense.bias").root == ""
    assert parse_key("a.head.original_module.dense.bias").original
    assert not parse_key("a.head.modules_to_save.default.dense.bias").original


TEXT = ("model.embed_tokens", "model.layers.0.q_proj", "lm_head")
BERT = ("bert.encoder.layer.0.query", "classifier")
MULTI = ("model.language_model.layers.0.q_proj", "model.visual.blocks.0.qkv", "lm_head")
OLD_MULTI = ("language_model.model.layers.0.q_proj", "vision_tower.blocks.0.qkv", "language_model.lm_head")


@pytest.mark.parametrize(
    ("modules", "prefix", "name", "expected"),
    [
        (TEXT, "model", "model.layers.0.q_proj", "model.layers.0.q_proj"),
        (TEXT, "model", "layers.0.q_proj", "model.layers.0.q_proj"),  # trained on the inner model
        (BERT, "bert", "encoder.layer.0.query", "bert.encoder.layer.0.query"),
        (("encoder.layer.0.query",), "bert", "bert.encoder.layer.0.query", "encoder.layer.0.query"),
        (MULTI, "model", "language_model.model.layers.0.q_proj", "model.language_model.layers.0.q_proj"),
        (MULTI, "model", "model.layers.0.q_proj", "model.language_model.layers.0.q_proj"),
        (MULTI, "model", "visual.blocks.0.qkv", "model.visual.blocks.0.qkv"),
        (MULTI, "model", "language_model.lm_head", "lm_head"),
        (OLD_MULTI, "", "model.language_model.layers.0.q_proj", "language_model.model.layers.0.q_proj"),
        (OLD_MULTI, "", "lm_head", "language_model.lm_head"),
        (TEXT, "model", "model.language_model.layers.0.q_proj", "model.layers.0.q_proj"),
        (TEXT, "model", "q_proj", None),  # a suffix is not a name
        (TEXT, "model", "layers.1.q_proj", None),
        (BERT, "model", "encoder.layer.0.query", None),  # the prefix of another model helps nobody
        (TEXT, "model", "model", None),
        (TEXT, "model", "", None),
    ],
)
def test_wrapping_prefixes(modules: tuple[str, ...], prefix: str, name: str, expected: str | None) -> None:
    found = NameResolver(modules, base_prefix=prefix).resolve(name)
    assert found == ((expected,) if expected else ())


def test_exact_names_win_and_others_must_be_unique() -> None:
    resolver = NameResolver(("model.layers.0.q", "model.language_model.layers.0.q"))
    assert resolver.resolve("model.layers.0.q") == ("model.layers.0.q",)
    with pytest.raises(
        AdapterError, match=r"'layers\.0\.q' must mean one module.*model\.layers\.0\.q, model\.language"
    ):
        resolver.resolve("layers.0.q")


def test_aliases_go_to_every_module_they_stand_for() -> None:
    modules = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
    resolver = NameResolver(modules, aliases={"shared": modules[1:]}, base_prefix="transformer")
    assert resolver.resolve("shared") == modules[1:]
    assert resolver.resolve("transformer.shared") == modules[1:]
    assert resolver.resolve("encoder.embed_tokens") == ("encoder.embed_tokens",)
    assert NameResolver(modules).resolve("shared") == ("shared",)
    assert [resolver.is_alias(name) for name in ("shared", "transformer.shared", "encoder.embed_tokens", "x")] == [
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(AdapterError, match=r"alias 'shared' must name modules of the base, got \['nowhere'\]"):
        NameResolver(modules, aliases={"shared": ("nowhere",)})


def test_renames_are_tried_on_names_that_are_not_found() -> None:
    renames = ((r"^transformer\.h\.", "model.layers."), (r"\.c_attn\.weight$", ".qkv.weight"))
    resolver = NameResolver(("model.layers.0.qkv", "model.layers.0.c_attn"), renames=renames, base_prefix="model")
    assert resolver.resolve("transformer.h.0.c_attn") == ("model.layers.0.qkv",)
    assert resolver.resolve("model.layers.0.c_attn") == ("model.layers.0.c_attn",)  # it exists
    assert NameResolver(("model.layers.0.qkv",)).resolve("transformer.h.0.c_attn") == ()
    # a rename that leads elsewhere than the prefixes do: nobody guesses
    torn = NameResolver(("model.layers.0.q", "model.layers.1.q"), renames=((r"^layers\.0", "model.layers.1"),))
    with pytest.raises(AdapterError, match="must mean one module"):
        torn.resolve("layers.0.q")


def test_renames_lead_to_prefixed_names_too() -> None:
    resolver = NameResolver(("model.layers.0.fc1",), renames=((r"dense_h_to_4h", "fc1"),), base_prefix="model")
    assert resolver.resolve("layers.0.dense_h_to_4h") == ("model.layers.0.fc1",)


def test_covers() -> None:
    assert covers(["q_proj"], "model.layers.0.q_proj")
    assert covers(["layers.0.q_proj"], "model.layers.0.q_proj")
    assert covers(["lm_head"], "lm_head")
    assert not covers(["proj"], "model.layers.0.q_proj")
    assert covers(r".*\.0\.(q|v)_proj", "model.layers.0.q_proj")
    assert not covers(r"layers\.0\.q_proj", "model.layers.0.q_proj")  # a regex is for the whole path


def test_listed_is_short() -> None:
    assert listed("abc") == "a, b, c"
    assert listed(str(n) for n in range(8)) == "0, 1, 2, 3, 4 and 3 more"
