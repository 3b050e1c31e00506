"""What is written is the same adapter again: to PEFT, which gives the same logits, and to the reader, bit by bit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from hf_multilora.formats import Adapter, AdapterError, LoraFactors, ModuleShape, write, write_adapter
from tests.formats import test_peft, test_saved, test_tokens, test_vocabulary, tiny

LORA = {
    name: (make, config)
    for name, (make, config) in test_peft.CASES.items()
    if name not in ("near misses", "regex targets", "gaussian", "orthogonal", "mica")
}
SAVED = {f"saved: {name}": (make, config) for name, (make, config, _) in test_saved.CASES.items()}
TOKENS = {f"tokens: {name}": (make, config) for name, (make, config, _) in test_tokens.CASES.items()}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = LORA | SAVED | TOKENS


def aliases_of(model: Any) -> dict[str, tuple[str, ...]]:
    found = [name for name, _ in model.named_modules() if name.split(".")[-1] == "shared"]
    return {name: tuple(name.removesuffix("shared") + part for part in tiny.SHARED["shared"]) for name in found}


def read(folder: Path, make: Callable[[], Any]) -> Adapter:
    model = tiny.twin(make)
    return tiny.read(folder, model, aliases=aliases_of(model))


def put(folder: Path, adapter: Adapter, make: Callable[[], Any], **settings: Any) -> None:
    model = tiny.twin(make)
    write_adapter(folder, adapter, tiny.shapes(model), aliases=aliases_of(model), **settings)


def assert_equal(got: Adapter, want: Adapter) -> None:
    assert sorted(got.factors) == sorted(want.factors)
    for site, pair in want.factors.items():
        other = got.factors[site]
        assert other.scaling == pair.scaling, site
        for one, two in ((other.a, pair.a), (other.b, pair.b)):
            assert one.dtype == two.dtype and torch.equal(one, two), site
    assert got.labels == want.labels


@pytest.mark.parametrize("case", CASES)
def test_round_trips(case: str, tmp_path: Path) -> None:
    make, config = CASES[case]
    peft_model = tiny.save(tiny.twin(make), tmp_path / "from", touch=tiny.touch_saved, **config)
    adapter = read(tmp_path / "from", make)
    put(tmp_path / "to", adapter, make)
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == [tiny.CONFIG, tiny.WEIGHTS]
    assert_equal(read(tmp_path / "to", make), adapter)
    loaded = peft.PeftModel.from_pretrained(tiny.twin(make), tmp_path / "to")
    torch.testing.assert_close(tiny.outputs(loaded), tiny.outputs(peft_model), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(tiny.outputs(tiny.twin(make)), tiny.outputs(peft_model), rtol=1e-3, atol=1e-3)
    # PEFT found the same modules, no more
    deltas = tiny.deltas(loaded)
    assert sorted(deltas) == sorted(site for site in adapter.factors if ":" not in site)
    for name, delta in tiny.deltas(peft_model).items():
        if name in deltas:
            torch.testing.assert_close(deltas[name], delta, rtol=1e-6, atol=1e-6)
    # and what it saves is the same adapter once more
    loaded.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    assert_equal(read(tmp_path / "again", make), adapter)


@pytest.mark.parametrize("base", test_vocabulary.BASES)
@pytest.mark.parametrize("case", ["plain", "both", "token rows"])
def test_resized_vocabularies(case: str, base: str, tmp_path: Path) -> None:
    make, (config, _) = test_vocabulary.BASES[base], test_vocabulary.CASES[case]
    wide = test_vocabulary.wide(make, tmp_path / "base")
    peft_model = tiny.save(wide, tmp_path / "from", touch=test_vocabulary.touch_ends, **config)
    adapter = read(tmp_path / "from", make)
    put(tmp_path / "to", adapter, make)
    assert_equal(read(tmp_path / "to", make), adapter)
    loaded = peft.PeftModel.from_pretrained(test_vocabulary.wide(make, tmp_path / "base"), tmp_path / "to")
    got, want = (tiny.outputs(model, test_vocabulary.NEW) for model in (loaded, peft_model))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_heads_of_other_widths(tmp_path: Path) -> None:
    def wide() -> Any:
        return tiny.scorer(7)

    peft_model = tiny.save(tiny.twin(wide), tmp_path / "from", touch=tiny.touch_saved, task_type="SEQ_CLS")
    tiny.edit_config(tmp_path / "from", id2label={str(n): f"n{n}" for n in range(7)})
    adapter = read(tmp_path / "from", tiny.scorer)
    put(tmp_path / "to", adapter, tiny.scorer)
    assert_equal(read(tmp_path / "to", tiny.scorer), adapter)
    loaded = peft.PeftModel.from_pretrained(tiny.twin(wide), tmp_path / "to")
    torch.testing.assert_close(tiny.outputs(loaded), tiny.outputs(peft_model))


def test_statistics(tmp_path: Path) -> None:
    config = {"target_modules": ["first"], "modules_to_save": ["norm"]}
    tiny.save(test_saved.Statistics(), tmp_path / "from", touch=tiny.touch_saved, **config)
    adapter = tiny.read(tmp_path / "from", test_saved.Statistics())
    write_adapter(tmp_path / "to", adapter, tiny.shapes(test_saved.Statistics()))
    assert_equal(tiny.read(tmp_path / "to", test_saved.Statistics()), adapter)
    loaded = peft.PeftModel.from_pretrained(test_saved.Statistics(), tmp_path / "to")
    assert torch.equal(tiny.as_saved(tiny.saved_modules(loaded)["norm"])[0], adapter.factors["norm:saved"].a)


def test_modules_that_an_alias_stood_for(tmp_path: Path) -> None:
    tiny.save(tiny.twin(tiny.t5), tmp_path / "from", target_modules=["shared"])
    adapter = read(tmp_path / "from", tiny.t5)
    assert sorted(adapter.factors) == ["decoder.embed_tokens", "encoder.embed_tokens"]
    put(tmp_path / "to", adapter, tiny.t5)
    assert_equal(read(tmp_path / "to", tiny.t5), adapter)
    loaded = peft.PeftModel.from_pretrained(tiny.twin(tiny.t5), tmp_path / "to")
    assert sorted(tiny.deltas(loaded)) == sorted(adapter.factors)
    tiny.assert_served(tiny.t5, adapter, loaded)


# -- heads that PEFT asks for -------------------------------------------------------------------------------
def test_heads_that_were_not_trained(tmp_path: Path) -> None:
    """PEFT will not load an adapter for classification without the head, also where it is the base's."""

    def touch(model: Any) -> None:
        tiny.saved_modules(model)["classifier.out_proj"].weight.add_(1)

    for name, change in (("none", None), ("half", touch)):
        config = {"target_modules": ["query"], "task_type": "SEQ_CLS", "touch": change}
        peft_model = tiny.save(tiny.twin(tiny.roberta), tmp_path / name, **config)
        adapter = read(tmp_path / name, tiny.roberta)
        assert [site for site in adapter.factors if ":" in site] == (["classifier.out_proj:saved"] if change else [])
        put(tmp_path / name, adapter, tiny.roberta, overwrite=True)
        assert_equal(read(tmp_path / name, tiny.roberta), adapter)
        loaded = peft.PeftModel.from_pretrained(tiny.twin(tiny.roberta), tmp_path / name)
        torch.testing.assert_close(tiny.outputs(loaded), tiny.outputs(peft_model))
    modules = {name: test_saved.blank(shape) for name, shape in tiny.shapes(tiny.twin(tiny.roberta)).items()}
    with pytest.raises(AdapterError, match=r"classifier\.dense must be written too, .*own weight is not known"):
        write_adapter(tmp_path / "x", adapter, modules)
    lora = adapter.factors["roberta.encoder.layer.0.attention.self.query"]
    with pytest.raises(
        AdapterError, match=r"classifier\.dense is trained with LoRA, but PEFT saves classifier in full"
    ):
        put(tmp_path / "x", made({"classifier.dense": lora}, task_type="SEQ_CLS"), tiny.roberta)
    assert not (tmp_path / "x").exists()


def made(factors: Mapping[str, LoraFactors], **config: Any) -> Adapter:
    return Adapter("made", "0", "base", factors, config)


# -- ranks, scales, names -----------------------------------------------------------------------------------
def pair(r: int, scaling: float) -> LoraFactors:
    return LoraFactors(torch.randn(r, 16), torch.randn(16, r), scaling)


@pytest.mark.parametrize("rslora", [False, True])
def test_ranks_and_scales_of_their_own(rslora: bool, tmp_path: Path) -> None:
    """Each module gets its own rank and scale, also where its path is the end of another's."""

    class Nested(torch.nn.Module):
        base_model_prefix = ""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.free = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
            self.a = torch.nn.ModuleDict({"q": torch.nn.Linear(16, 16), "free": torch.nn.Linear(16, 16)})
            self.b = torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"q": torch.nn.Linear(16, 16)})})

    scales = {"q": (2, 3.0), "a.q": (3, 0.1), "b.a.q": (2, 7 / math.sqrt(2)), "free": (5, 1 / 3)}
    adapter = made({name: pair(*each) for name, each in scales.items()}, use_rslora=rslora)
    write_adapter(tmp_path, adapter, tiny.shapes(Nested()))
    got = tiny.read(tmp_path, Nested())
    for name, each in adapter.factors.items():
        assert torch.equal(got.factors[name].a, each.a) and torch.equal(got.factors[name].b, each.b)
        assert math.isclose(got.factors[name].scaling, each.scaling, rel_tol=2**-52)
    loaded = peft.PeftModel.from_pretrained(Nested(), tmp_path)
    deltas = tiny.deltas(loaded)
    assert sorted(deltas) == sorted(scales)  # not a.free, whose path ends in that of another
    for name, each in adapter.factors.items():
        torch.testing.assert_close(deltas[name], each.scaling * each.b @ each.a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rslora", [False, True])
def test_scales_that_come_from_a_config_come_back(rslora: bool) -> None:
    for r in (1, 2, 3, 5, 7, 8, 12, 16, 64, 100, 256):
        for alpha in (1, 2, 3, 7, 16, 32, 0.1, 1.5, 100.25, 1e-3):
            scaling = alpha / math.sqrt(r) if rslora else alpha / r
            found = write.alpha_of(r, scaling, rslora)
            assert (found / math.sqrt(r) if rslora else found / r) == scaling
            assert isinstance(found, int) == float(alpha).is_integer()


def test_what_the_config_keeps(tmp_path: Path) -> None:
    tiny.save(tiny.twin(tiny.scorer), tmp_path / "from", touch=tiny.touch_saved, task_type="SEQ_CLS")
    tiny.edit_config(tmp_path / "from", base_model_name_or_path="org/base", revision="main", peft_version="9", x=1)
    (tmp_path / "from" / "config.json").write_text(json.dumps({"id2label": {"0": "a", "1": "b", "2": "c"}}))
    adapter = read(tmp_path / "from", tiny.scorer)
    put(tmp_path / "to", adapter, tiny.scorer)
    config = json.loads((tmp_path / "to" / tiny.CONFIG).read_text())
    kept = {"base_model_name_or_path": "org/base", "revision": "main", "task_type": "SEQ_CLS"}
    assert {key: config[key] for key in kept} == kept and not {"x", "peft_version"} & set(config)
    assert config["id2label"] == {"0": "a", "1": "b", "2": "c"}
    again = read(tmp_path / "to", tiny.scorer)
    assert again.labels == adapter.labels == ("a", "b", "c") and again.base_model == "org/base"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_stay(dtype: torch.dtype, tmp_path: Path) -> None:
    config = {"modules_to_save": ["lm_head", "norm"], "trainable_token_indices": [3, 1]}
    tiny.save(tiny.twin(tiny.llama), tmp_path / "from", touch=tiny.touch_saved, **config)
    tiny.edit_weights(tmp_path / "from", lambda tensors: {key: t.to(dtype) for key, t in tensors.items()})
    adapter = read(tmp_path / "from", tiny.llama)
    put(tmp_path / "to", adapter, tiny.llama)
    assert_equal(read(tmp_path / "to", tiny.llama), adapter)
    assert {t.dtype for t in load_file(tmp_path / "to" / tiny.WEIGHTS).values()} == {dtype}


def test_an_adapter_without_lora(tmp_path: Path) -> None:
    tiny.save(tiny.twin(tiny.llama), tmp_path / "from", touch=tiny.touch_saved, modules_to_save=["norm"])
    tiny.edit_weights(tmp_path / "from", lambda tensors: {k: t for k, t in tensors.items() if "lora_" not in k})
    adapter = read(tmp_path / "from", tiny.llama)
    put(tmp_path / "to", adapter, tiny.llama)
    assert_equal(read(tmp_path / "to", tiny.llama), adapter)
    loaded = peft.PeftModel.from_pretrained(tiny.twin(tiny.llama), tmp_path / "to")
    torch.testing.assert_close(tiny.outputs(loaded), tiny.outputs(tiny.served(tiny.twin(tiny.llama), adapter)))


# -- what PEFT could not read -------------------------------------------------------------------------------
def test_names_that_are_ends_of_others(tmp_path: Path) -> None:
    def inner() -> Any:
        return tiny.llama().model

    norm = LoraFactors(torch.ones(1, 16), torch.ones(0, 1), 1.0)
    with pytest.raises(
        AdapterError, match=r"module norm cannot be written for PEFT, which would take layers\.0\.input_l"
    ):
        put(tmp_path / "x", made({"norm:saved": norm}), inner)
    every = [name for name in tiny.shapes(inner()) if name.endswith("norm")]
    put(tmp_path / "all", made({f"{name}:saved": norm for name in every}), inner)  # then there are no others
    loaded = peft.PeftModel.from_pretrained(inner(), tmp_path / "all")
    assert sorted(tiny.saved_modules(loaded)) == sorted(every)
    rows = LoraFactors(torch.ones(1, 16), torch.tensor([[3]]), 1.0)
    modules = {name: ModuleShape("embedding", 40, 16) for name in ("table", "other.table")}
    with pytest.raises(AdapterError, match=r"module table cannot be written for PEFT, which would take other\.table"):
        write_adapter(tmp_path / "x", made({"table:tokens": rows}), modules)
    assert not (tmp_path / "x").exists()


def test_a_bias_that_the_base_has_not(tmp_path: Path) -> None:
    head = LoraFactors(torch.ones(3, 16), torch.ones(1, 3), 1.0)
    with pytest.raises(AdapterError, match="module score has a bias in the adapter and none in the base"):
        put(tmp_path / "x", made({"score:saved": head}), tiny.scorer)
    put(tmp_path / "x", made({"score:saved": LoraFactors(head.a, head.b * 0, 1.0)}), tiny.scorer)


def test_token_rows_that_peft_would_tie(tmp_path: Path) -> None:
    def rows(*ids: int, value: float = 1.0) -> LoraFactors:
        return LoraFactors(torch.full((len(ids), 16), value), torch.tensor([ids]), 1.0)

    E, H = "model.embed_tokens:tokens", "lm_head:tokens"
    tied = test_tokens.tied
    for n, factors in enumerate(({H: rows(1)}, {E: rows(1), H: rows(1)}, {E: rows(1, 2), H: rows(1)})):
        put(tmp_path / str(n), made(factors), tied)
        assert_equal(read(tmp_path / str(n), tied), made(factors))
    for factors in ({E: rows(1)}, {E: rows(1), H: rows(1, value=2.0)}):
        put(tmp_path / f"untied {len(factors)}", made(factors), tiny.llama)
        with pytest.raises(AdapterError, match="must have trained token rows as PEFT ties them"):
            put(tmp_path / "x", made(factors), tied)
    ends = ["encoder.embed_tokens", "decoder.embed_tokens", "lm_head"]
    put(tmp_path / "all", made({f"{end}:tokens": rows(1) for end in ends}), tiny.t5)
    assert "shared.token_adapter" in next(iter(load_file(tmp_path / "all" / tiny.WEIGHTS)))
    put(tmp_path / "one", made({"lm_head:tokens": rows(1)}), tiny.t5)
    with pytest.raises(AdapterError, match=r"must have trained token rows .* without shared, which they are tied to"):
        put(tmp_path / "x", made({f"{end}:tokens": rows(1) for end in ends[:2]}), tiny.t5)
    assert not (tmp_path / "x").exists()


def test_a_module_that_the_base_lacks(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"the base has no module nowhere"):
        put(tmp_path / "x", made({"nowhere": pair(1, 1.0)}), tiny.llama)


# -- folders ------------------------------------------------------------------------------------------------
@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    tiny.save(tiny.twin(tiny.llama), tmp_path / "from")
    return read(tmp_path / "from", tiny.llama)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_adapter_is_not_overwritten_unasked(adapter: Adapter, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    put(folder, adapter, tiny.llama)
    (folder / "README.md").write_text("mine")
    before = contents(folder)
    with pytest.raises(
        FileExistsError, match=r"must hold no adapter, it holds adapter_model\.safetensors, adapter_config"
    ):
        put(folder, adapter, tiny.llama)
    assert contents(folder) == before
    other = Adapter(adapter.source, "", None, dict(list(adapter.factors.items())[:1]), {})
    put(folder, other, tiny.llama, overwrite=True)
    assert_equal(read(folder, tiny.llama), other)
    assert sorted(contents(folder)) == ["README.md", tiny.CONFIG, tiny.WEIGHTS]
    tiny.to_pickle(folder, "adapter_model.bin")
    with pytest.raises(FileExistsError, match=r"adapter_model\.bin"):
        put(folder, adapter, tiny.llama)
    put(folder, adapter, tiny.llama, overwrite=True)
    assert sorted(contents(folder)) == ["README.md", tiny.CONFIG, tiny.WEIGHTS]
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        put(tmp_path / "file", adapter, tiny.llama)


# steps: two files made, two moved in, and before that two replaced ones moved away
@pytest.mark.parametrize(
    ("existing", "failing"),
    [(what, n) for what in ("nothing", "folder", "adapter") for n in range(4 + 2 * (what == "adapter"))],
)
def test_nothing_is_left_half_written(
    existing: str, failing: int, adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error, or an interrupt, at every step."""
    folder = tmp_path / "to"
    if existing != "nothing":
        folder.mkdir()
        (folder / "README.md").write_text("mine")
    if existing == "adapter":
        put(folder, Adapter(adapter.source, "", None, dict(list(adapter.factors.items())[:1]), {}), tiny.llama)
    before = contents(folder) if folder.exists() else None
    steps = 0

    def counted(call: Callable[..., Any], late: bool) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == failing + 1 and not late:
                raise OSError("disk full")
            result = call(*args, **kwargs)
            if steps == failing + 1:
                raise KeyboardInterrupt
            return result

        return run

    for late in (False, True):
        steps = 0
        with monkeypatch.context() as patched:
            patched.setattr(write, "save_file", counted(write.save_file, late))
            patched.setattr(write.json, "dumps", counted(json.dumps, late))
            patched.setattr(write.os, "replace", counted(os.replace, late))
            with pytest.raises((OSError, KeyboardInterrupt)):
                put(folder, adapter, tiny.llama, overwrite=True)
        assert (contents(folder) if folder.exists() else None) == before
    put(folder, adapter, tiny.llama, overwrite=True)
    assert_equal(read(folder, tiny.llama), adapter)
