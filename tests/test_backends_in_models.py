"""Whole models with the Triton kernels, and with the deterministic ones: the answers of the torch backend, which are
those of each row alone with its adapter merged. On CPU tensors in Triton's interpreter, and on a CUDA device.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hf_multilora import residency
from hf_multilora.kernels.backends import TORCH, TRITON, TRITON_FIXED, backend, has_triton, interpreted
from hf_multilora.layers import ModuleSlots
from tests.tiny import Family, Names, assert_rows, bert, error, gpt2, ids, llama, merged, same_ids, t5

NOT_HERE = pytest.mark.skipif(
    not (has_triton() and interpreted()), reason="Triton on the CPU needs TRITON_INTERPRET=1 before its import"
)
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = [pytest.param("cpu", marks=NOT_HERE), pytest.param("cuda", marks=NO_CUDA)]
SETTINGS: Mapping[str, dict[str, Any]] = {
    TORCH: {"backend": "torch"},
    TRITON: {"backend": "triton"},
    TRITON_FIXED: {"backend": "triton", "deterministic": True},
}
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Adapters of all modules, of some, in one of which with a rank above every tile's, and of one with rank 1
ADAPTERS: Mapping[str, dict[str, tuple[str, ...]]] = {
    "llama": {"all": LINEARS, "wide": ("q_proj", "down_proj"), "one": ("v_proj",)},
    "tied": {"all": (*LINEARS, "lm_head", "embed_tokens"), "wide": ("lm_head", "k_proj"), "one": ("embed_tokens",)},
    "gpt2": {"all": ("c_attn", "c_fc", "c_proj"), "wide": ("c_proj", "wte"), "one": ("c_attn",)},
    "t5": {"all": ("q", "v", "wo"), "wide": ("q", "wo"), "one": ("lm_head",)},
    "bert": {"all": ("query", "key", "value", "dense"), "wide": ("dense", "classifier"), "one": ("word_embeddings",)},
}
RANKS = {"all": 3, "wide": 18, "one": 1}
WIDE = {"q_proj": 70, "down_proj": 18}  # in the first family only: the interpreter takes its time for each rank block
NAMES: Names = ["all", None, "wide", "one"]
ROWS = len(NAMES)


def _base(name: str) -> Any:
    if name in ("llama", "tied"):
        return llama(num_hidden_layers=1, tie_word_embeddings=name == "tied")
    base = {"gpt2": gpt2, "t5": t5, "bert": bert}[name]()
    if name == "gpt2":
        base.transformer.h = base.transformer.h[:1]
        base.config.n_layer = 1
    return base


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    torch.manual_seed(0)
    made: dict[str, Family] = {}
    for name, adapters in ADAPTERS.items():
        settings: dict[str, dict[str, Any]]
        settings = {own: {"r": RANKS[own], "targets": targets} for own, targets in adapters.items()}
        if name == "llama":
            settings["wide"]["r"] = WIDE
        made[name] = Family(_base(name), tmp_path_factory.mktemp(name), settings)
    return made


def inputs_of(name: str, rows: int = ROWS) -> dict[str, Tensor]:
    """The same tokens in every row: rows differ by their adapters only."""
    given = {"input_ids": same_ids(rows, 3)}
    return given | {"decoder_input_ids": same_ids(rows, 2)} if name == "t5" else given


def alone(family: Family, name: str | None, base: Any = None) -> Any:
    base = family.base if base is None else base
    return base if name is None else merged(base, family.paths[name])


@torch.no_grad()
def truth(family: Family, inputs: Mapping[str, Tensor], names: Names, base: Any = None) -> Tensor:
    models = {name: alone(family, name, base) for name in set(names)}
    rows = [{key: value[i : i + 1] for key, value in inputs.items()} for i in range(len(names))]
    return torch.cat([models[name](**row).logits for name, row in zip(names, rows, strict=True)])


@torch.no_grad()
def answer(model: Any, inputs: Mapping[str, Tensor], names: Names | None = None) -> Tensor:
    named = {} if names is None else {"adapter_names": list(names)}
    return model(**{key: value.to(model.device) for key, value in inputs.items()}, **named).logits.cpu()


def backends_of(model: Any) -> set[str]:
    return {slots.backend.name for _, slots in model._multilora.sites.values()}


@contextmanager
def launches() -> Iterator[list[str]]:
    """The kernels of all launches inside the block."""
    from hf_multilora.kernels.launch import Launcher

    seen: list[str] = []
    call = Launcher.__call__

    def count(launcher: Launcher, *pointers: Any) -> None:
        seen.append(launcher.kernel.fn.__name__)
        call(launcher, *pointers)

    with mock.patch.object(Launcher, "__call__", count):
        yield seen


ON_DEVICES = pytest.mark.parametrize("device", DEVICES)
ON_KERNELS = pytest.mark.parametrize("how", [TRITON, TRITON_FIXED])


@ON_DEVICES
@ON_KERNELS
@pytest.mark.parametrize("name", ADAPTERS)
def test_every_row_gets_its_own_adapter(families: dict[str, Family], name: str, how: str, device: str) -> None:
    family, inputs = families[name], inputs_of(name)
    model, plain = (family.model(**SETTINGS[key]).to(device) for key in (how, TORCH))
    with launches() as seen:
        got = answer(model, inputs, NAMES)
    assert {"lora_expand_kernel", "lora_expand_rows_kernel"} & {*seen} and backends_of(model) == {how}
    with launches() as none:
        other = answer(plain, inputs, NAMES)
    assert not none and backends_of(plain) == {TORCH}
    want = truth(family, inputs, NAMES)
    assert_rows(got, want, TOLERANCE[device])
    assert error(got, other) < TOLERANCE[device]
    short = {key: value[:1] for key, value in inputs.items()}
    for names, some in (([None] * ROWS, inputs), (["wide"], short)):
        assert error(answer(model, some, names), truth(family, some, names)) < TOLERANCE[device]
    assert error(answer(model, short, ["wide"]), truth(family, short, ["all"])) > 100 * TOLERANCE[device]


@ON_DEVICES
@pytest.mark.parametrize(("name", "how"), [("tied", TRITON), ("gpt2", TRITON_FIXED)])
def test_another_slots_rank_rows_would_show(families: dict[str, Family], name: str, how: str, device: str) -> None:
    """The same call with the slots' places turned by one: every row that has an adapter is wrong, base rows are not."""
    family, inputs = families[name], inputs_of(name)
    model = family.model(**SETTINGS[how]).to(device)
    want, tables = truth(family, inputs, NAMES), ModuleSlots.tables

    def turned(slots: ModuleSlots, slot: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        order, offsets, starts, ranks = tables(slots, slot)
        return order, offsets, starts.roll(1, 1), ranks.roll(1, 1)

    assert error(answer(model, inputs, NAMES), want) < TOLERANCE[device]
    with mock.patch.object(ModuleSlots, "tables", turned):
        got = answer(model, inputs, NAMES)
    for i, row in enumerate(NAMES):
        assert (error(got[i], want[i]) < TOLERANCE[device]) == (row is None), row


@ON_DEVICES
def test_linears_that_are_not_laid_use_both_kernels(families: dict[str, Family], device: str) -> None:
    family, inputs = families["llama"], inputs_of("llama")
    model = family.model(**SETTINGS[TRITON]).to(device)
    seen: list[Tensor] = []
    for module, _ in model._multilora.sites.values():
        module.register_forward_hook(lambda _module, _args, output: seen.append(output))
    with model.adapters(NAMES), launches() as launched:  # they are loaded before
        got = answer(model, inputs, NAMES)
    sites = len(model._multilora.sites)
    assert launched == ["lora_shrink_kernel", "lora_expand_kernel"] * sites
    assert len(seen) == sites and not any(slots.laid for _, slots in model._multilora.sites.values())
    assert_rows(got, truth(family, inputs, NAMES), TOLERANCE[device])


@ON_DEVICES
@pytest.mark.parametrize(
    ("name", "modules"),
    [("tied", ("q_proj", "down_proj", "lm_head", "embed_tokens")), ("gpt2", ("mlp.c_proj",))],
)
def test_a_rows_delta_depends_on_nothing_else_when_deterministic(
    families: dict[str, Family], name: str, modules: tuple[str, ...], device: str
) -> None:
    """Bitwise, per module, over a base of zeros: in a batch, alone, as the default, in another place and company."""
    model = families[name].model(**SETTINGS[TRITON_FIXED]).to(device)
    sites = [site for path, site in model._multilora.sites.items() if path.endswith(modules)]
    assert len(sites) == len(modules)
    for module, slots in sites:
        with torch.no_grad():
            module.weight.zero_()
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()
        if isinstance(module, torch.nn.Embedding):
            x = ids(ROWS, 3).to(device)
        else:
            x = torch.randn(ROWS, 3, slots.in_features, device=device)
        with torch.no_grad(), model.adapters(NAMES):
            batch = module(x)
        for i, row in list(enumerate(NAMES))[1:]:
            mine, others = x[i : i + 1], x[:2]
            with torch.no_grad(), model.adapters([row]):
                one = module(mine)
            with torch.no_grad(), model.adapters(["one", "all", row]):
                last = module(torch.cat([others, mine]))[2:]
            model.set_adapter(row)
            with torch.no_grad():
                default, flat = module(mine), module(x[i])[None]
            model.set_adapter(None)
            for got in (one, last, default, flat):
                assert torch.equal(got[0], batch[i]), (slots.name, row)
            trained = row is not None and slots.name in model._multilora.store.catalogue.entry(row).ranks
            assert bool(batch[i].any()) == trained, "only a base of zeros shows that nothing was added"


@ON_DEVICES
@ON_KERNELS
def test_sequences_packed_into_one_row(families: dict[str, Family], how: str, device: str) -> None:
    family, lengths = families["tied"], [1, 2, 2, 1]
    names, tokens = ["wide", None, "one", "all"], ids(1, sum(lengths))
    model = family.model(**SETTINGS[how]).to(device)
    packed = {"input_ids": tokens, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    got = answer(model, packed, names)[0].split(lengths)
    for own, name, other, part in zip(got, names, names[1:] + names[:1], tokens[0].split(lengths), strict=True):
        assert error(own, truth(family, {"input_ids": part[None]}, [name])[0]) < TOLERANCE[device]
        assert error(own, truth(family, {"input_ids": part[None]}, [other])[0]) > 100 * TOLERANCE[device]


@ON_DEVICES
@pytest.mark.parametrize(("name", "how"), [("llama", TRITON_FIXED), ("t5", TRITON)])
def test_generate_with_beams(families: dict[str, Family], name: str, how: str, device: str) -> None:
    family, names = families[name], ["all", None, "wide"]
    inputs = {"input_ids": same_ids(len(names), 3)}
    settings = {"max_new_tokens": 3, "num_beams": 2, "num_return_sequences": 2, "eos_token_id": None}
    settings |= {"pad_token_id": 0, "do_sample": False}
    model = family.model(**SETTINGS[how]).to(device)
    got = model.generate(input_ids=inputs["input_ids"].to(device), adapter_names=names, **settings).cpu()
    wants = [alone(family, name).generate(input_ids=inputs["input_ids"][:1], **settings) for name in names]
    assert got.shape[0] == 2 * len(names)
    assert [torch.equal(*pair) for pair in zip(got.split(2), wants, strict=True)] == [True] * len(names)
    turned = zip(got.split(2), wants[1:] + wants[:1], strict=True)
    assert [torch.equal(*pair) for pair in turned] == [False] * len(names), "rows that any adapter answers alike"


@ON_DEVICES
@pytest.mark.parametrize(("frozen", "how"), [(False, TRITON), (False, TRITON_FIXED), (True, TRITON)])
def test_gradients_of_inputs_embeds(families: dict[str, Family], frozen: bool, how: str, device: str) -> None:
    family, start = families["llama"], torch.randn(1, 4, 16).repeat(ROWS, 1, 1)
    model = family.model(**SETTINGS[how]).to(device).train().requires_grad_(not frozen)

    def gradient(of: Any, some: Tensor, **named: Any) -> Tensor:
        given = some.to(of.device).requires_grad_()
        of(inputs_embeds=given, **named).logits.square().sum().backward()
        assert given.grad is not None
        return given.grad.cpu()

    got = gradient(model, start.clone(), adapter_names=NAMES)
    want = torch.cat([gradient(alone(family, name), start[:1].clone()) for name in NAMES])
    assert_rows(got, want, 2 * TOLERANCE[device])
    assert all((p.grad is None) == frozen for n, p in model.named_parameters() if "proj" in n)


@ON_DEVICES
@ON_KERNELS
def test_the_default_adapter(families: dict[str, Family], how: str, device: str) -> None:
    family, inputs = families["tied"], inputs_of("tied", 2)
    model = family.model(**SETTINGS[how]).to(device)
    mixed = truth(family, inputs, ["wide", None])
    for name in ("wide", None, "one"):
        model.set_adapter(name)
        want = truth(family, inputs, [name] * 2)
        assert error(answer(model, inputs), want) < TOLERANCE[device]
        assert error(answer(model, inputs, ["wide", None]), mixed) < TOLERANCE[device]
        hidden = model.model(input_ids=inputs["input_ids"].to(device))[0]  # parts of the model, called by themselves
        assert error(model.lm_head(hidden).detach().cpu(), want) < TOLERANCE[device]
        assert error(want, truth(family, inputs, ["all"] * 2)) > 100 * TOLERANCE[device]


@ON_DEVICES
@pytest.mark.parametrize(("name", "lora_dtype", "how"), [("llama", "auto", TRITON), ("gpt2", "float32", TRITON_FIXED)])
def test_a_half_base_and_back(families: dict[str, Family], name: str, lora_dtype: str, how: str, device: str) -> None:
    """Slots follow the dtype, and what half precision lost does not stay behind."""
    family, inputs = families[name], inputs_of(name)
    model = family.model(**SETTINGS[how], lora_dtype=lora_dtype).to(device)
    want = truth(family, inputs, NAMES)
    assert_rows(answer(model, inputs, NAMES), want, TOLERANCE[device])
    model.half()
    halves = answer(model, inputs, NAMES)
    dtypes = {slots.a.dtype for _, slots in model._multilora.sites.values()}
    assert dtypes == {torch.float16 if lora_dtype == "auto" else torch.float32} and backends_of(model) == {how}
    assert halves.dtype == torch.float16 and 1e-5 < error(halves, want) < 1e-2
    assert_rows(halves, truth(family, inputs, NAMES, copy.deepcopy(family.base).half()), 1e-2)
    base = copy.deepcopy(family.base).half().float()  # its rotary frequencies were rounded on the way
    for each in (base, model.float()):
        each.load_state_dict(family.base.state_dict())
    assert_rows(answer(model, inputs, NAMES), truth(family, inputs, NAMES, base), TOLERANCE[device])


@ON_DEVICES
@pytest.mark.parametrize(("how_copied", "how"), [("deepcopy", TRITON_FIXED), ("pickle", TRITON)])
def test_copies_compute_with_the_same_kernels(
    families: dict[str, Family], how_copied: str, how: str, device: str
) -> None:
    family, inputs = families["gpt2"], inputs_of("gpt2")
    model = family.model(**SETTINGS[how]).to(device)
    first = answer(model, inputs, NAMES)
    model.set_adapter("all")
    other = copy.deepcopy(model) if how_copied == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for _, slots in model._multilora.sites.values():
            slots.a.zero_()
            slots.b.zero_()
        for parameter in model.parameters():
            parameter.zero_()
    assert not torch.equal(answer(model, inputs, NAMES), first)
    with launches() as seen:
        assert torch.equal(answer(other, inputs, NAMES), first)
    assert seen and backends_of(other) == {how}
    assert_rows(first, truth(family, inputs, NAMES), TOLERANCE[device])
    assert error(answer(other, inputs), truth(family, inputs, ["all"] * ROWS)) < TOLERANCE[device]


@ON_DEVICES
@ON_KERNELS
def test_slots_that_change_hands(families: dict[str, Family], how: str, device: str) -> None:
    """One slot for three adapters, in passes: what the last tenant left, or where it lay, serves nobody else."""
    family, inputs = families["tied"], inputs_of("tied")
    model = family.model(**SETTINGS[how], max_loras=1).to(device)
    mixes: Sequence[Names] = (NAMES, ["one", "all", None, "wide"])
    for names in mixes:
        want = truth(family, inputs, names)
        got = answer(model, inputs, names)
        assert error(got, want) < TOLERANCE[device]
        assert error(got, truth(family, inputs, NAMES)) > 100 * TOLERANCE[device] or names is NAMES
    assert model._multilora.store.loads > 4 and backends_of(model) == {how}


def test_a_slower_path_is_said_once(families: dict[str, Family]) -> None:
    """Where "auto" must do without kernels on a GPU, as for float64."""
    family, device = families["llama"], torch.device("cuda")
    auto, asked = (family.model("all", backend=how)._multilora for how in ("auto", TORCH))
    with mock.patch.object(residency.logger, "warning_once") as said:
        asked._say_if_slow(backend(TORCH), device, torch.float64)
        auto._say_if_slow(backend(TRITON), device, torch.bfloat16)
        assert not said.called
        auto._say_if_slow(backend(TORCH), device, torch.float64)
    (text,) = said.call_args.args
    assert "computed by plain torch operations" in text and "got torch.float64" in text
