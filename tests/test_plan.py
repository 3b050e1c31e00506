"""A plan made before loading equals what loading and using the adapters then takes."""

from __future__ import annotations

import copy
import doctest
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from hf_multilora import AdapterError, MultiLoRAModel
from hf_multilora.pool import pool_rows
from tests.tiny import bert, gpt2, llama, logits, same_ids, save_adapter, snapshot, t5
from tests.tree import ROOT

Paths = dict[str, str]
# Of ranks whose sums lie in different sixteens for different numbers of slots, as pools come in sixteens of rank rows.
LLAMA: dict[str, dict[str, Any]] = {
    "wide": {"r": {"q_proj": 23, "v_proj": 2, "up_proj": 21, "down_proj": 1}},
    "q": {"r": 4, "targets": ["q_proj", "lm_head"]},
    "mlp": {"r": 12, "targets": ["up_proj", "embed_tokens"]},
    "one": {"r": 1},
    "six": {"r": 6},
}
# name -> (base, adapters)
CASES: dict[str, tuple[Any, dict[str, dict[str, Any]]]] = {
    "llama": (llama, LLAMA),
    "tied": (lambda: llama(tie_word_embeddings=True), {k: v for k, v in LLAMA.items() if k != "q"}),
    "gpt2": (gpt2, {"a": {"r": {"c_attn": 5, "c_proj": 2}, "targets": ["c_attn", "c_proj"]},
                    "b": {"r": 13, "targets": ["c_fc"]}, "c": {"r": 4, "targets": ["c_fc", "wte"]}}),
    "t5": (t5, {"a": {"r": 15, "targets": ["q", "wo"]}, "b": {"targets": ["k", "wi"]}, "c": {"r": 2, "targets": ["q"]},
                "d": {"r": 2, "targets": ["shared"]}}),
    "bert": (bert, {"a": {"r": 17, "targets": ["query"], "task_type": "SEQ_CLS"},
                    "b": {"r": 16, "targets": ["query", "dense"], "task_type": "SEQ_CLS"}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """made("llama"): (base, its folder without weights, adapter folders by name)."""
    done: dict[str, tuple[Any, Path, Paths]] = {}

    def get(name: str) -> tuple[Any, Path, Paths]:
        if name not in done:
            torch.manual_seed(0)
            build, adapters = CASES[name]
            base, folder = build(), tmp_path_factory.mktemp(name)
            base.save_pretrained(folder / "base")
            (folder / "base" / "model.safetensors").unlink()
            paths = {n: str(save_adapter(base, folder / n, **settings)) for n, settings in adapters.items()}
            done[name] = base, folder / "base", paths
        return done[name]

    return get


def use_all(model: Any) -> Any:
    """Bring every adapter into a slot once; what it takes then."""
    for row in model.list_adapters():
        with model.adapters([row["name"]]):
            pass
    return model.memory_report()


def really(base: Any, paths: Mapping[str, str], **settings: Any) -> Any:
    """(memory_report, host bytes by adapter) of a copy of the base that has used all adapters."""
    model = MultiLoRAModel.from_pretrained(copy.deepcopy(base), paths, **settings)
    return use_all(model), {row["name"]: row["bytes"] for row in model.list_adapters()}


def assert_equal(plan: Any, real: Any) -> None:
    report, hosts = real
    assert {name: module.bytes for name, module in plan.per_module.items()} == report.per_module
    assert plan.device_bytes == report.device_bytes > 0
    assert sum(module.rank_rows for module in plan.per_module.values()) == report.rank_rows
    assert plan.adapter_bytes == hosts and plan.host_bytes == report.host_bytes > 0
    for module in plan.per_module.values():
        assert module.bytes == module.rank_rows * (module.in_features + module.out_features) * module.dtype.itemsize


# -- what is planned is what happens ------------------------------------------------------------------
@pytest.mark.parametrize("settings", [{}, {"max_lora_rank": 23}, {"lora_dtype": "float64"}])
@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_what_loading_then_takes(made: Any, name: str, settings: dict[str, Any]) -> None:
    base, folder, paths = made(name)
    slots = len(paths) - 1
    real = really(base, paths, max_loras=slots, **settings)
    kind = {"t5": tf.T5ForConditionalGeneration, "bert": tf.BertForSequenceClassification}.get(name)
    for origin, how in ((base, {}), (folder, {"auto_class": kind, **({"num_labels": 3} if name == "bert" else {})})):
        plan = MultiLoRAModel.plan(origin, paths, max_loras=slots, **settings, **how)
        assert_equal(plan, real)
        assert plan.base_bytes == sum(p.nbytes for p in base.parameters()) and plan.max_loras == slots
    fewer = MultiLoRAModel.plan(base, paths, max_loras=1 if slots > 1 else 2, **settings)
    assert fewer.device_bytes != plan.device_bytes, "the number of slots does not matter: the check says nothing"
    if not settings:
        some = MultiLoRAModel.plan(base, dict(list(paths.items())[1:]), max_loras=slots)
        assert some.device_bytes < plan.device_bytes, "the first adapter does not matter: the check says nothing"


def test_a_list_of_adapters_and_use_in_calls(made: Any) -> None:
    base, _, paths = made("llama")
    plan = MultiLoRAModel.plan(base, list(paths.values()), max_loras=2)
    model = MultiLoRAModel.from_pretrained(copy.deepcopy(base), list(paths.values()), max_loras=2)
    for pair in (["one", "mlp"], ["six", None], ["wide", "q"], ["mlp", "six"]):
        logits(model, same_ids(2), pair)
    assert plan.device_bytes == model.memory_report().device_bytes


def test_pool_rows() -> None:
    """The largest ranks, or the bound in each slot; rounded up to sixteens, and no further."""
    assert pool_rows(iter([3, 0, 17, 15]), 2, None) == 32 and pool_rows(iter([3, 0, 17, 15]), 3, None) == 48
    assert pool_rows([3], 8, None) == pool_rows([16], 8, None) == 16 and pool_rows([17], 8, None) == 32
    assert pool_rows([3, 1], 4, 8) == pool_rows([], 4, 8) == 32
    assert pool_rows([3, 1], 3, 11) == pool_rows([], 3, 11) == 48
    assert pool_rows([], 2, None) == pool_rows([0, 0], 2, None) == 0
    rng = random.Random(0)
    for _ in range(200):
        ranks = [rng.randrange(80) for _ in range(rng.randrange(9))]
        slots, bound = rng.randint(1, 9), rng.randint(1, 80)
        largest = sum(sorted(ranks)[-slots:])
        for rows, needed in ((pool_rows(ranks, slots, None), largest), (pool_rows(ranks, slots, bound), slots * bound)):
            assert rows % 16 == 0 and needed <= rows < needed + 16


# -- dtypes -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"dtype": "auto"}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": torch.float16}, torch.float16),
        ({"lora_dtype": "float32"}, torch.float32),
        ({"dtype": torch.float16, "lora_dtype": torch.bfloat16}, torch.bfloat16),
    ],
)
def test_dtypes_are_those_of_from_pretrained(tmp_path: Path, settings: dict[str, Any], dtype: torch.dtype) -> None:
    base = llama().to(torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    path = str(save_adapter(base, tmp_path / "a"))
    plan = MultiLoRAModel.plan(str(tmp_path / "base"), [path], **settings)
    assert {module.dtype for module in plan.per_module.values()} == {dtype}
    model = MultiLoRAModel.from_pretrained(tmp_path / "base", [path], **settings)
    assert plan.base_bytes == sum(p.nbytes for p in model.parameters())
    assert_equal(plan, (use_all(model), {"a": model.list_adapters()[0]["bytes"]}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_modules_that_stay_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    """T5's `wo`, in float16."""
    t5().save_pretrained(tmp_path / "base")
    path = str(save_adapter(t5(), tmp_path / "a", targets=["q", "wo"], task_type="SEQ_2_SEQ_LM"))
    plan = MultiLoRAModel.plan(tmp_path / "base", [path], dtype=dtype)
    model = MultiLoRAModel.from_pretrained(tmp_path / "base", [path], dtype=dtype)
    assert_equal(plan, (use_all(model), {"a": model.list_adapters()[0]["bytes"]}))
    assert plan.base_bytes == sum(p.nbytes for p in model.parameters())
    kept = {name.rsplit(".", 1)[1]: module.dtype for name, module in plan.per_module.items()}
    assert kept == {"q": dtype, "wo": torch.float32 if dtype == torch.float16 else dtype}


def test_a_config_without_dtype_needs_one(made: Any, tmp_path: Path) -> None:
    config = made("llama")[0].config.to_dict()
    tf.LlamaConfig(**{k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")}).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written["dtype"] = None
    (tmp_path / "config.json").write_text(json.dumps(written | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match=r"config names none.*pass dtype="):
        MultiLoRAModel.plan(tmp_path, max_lora_rank=4)
    assert MultiLoRAModel.plan(tmp_path, max_lora_rank=4, dtype="float32").device_bytes > 0


# -- which class, which settings of Transformers ------------------------------------------------------
@pytest.mark.parametrize(
    ("task", "settings", "head"),
    [
        ("CAUSAL_LM", {}, "lm_head"),
        ("SEQ_CLS", {"num_labels": 5}, "score"),
        ("FEATURE_EXTRACTION", {"local_files_only": True, "trust_remote_code": False}, None),
        (None, {"auto_class": tf.LlamaForSequenceClassification, "num_labels": 5, "device_map": "cpu"}, "score"),
        (None, {"auto_class": "AutoModelForTokenClassification", "use_safetensors": True}, "score"),
    ],
)
def test_the_class_is_that_of_from_pretrained(tmp_path: Path, task: Any, settings: Any, head: str | None) -> None:
    llama().save_pretrained(tmp_path / "base")
    targets = ["q_proj"] if head is None else ["q_proj", head]
    kind = {"FEATURE_EXTRACTION": "AutoModel", "SEQ_CLS": "AutoModelForSequenceClassification"}.get(task)
    bare: Any = settings.get("auto_class") or kind or tf.LlamaForCausalLM
    bare = getattr(tf, bare) if isinstance(bare, str) else bare
    bare = bare.from_pretrained(tmp_path / "base", num_labels=settings.get("num_labels", 2))
    path = str(save_adapter(bare, tmp_path / "a", targets=targets, task_type=task))
    plan = MultiLoRAModel.plan(tmp_path / "base", [path], **settings)
    model = MultiLoRAModel.from_pretrained(tmp_path / "base", [path], **settings)
    model._multilora.fresh = frozenset()  # the checkpoint has no head, whose random values are of no matter here
    assert_equal(plan, (use_all(model), {"a": model.list_adapters()[0]["bytes"]}))
    assert plan.base_bytes == sum(p.nbytes for p in bare.parameters())
    names = {name.rsplit(".", 1)[-1] for name in plan.per_module}
    assert names == set(targets)


def test_a_given_config_counts_and_stays(made: Any) -> None:
    base, folder, paths = made("llama")
    config = copy.deepcopy(base.config)
    config.num_hidden_layers = 1
    before = config.to_dict()
    small = {"small": str(save_adapter(llama(num_hidden_layers=1), folder.parent / "small"))}
    plan = MultiLoRAModel.plan(folder, small, config=config, dtype="bfloat16")
    assert len(plan.per_module) == 4 and config.to_dict() == before
    with pytest.raises(AdapterError, match="not found in the base"):
        MultiLoRAModel.plan(folder, paths, config=config)


def test_what_a_config_does_not_tell_is_refused(made: Any, tmp_path: Path) -> None:
    _, folder, paths = made("llama")
    for settings in ({"quantization_config": {"bits": 4}}, {"tp_plan": "auto"}):
        with pytest.raises(ValueError, match=f"{next(iter(settings))}.*load the base and pass it instead"):
            MultiLoRAModel.plan(folder, paths, **settings)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantization_config of its config"):
        MultiLoRAModel.plan(tmp_path, paths)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        MultiLoRAModel.plan(folder, paths, colour="red")
    same = {"max_cpu_loras": 9, "backend": "torch", "deterministic": False}  # from_pretrained's, checked as there
    assert MultiLoRAModel.plan(folder, paths, **same) == MultiLoRAModel.plan(folder, paths)
    with pytest.raises(ValueError, match="max_cpu_loras must be at least max_loras"):
        MultiLoRAModel.plan(folder, paths, max_cpu_loras=1)


# -- how many fit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 23, 32])
def test_how_many_fit(made: Any, rank: int | None) -> None:
    base, folder, paths = made("llama")
    costs = [really(base, paths, max_loras=n, max_lora_rank=rank)[0].device_bytes for n in range(1, len(paths) + 1)]
    assert costs == sorted(costs) and costs[0] < costs[1] < costs[2]
    for cost in costs:
        for budget in (cost, cost - 1):
            fits = sum(each <= budget for each in costs)
            plan = MultiLoRAModel.plan(folder, paths, max_lora_rank=rank, budget=budget, max_loras=2)
            assert (plan.fits, plan.budget, plan.max_loras) == (fits, budget, 2)
    much = MultiLoRAModel.plan(base, paths, max_lora_rank=rank, budget=100 * costs[-1])
    if rank is None:
        assert much.fits == len(paths)
    else:
        largest, next_one = (
            MultiLoRAModel.plan(base, paths, max_lora_rank=rank, max_loras=much.fits + more).device_bytes
            for more in (0, 1)
        )
        assert largest <= 100 * costs[-1] < next_one and much.fits >= 100 * len(paths)
    assert MultiLoRAModel.plan(base, paths).fits is None


@pytest.mark.parametrize(("rank", "fits"), [(5, 6), (8, 4), (16, 2), (17, 1)])
def test_slots_of_small_ranks_share_sixteen_rank_rows(made: Any, rank: int, fits: int) -> None:
    """How many fit in the room of 32 rank rows per module, and in a byte less than that."""
    room = MultiLoRAModel.plan(made("llama")[0], max_lora_rank=32, max_loras=1).device_bytes
    for budget, want in ((room, fits), (room - 1, 16 // rank)):
        assert MultiLoRAModel.plan(made("llama")[0], max_lora_rank=rank, budget=budget).fits == want


@pytest.mark.parametrize(("given", "size"), [("2GB", 2 * 10**9), ("1.5GiB", 3 * 2**29), ("64MB", 64 * 10**6), (7, 7)])
def test_budgets(made: Any, given: Any, size: int) -> None:
    assert MultiLoRAModel.plan(made("llama")[0], max_lora_rank=1, budget=given).budget == size


@pytest.mark.parametrize("budget", [0, -5, "0GB", "-1GB", "much", "", 1.5, True])
def test_budgets_that_are_none(made: Any, budget: Any) -> None:
    kind = TypeError if isinstance(budget, (float, bool)) else ValueError
    with pytest.raises(kind, match="budget must be"):
        MultiLoRAModel.plan(made("llama")[0], max_lora_rank=1, budget=budget)


# -- without adapters ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "targets", "wanted"),
    [
        ("llama", None, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("llama", "all-linear", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("llama", ["q_proj", "embed_tokens", "lm_head"], {"q_proj", "embed_tokens", "lm_head"}),
        ("llama", r".*layers\.\d+\.mlp\.up_.*", {"up_proj"}),
        ("gpt2", None, {"c_attn", "c_proj", "c_fc"}),
        ("t5", None, {"q", "k", "v", "o", "wi", "wo"}),
    ],
)
def test_a_rank_bound_alone(made: Any, tmp_path: Path, name: str, targets: Any, wanted: set[str]) -> None:
    base, folder, _ = made(name)
    settings = {"max_loras": 3, "max_lora_rank": 11, "target_modules": targets}
    plan = MultiLoRAModel.plan(folder, **settings)
    assert plan == MultiLoRAModel.plan(base, **settings) and plan.adapter_bytes == {} and plan.host_bytes == 0
    assert {n.rsplit(".", 1)[-1] for n in plan.per_module} == wanted
    assert {m.rank_rows for m in plan.per_module.values()} == {48}, "33 in sixteens"
    path = save_adapter(base, tmp_path / "a", targets=wanted)
    assert plan.device_bytes == really(base, {"a": str(path)}, **settings)[0].device_bytes


def test_what_a_plan_needs(made: Any) -> None:
    base = made("llama")[0]
    with pytest.raises(ValueError, match="needs adapters, or max_lora_rank"):
        MultiLoRAModel.plan(base)
    for targets, match in (
        (["q_proj", "nowhere"], r"got nowhere; the base has e\.g\. .*q_proj"),
        ("nothing", "got 'nothing'"),
        (["norm"], "got norm"),
        ("(", "regular expression"),
    ):
        with pytest.raises(ValueError, match=match):
            MultiLoRAModel.plan(base, max_lora_rank=2, target_modules=targets)
    with pytest.raises(ValueError, match="max_loras must be a positive integer"):
        MultiLoRAModel.plan(base, max_lora_rank=2, max_loras=0)


# -- refused adapters ---------------------------------------------------------------------------------
def broken(kind: str, base: Any, folder: Path) -> tuple[str, dict[str, Any]]:
    """An adapter that is refused, and the settings under which it is."""
    save_adapter(base, folder, r=5, targets=["q_proj", "lm_head"])
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, settings = load_file(weights), json.loads(config.read_text())
    key = next(k for k in tensors if "q_proj.lora_A" in k)
    changes: dict[str, Any] = {
        "unknown module": lambda: tensors.update({k.replace("q_proj", "qq"): tensors.pop(k) for k in list(tensors)}),
        "shape": lambda: tensors.update({key: torch.zeros(5, 9)}),
        "nan": lambda: tensors[key].fill_(float("nan")),
        "inf in half": lambda: tensors[key].fill_(1e6),
        "dora": lambda: settings.update(use_dora=True),
        "leftover": lambda: tensors.update({"base_model.model.extra": torch.zeros(2)}),
        "copy of another shape": lambda: tensors.update({"base_model.model.lm_head.weight": torch.zeros(41, 16)}),
        "copy of nothing": lambda: tensors.update({"base_model.model.nowhere.weight": torch.zeros(4, 4)}),
        "copy of a norm": lambda: tensors.update({"base_model.model.model.norm.weight": torch.zeros(16)}),
        "missing": config.unlink,
    }
    changes.get(kind, lambda: None)()
    save_file(tensors, weights)
    if config.exists():
        config.write_text(json.dumps(settings))
    limits = {"rank": {"max_lora_rank": 4}, "targets": {"target_modules": "all-linear"}}
    return str(folder), limits.get(kind, {"lora_dtype": "float16"} if kind == "inf in half" else {})


KINDS = [
    "unknown module", "shape", "nan", "inf in half", "dora", "leftover", "copy of another shape", "copy of nothing",
    "copy of a norm", "missing", "rank", "targets",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_loading_refuses_the_plan_refuses_in_the_same_words(made: Any, tmp_path: Path, kind: str) -> None:
    base, folder, paths = made("llama")
    path, settings = broken(kind, base, tmp_path / "x")
    before = snapshot(base)
    words = []
    for run in (
        lambda: MultiLoRAModel.from_pretrained(copy.deepcopy(base), {"x": path}, **settings),
        lambda: MultiLoRAModel.plan(base, {"x": path}, **settings),
        lambda: MultiLoRAModel.plan(folder, {"x": path}, **settings, auto_class="AutoModelForCausalLM"),
    ):
        with pytest.raises((AdapterError, FileNotFoundError)) as caught:
            run()
        words.append((type(caught.value), str(caught.value)))
    assert words[0] == words[1] == words[2] and snapshot(base) == before
    assert MultiLoRAModel.plan(folder, {"one": paths["one"]}, **settings).device_bytes > 0


def test_copies_of_base_weights_are_compared_where_there_are_weights(made: Any, tmp_path: Path) -> None:
    base, folder, _ = made("llama")
    path = save_adapter(base, tmp_path / "a", targets=["q_proj"])
    tensors = load_file(path / "adapter_model.safetensors")
    own = base.model.layers[0].mlp.up_proj.weight.detach()
    for held, loads in ((own, True), (own + 1, False)):
        copied = {"base_model.model.model.layers.0.mlp.up_proj.weight": held.clone()}
        save_file(tensors | copied, path / "adapter_model.safetensors")
        assert MultiLoRAModel.plan(folder, [str(path)]).device_bytes > 0
        if loads:
            assert MultiLoRAModel.plan(base, [str(path)]) == MultiLoRAModel.plan(folder, [str(path)])
        else:
            with pytest.raises(AdapterError, match="differs from the base's"):
                MultiLoRAModel.plan(base, [str(path)])


# -- other bases --------------------------------------------------------------------------------------
def test_a_multi_lora_model_with_its_adapters(made: Any) -> None:
    base, _, paths = made("llama")
    model = MultiLoRAModel.from_pretrained(copy.deepcopy(base), paths, max_loras=2)
    before = [row for row in model.list_adapters()]
    for settings in ({}, {"lora_dtype": "bfloat16"}, {"max_lora_rank": 23}):
        assert MultiLoRAModel.plan(model, max_loras=3, **settings) == MultiLoRAModel.plan(
            base, paths, max_loras=3, **settings
        )
    few = MultiLoRAModel.from_pretrained(copy.deepcopy(base), {"x": paths["one"], "q": paths["one"]})
    plan = MultiLoRAModel.plan(few, {"q": paths["q"], "wide": paths["wide"]})
    same = MultiLoRAModel.plan(base, {"x": paths["one"], "q": paths["q"], "wide": paths["wide"]})
    assert plan == same != MultiLoRAModel.plan(base, {"x": paths["one"], "wide": paths["wide"]})
    with pytest.raises(AdapterError, match=r"'wide': rank must be at most 22 \(max_lora_rank\), got 23"):
        MultiLoRAModel.plan(model, max_lora_rank=22)
    with pytest.raises(AdapterError, match=r"'wide' trained .*up_proj.* target_modules=\['q_proj'\]"):
        MultiLoRAModel.plan(model, target_modules=["q_proj"])
    assert model.list_adapters() == before and model.memory_report().device_bytes == 0
    assert_equal(MultiLoRAModel.plan(model, max_loras=2), (use_all(model), {r["name"]: r["bytes"] for r in before}))


def test_adapters_that_came_from_memory(made: Any) -> None:
    config = LoraConfig(r=3, target_modules=["q_proj", "embed_tokens"])
    source = get_peft_model(copy.deepcopy(made("llama")[0]), config, adapter_name="own")
    with pytest.raises(TypeError, match=r"got PeftModel; take its adapters off first \(unload\(\)\)"):
        MultiLoRAModel.plan(source)
    model = MultiLoRAModel.from_pretrained(source)
    plan, half = MultiLoRAModel.plan(model), MultiLoRAModel.plan(model, lora_dtype="float16")
    assert half.device_bytes * 2 == plan.device_bytes and half.adapter_bytes["own"] < plan.adapter_bytes["own"]
    assert_equal(plan, (use_all(model), {"own": model.list_adapters()[0]["bytes"]}))


def test_bases_that_are_refused(made: Any) -> None:
    base, _, paths = made("llama")
    with pytest.raises(TypeError, match=r"got Linear$"):
        MultiLoRAModel.plan(torch.nn.Linear(2, 2), paths)
    with pytest.raises(ValueError, match=r"must be left out, got \['dtype'\]"):
        MultiLoRAModel.plan(base, paths, dtype="float16")
    tuned = copy.deepcopy(base)
    tuned.load_adapter(paths["one"], "inside")
    with pytest.raises(ValueError, match="must hold no adapters of PEFT"):
        MultiLoRAModel.plan(tuned, paths)
    with pytest.raises(ValueError, match="must be a non-empty string other than '__base__'"):
        MultiLoRAModel.plan(base, {"__base__": paths["one"]})


@pytest.mark.parametrize("fails", [False, True])
def test_a_plan_leaves_nothing_behind(made: Any, fails: bool) -> None:
    base, folder, paths = made("llama")
    before = snapshot(base), torch.get_default_dtype(), torch.empty(0).device, torch.linspace
    for origin in (base, folder):
        if fails:
            with pytest.raises(FileNotFoundError):
                MultiLoRAModel.plan(origin, {**paths, "x": str(folder)})
        else:
            MultiLoRAModel.plan(origin, paths, budget="1MB")
    assert before == (snapshot(base), torch.get_default_dtype(), torch.empty(0).device, torch.linspace)
    assert type(base) is tf.LlamaForCausalLM and not hasattr(base, "_multilora")
    assert not list(folder.glob("*.safetensors")), "the base had weights that could have been read"


# -- shown --------------------------------------------------------------------------------------------
def test_a_plan_can_be_read(made: Any) -> None:
    base, _, paths = made("llama")
    lines = str(MultiLoRAModel.plan(base, paths, max_loras=2, budget=4096)).splitlines()
    assert (
        lines[0].startswith("device 0.0 MiB for 2 slots in 10 modules, base ") and "0 adapters fit at once" in lines[0]
    )
    assert lines[1].split() == ["module", "count", "rank", "rows", "MiB", "dtype"]
    table = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert table["q_proj"] == ["2", "64", "0.0", "float32"] and len(table) == 6


def test_the_readme_says_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a folder that holds nothing but the config of the model that the README names."""
    tf.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```pycon\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 1
    names = {"MultiLoRAModel": MultiLoRAModel, "base": str(tmp_path)}
    test = doctest.DocTestParser().get_doctest(blocks[0], names, "README", "README.md", 0)
    runner = doctest.DocTestRunner()
    runner.run(test)
    assert runner.summarize().attempted > 0 and not runner.failures
