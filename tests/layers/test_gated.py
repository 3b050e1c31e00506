"""Gated MLPs computed as one: right in every mix, and left to their children wherever something would be left out.

Triton in its interpreter; tests/gpu/test_gated.py has devices, graphs and half precision.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_multilora import MultiLoRAModel
from hf_multilora.layers import gated
from tests.kernels.suite import INTERPRETED
from tests.tiny import Family, Names, assert_rows, ids, llama, logits, merged, same_ids, snapshot

pytestmark = INTERPRETED
MLP = ["gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"r": 3, "targets": ["q_proj", *MLP]},
    "b": {"r": 5, "targets": ["up_proj", "down_proj"]},
    "c": {"r": {"gate_proj": 2, "up_proj": 17}, "targets": ["gate_proj", "up_proj"]},
}
MIXES: list[Names] = [["a", None, "b", "c"], ["c", "a", None, "a"], ["b"] * 4, ["c", "c", "c", None]]


def gemma() -> Any:
    """Its activation is GELU."""
    torch.manual_seed(0)
    config = tf.GemmaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    return tf.GemmaForCausalLM(config).eval()


@pytest.fixture(scope="module", params=[llama, gemma], ids=["llama", "gemma"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(request.param(), tmp_path_factory.mktemp("adapters"), ADAPTERS)


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    return Family(llama(), tmp_path_factory.mktemp("adapters"), ADAPTERS)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For every call of an MLP, whether it was computed as one."""
    found: list[bool] = []
    product = gated.product

    def watched(*args: Any) -> Tensor | None:
        out = product(*args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(gated, "product", watched)
    yield found


def mlps(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers]


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("mix", MIXES)
@torch.no_grad()
def test_mixes(family: Family, asked: list[bool], mix: Names, tokens: int) -> None:
    model = family.model(backend="triton")
    inputs = same_ids(4, tokens) if len(set(mix)) > 1 else ids(4, tokens)
    assert_rows(logits(model, inputs, mix), family.truth(inputs, mix))
    assert asked == [True] * len(mlps(model))
    assert all(type(mlp) is not type(bare) for mlp, bare in zip(mlps(model), mlps(family.base), strict=True))
    assert all(isinstance(mlp, type(bare)) for mlp, bare in zip(mlps(model), mlps(family.base), strict=True))


@torch.no_grad()
def test_after_a_shrink(family: Family, asked: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_multilora.layers import slots

    monkeypatch.setattr(slots, "DENSE_WORK", 0)
    model, inputs = family.model(backend="triton"), same_ids(4, 7)
    assert_rows(logits(model, inputs, MIXES[0]), family.truth(inputs, MIXES[0]))
    assert all(asked) and asked


@torch.no_grad()
def test_generate(family: Family, asked: list[bool]) -> None:
    model, inputs = family.model(backend="triton"), ids(4, 6)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    out = model.generate(inputs, adapter_names=MIXES[0], **settings)
    for row, name in enumerate(MIXES[0]):
        bare = family.base if name is None else merged(family.base, family.paths[name])
        assert torch.equal(out[row], bare.generate(inputs[row : row + 1], **settings)[0])
    assert asked.count(True) == 4 * len(mlps(model))


@torch.no_grad()
def test_a_batch_without_adapters_is_the_class_s(llamas: Family, asked: list[bool]) -> None:
    model, inputs = llamas.model(backend="triton"), ids(3)
    logits(model, inputs, ["a", "b", None])
    asked.clear()
    assert torch.equal(logits(model, inputs, [None] * 3), llamas.base(input_ids=inputs).logits)
    assert torch.equal(model(input_ids=inputs).logits, llamas.base(input_ids=inputs).logits)
    assert not asked


# -- where it is left to the children -----------------------------------------------------------------
def hook(name: str) -> Callable[[Any], None]:
    """One that doubles what the child of the first MLP gives."""

    def change(model: Any) -> None:
        getattr(mlps(model)[0], name).register_forward_hook(lambda module, args, out: out * 2)

    return change


def replaced(model: Any) -> None:
    mlps(model)[0].act_fn = nn.ReLU()


def own_forward(model: Any) -> None:
    mlp = mlps(model)[0]
    mlp.up_proj.forward = lambda x: nn.functional.linear(x, mlp.up_proj.weight) + 1


def whole_forward(model: Any) -> None:
    mlp = mlps(model)[0]
    mlp.forward = lambda x: mlp.down_proj(mlp.gate_proj(x))


def shadowed(model: Any) -> None:
    mlps(model)[0].__dict__["act_fn"] = nn.functional.relu


def own_activation(model: Any) -> None:
    mlps(model)[0].act_fn.forward = lambda x: x * 2


CHANGES: dict[str, Callable[[Any], None]] = {
    "hook on gate": hook("gate_proj"),
    "hook on up": hook("up_proj"),
    "hook on act": hook("act_fn"),
    "another activation": replaced,
    "a function over the activation": shadowed,
    "forward of up": own_forward,
    "forward of the activation": own_activation,
    "forward of the MLP": whole_forward,
}


@pytest.mark.parametrize(("what", "early"), [*[(what, False) for what in CHANGES], ("hook on up", True)])
@torch.no_grad()
def test_what_users_change(llamas: Family, asked: list[bool], what: str, early: bool) -> None:
    """Hooks on an adapted linear see, and change, what the base gives; those on other modules what they get. early:
    before the first call."""
    model, plain = (llamas.model(backend=backend) for backend in ("triton", "torch"))
    inputs, names = same_ids(3), ["a", None, "c"]
    if not early:
        logits(model, inputs, names)
    before = logits(plain, inputs, names)
    for each in (model, plain):
        CHANGES[what](each)
    asked.clear()
    want = logits(plain, inputs, names)
    asked.clear()
    assert_rows(logits(model, inputs, names), want)
    assert asked in ([False, True], [True]), "the first MLP's children were called"
    assert float((want - before).abs().max()) > 1e-3, "control: it changes something"


@torch.no_grad()
def test_a_forward_that_the_class_gets_later(
    llamas: Family, asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As packages of kernels give classes theirs."""
    model, inputs, names = llamas.model(backend="triton"), same_ids(3), ["a", None, "c"]
    before, cls = logits(model, inputs, names), type(mlps(llamas.base)[0])
    with monkeypatch.context() as patch:
        patch.setattr(cls, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
        want = logits(llamas.model(backend="torch"), inputs, names)
        asked.clear()
        assert_rows(logits(model, inputs, names), want)
        assert not asked and float((want - before).abs().max()) > 1e-3
        fresh = llamas.model(backend="triton")
        assert_rows(logits(fresh, inputs, names), want)
        assert not asked, "it is no gated MLP now"
    assert torch.equal(logits(model, inputs, names), before)
    assert_rows(logits(fresh, inputs, names), before)


@pytest.mark.parametrize("where", ["activation", "call", "silu", "code"])
@torch.no_grad()
def test_what_is_patched_below(llamas: Family, asked: list[bool], monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    model, inputs, names = llamas.model(backend="triton"), same_ids(3), ["a", None, "c"]
    before, mlp = logits(model, inputs, names), mlps(llamas.base)[0]
    act, forward = type(mlp.act_fn), type(mlp).forward
    if where == "activation":
        monkeypatch.setattr(act, "forward", lambda self, x: x * 2)
    elif where == "call":
        monkeypatch.setattr(act, "__call__", lambda self, x: x * 2)
    elif where == "silu":
        monkeypatch.setattr(nn.functional, "silu", lambda x, inplace=False: x * 2)
    else:  # as when a file is loaded again
        monkeypatch.setattr(forward, "__code__", (lambda self, x: self.down_proj(self.up_proj(x) * 2)).__code__)
    want = logits(llamas.model(backend="torch"), inputs, names)
    asked.clear()
    assert_rows(logits(model, inputs, names), want)
    assert True not in asked and float((want - before).abs().max()) > 1e-3


@torch.no_grad()
def test_a_class_that_may_have_no_subclasses(llamas: Family, asked: list[bool], tmp_path: Path) -> None:
    class Own(type(mlps(llamas.base)[0])):  # type: ignore[misc]
        def __init_subclass__(cls, *, reason: str) -> None:
            super().__init_subclass__()

    base = copy.deepcopy(llamas.base)
    for mlp in mlps(base):
        mlp.__class__ = Own
    model, inputs, names = llamas.model(backend="triton"), same_ids(3), ["a", None, "c"]
    own = MultiLoRAModel.from_pretrained(base, {n: str(p) for n, p in llamas.paths.items()}, backend="triton")
    want = logits(model, inputs, names)
    asked.clear()
    assert_rows(logits(own, inputs, names), want)
    assert not asked and type(mlps(own)[0]) is Own


@torch.no_grad()
def test_down_keeps_its_hooks(llamas: Family, asked: list[bool]) -> None:
    model, seen = llamas.model(backend="triton"), list[Any]()
    mlps(model)[0].down_proj.register_forward_hook(lambda module, args, out: seen.append(args[0].shape))
    mlps(model)[1].register_forward_hook(lambda module, args, out: seen.append("mlp"))
    logits(model, ids(2), ["a", "c"])
    assert asked == [True, True] and len(seen) == 2 and seen[1] == "mlp"


def test_gradients(llamas: Family, asked: list[bool]) -> None:
    model = llamas.model(backend="triton")
    model.requires_grad_(False)
    x = model.get_input_embeddings()(same_ids(2)).requires_grad_()
    model(inputs_embeds=x, adapter_names=["a", "c"]).logits.square().sum().backward()
    assert asked == [False, False] and x.grad.abs().sum() > 0
    with torch.no_grad():
        model(inputs_embeds=x, adapter_names=["a", "c"])
    assert asked == [False, False, True, True]


@pytest.mark.parametrize("left", [False, True], ids=["all", "one with a hook"])
@torch.no_grad()
def test_traced_code_has_one_operation(family: Family, left: bool) -> None:
    """For every mix; where something would be left out, the class's forward."""
    torch._dynamo.reset()
    model, traces = family.model(backend="triton"), list[int]()
    if left:
        mlps(model)[0].up_proj.register_forward_hook(lambda module, args, out: out * 1)

    def counted(graph: Any, example: Any) -> Any:
        traces.append(sum("lora_gated_laid" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(model, backend=counted, fullgraph=True)
    for names in (*MIXES, [None] * 4):
        inputs = same_ids(4) if len(set(names)) > 1 else ids(4)
        with model.adapters(names):
            got = compiled(input_ids=inputs).logits
        assert_rows(got, family.truth(inputs, names))
    assert traces == [2 - left]
    torch._dynamo.reset()


@torch.no_grad()
def test_other_settings(llamas: Family, asked: list[bool]) -> None:
    inputs, names = same_ids(3), ["a", None, "c"]
    for settings in ({"backend": "torch"}, {"backend": "triton", "deterministic": True}):
        assert_rows(logits(llamas.model(**settings), inputs, names), llamas.truth(inputs, names))
    assert True not in asked
    model = llamas.model(backend="triton")
    with torch.inference_mode():
        assert_rows(logits(model, inputs, names), llamas.truth(inputs, names))
    assert asked[-2:] == [True, True]


@torch.no_grad()
def test_under_autocast(llamas: Family, asked: list[bool]) -> None:
    model, inputs, names = llamas.model(backend="triton"), same_ids(3), ["a", None, "c"]
    with torch.autocast("cpu", torch.float16):
        got = logits(model, inputs, names)
    assert_rows(got.float(), llamas.truth(inputs, names), 5e-3)


# -- life ---------------------------------------------------------------------------------------------
@torch.no_grad()
def test_it_comes_and_goes_with_the_adapters(llamas: Family, asked: list[bool], tmp_path: Path) -> None:
    base, own = copy.deepcopy(llamas.base), type(mlps(llamas.base)[0])
    before = snapshot(base)
    model = MultiLoRAModel.from_pretrained(base, {"b": str(llamas.paths["b"])}, backend="triton")
    logits(model, ids(2), ["b", None])
    assert not asked and type(mlps(model)[0]) is own, "gate has no adapter"
    model.load_adapter(str(llamas.paths["a"]), "a")
    inputs = same_ids(3)
    assert_rows(logits(model, inputs, ["a", "b", None]), llamas.truth(inputs, ["a", "b", None]))
    assert asked == [True, True] and mlps(model)[0].__class__.__name__ == own.__name__
    bare = model.unpatch()
    assert type(mlps(bare)[0]) is own and snapshot(bare) == before


@torch.no_grad()
def test_a_part_that_is_saved_in_full(llamas: Family, asked: list[bool], tmp_path: Path) -> None:
    peft = get_peft_model(
        copy.deepcopy(llamas.base), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["up_proj"])
    )
    for name, parameter in peft.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            parameter.normal_(std=0.3)
    peft.save_pretrained(tmp_path)
    model, inputs, names = llamas.model("a", backend="triton"), same_ids(3), ["a", "full", None]
    model.load_adapter(str(tmp_path), "full")
    want = llamas.truth(inputs, ["a", None, None])
    want[1] = peft.eval()(input_ids=inputs[:1]).logits[0]
    assert_rows(logits(model, inputs, names), want)
    assert True not in asked


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@torch.no_grad()
def test_copies(llamas: Family, asked: list[bool], copied: Callable[[Any], Any]) -> None:
    model, inputs, names = llamas.model(backend="triton"), same_ids(3), ["a", "c", None]
    logits(model, inputs, names)
    twin = copied(model)
    assert mlps(twin)[0]._gated == mlps(model)[0]._gated and mlps(twin)[0]._gated_routing is twin._multilora.routing
    asked.clear()
    for each in (twin, model):
        assert_rows(logits(each, inputs, names), llamas.truth(inputs, names))
    assert asked == [True] * 4
    assert type(mlps(twin.unpatch())[0]) is type(mlps(llamas.base)[0])
