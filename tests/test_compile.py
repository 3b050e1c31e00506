"""torch.compile(fullgraph=True): right for every mix of adapters, and traced once."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from hf_multilora.kernels.backends import has_triton, interpreted
from tests.tiny import Family, assert_rows, error, gpt2, ids, llama, logits, same_ids

INPUTS = same_ids(4)
MIXES = [
    ["a", None, "b", "c"],
    ["c", "b", None, "a"],
    ["b", "b", "b", "a"],
    [None] * 4,
    ["a"] * 4,
    [None, None, "c", None],
]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LONG = (4, 12)  # more tokens than the dense path takes


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    ranks = {"a": 2, "b": 5, "c": 3, "d": 3, "big": 20}
    return Family(
        llama(num_hidden_layers=1), tmp_path_factory.mktemp("adapters"), {name: {"r": r} for name, r in ranks.items()}
    )


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled:
    """A compiled model and how often it was traced."""

    def __init__(self, model: Any, backend: str = "eager") -> None:
        self.model = model
        self.counter = CompileCounterWithBackend(backend)
        self.run = torch.compile(model, fullgraph=True, backend=self.counter)

    @property
    def traces(self) -> int:
        return self.counter.frame_count

    @torch.no_grad()
    def __call__(self, names: Any, inputs: Tensor = INPUTS) -> Tensor:
        with self.model.adapters(names):
            return self.run(input_ids=inputs).logits


def check(family: Family, compiled: Compiled, names: Any, inputs: Tensor = INPUTS, base: Any = None) -> None:
    got, want = compiled(names, inputs), family.truth(inputs, names, base)
    assert error(got, want) < 1e-5
    if len(set(names)) > 1 and names[0] != names[-1]:
        assert_rows(got, want)


@pytest.mark.parametrize("shape", [(4, 5), LONG])
@torch.no_grad()
def test_what_stays_is_said_to_stay(family: Family, shape: tuple[int, int]) -> None:
    """CUDA graphs of compiled code copy every other input at each call."""
    moving: list[str] = []
    count = [0]

    def look(graph: Any, _: Any) -> Any:
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                count[0] += 1
                if "_dynamo_static_input_type" not in node.meta["tensor_dict"]:
                    moving.append(node.name)
        return graph

    model = family.model("a", "b", "c", max_loras=3)
    with model.adapters(MIXES[0]):
        torch.compile(model, fullgraph=True, backend=look)(input_ids=same_ids(*shape))
    assert moving == ["l_kwargs_input_ids_"] and count[0] > 10


def guards(model: Any, names: Any = None) -> Counter[str]:
    """How many values of each kind Dynamo checks before every call, but for hooks, which it skips."""
    seen: set[tuple[str, str]] = set()

    def look(entries: Any) -> list[bool]:
        seen.update((entry.guard_type, str(entry.name)) for entry in entries if "HOOKS" not in entry.guard_type)
        return [True] * len(entries)

    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="eager", options={"guard_filter_fn": look})
    with torch.no_grad(), nullcontext() if names is None else model.adapters(names):
        run(input_ids=same_ids(4, 1), use_cache=False)
    return Counter(kind for kind, _ in seen)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_guards_grow_with_layers_nearly_as_the_bare_models(tmp_path: Path, backend: str) -> None:
    """They are checked on the host before every step of a decode, so they cost time where it waits for the host."""
    if backend == "triton" and not (has_triton() and interpreted()):
        pytest.skip("Triton on the CPU needs TRITON_INTERPRET=1 before its import")
    found = []
    for layers in (2, 3):
        adapters = {name: {"r": r, "targets": ALL} for name, r in (("a", 2), ("b", 5))}
        family = Family(llama(num_hidden_layers=layers), tmp_path / str(layers), adapters)
        found.append((guards(family.base), guards(family.model(backend=backend, max_loras=2), ["a", None, "b", "a"])))
    (bare, ours), (bare_more, ours_more) = found
    assert (ours_more - ours).total() < 1.4 * (bare_more - bare).total()
    kind = "DUPLICATE_INPUT"  # these are compared in Python; one is of the class of an activation
    assert (ours_more - ours)[kind] <= (bare_more - bare)[kind] + 1


def test_an_adapter_that_trains_other_modules(tmp_path: Path) -> None:
    """Where its rank rows lie is another in every kind of module, and was the same in all."""
    adapters = {"a": {"r": 2}, "b": {"r": 5}, "q": {"r": 5, "targets": ["q_proj"]}, "up": {"targets": ["up_proj"]}}
    family = Family(llama(), tmp_path, adapters)
    compiled = Compiled(family.model("a", "b", max_loras=3, max_lora_rank=5))
    check(family, compiled, ["a", None, "b", "b"])
    for name in ("q", "up"):
        compiled.model.load_adapter(str(family.paths[name]), name)
        check(family, compiled, ["a", None, name, "b"])
        check(family, compiled, [name, "b", None, "a"])
    compiled.model.delete_adapter("a")
    check(family, compiled, ["up", None, "q", "b"])
    assert compiled.traces <= 4


@pytest.mark.parametrize("shape", [(4, 5), LONG])
@pytest.mark.parametrize("start", ["cold", "laid"])
def test_one_trace_serves_every_mix(family: Family, start: str, shape: tuple[int, int]) -> None:
    model = family.model("a", "b", "c", max_loras=3)
    if start == "laid":
        logits(model, INPUTS, MIXES[0])
    compiled, inputs = Compiled(model), same_ids(*shape)
    compiled(MIXES[0], inputs)
    traces = compiled.traces
    for names in MIXES:
        check(family, compiled, names, inputs)
    assert compiled.traces == traces == 1


def test_an_ahead_of_time_graph_is_right(family: Family) -> None:
    compiled = Compiled(family.model("a", "b", "c", max_loras=3), "aot_eager")
    for shape in ((4, 5), LONG):
        for names in MIXES[:2]:
            check(family, compiled, names, same_ids(*shape))


def test_other_adapters_in_the_slots_do_not_trace_again(family: Family) -> None:
    compiled = Compiled(family.model("a", "b", "c", "d", max_loras=3, max_lora_rank=5))
    check(family, compiled, ["a", None, "b", "c"])
    traces = compiled.traces
    check(family, compiled, ["a", None, "b", "d"])
    check(family, compiled, ["c", "a", "d", None])
    compiled.model.delete_adapter("c")
    compiled.model.load_adapter(str(family.paths["c"]), "c")
    check(family, compiled, ["c", "a", "d", None])
    assert compiled.traces == traces


def test_a_larger_pool_is_right(family: Family) -> None:
    compiled = Compiled(family.model("a", "b", "c", max_loras=3))
    check(family, compiled, MIXES[0])
    compiled.model.load_adapter(str(family.paths["big"]), "big")
    check(family, compiled, ["big", None, "b", "a"])
    check(family, compiled, MIXES[0])
    assert compiled.traces <= 3


def test_a_closed_request_is_the_base(family: Family) -> None:
    model = family.model("a", "b", "c", max_loras=3)
    compiled = Compiled(model)
    compiled(MIXES[0])
    with torch.no_grad():
        assert error(compiled.run(input_ids=INPUTS).logits, family.truth(INPUTS, [None] * 4)) < 1e-5
        traces = compiled.traces
        compiled.run(input_ids=INPUTS)
    check(family, compiled, MIXES[1])
    assert compiled.traces == traces


def test_the_default_adapter(family: Family) -> None:
    model = family.model("a", "b", "c", max_loras=3)
    compiled = Compiled(model)
    model.set_adapter("b")
    with torch.no_grad():
        got = compiled.run(input_ids=INPUTS).logits
    assert error(got, family.truth(INPUTS, ["b"] * 4)) < 1e-5
    assert error(got, family.truth(INPUTS, ["a"] * 4)) > 1e-2
    check(family, compiled, MIXES[0])


@pytest.mark.parametrize("names", [{"adapter_names": MIXES[0]}, {"adapter_ids": torch.tensor([1, 0, 2, 3])}])
def test_names_inside_the_traced_call_are_refused(family: Family, names: dict[str, Any]) -> None:
    compiled = Compiled(family.model("a", "b", "c", max_loras=3))
    with pytest.raises(Exception, match="rows must be routed outside the traced call"):
        compiled.run(input_ids=INPUTS, **names)
    check(family, compiled, MIXES[0])


def test_module_compile_takes_names_in_the_call(family: Family) -> None:
    model = family.model("a", "b", "c", max_loras=3)
    counter = CompileCounterWithBackend("eager")
    model.compile(fullgraph=True, backend=counter)
    for names in MIXES[:3]:
        assert error(logits(model, INPUTS, names), family.truth(INPUTS, names)) < 1e-5
    assert counter.frame_count == 1


@pytest.mark.parametrize("start", ["cold", "laid"])
def test_other_weights_are_seen(family: Family, start: str) -> None:
    model, base = family.model("a", "b", "c", max_loras=3), copy.deepcopy(family.base)
    if start == "laid":
        logits(model, INPUTS, MIXES[0])
    compiled = Compiled(model)
    check(family, compiled, MIXES[0])
    weight = base.model.layers[0].self_attn.q_proj.weight.detach().clone()

    def scaled(module: nn.Module) -> None:
        module.weight.data.mul_(-2)

    def pointed(module: nn.Module) -> None:
        module.weight.data = 3 * weight

    def replaced(module: nn.Module) -> None:
        module.weight = nn.Parameter(-4 * weight)

    for change in (scaled, pointed, replaced):
        for each in (model, base):
            change(each.model.layers[0].self_attn.q_proj)
        check(family, compiled, MIXES[0], base=base)
    state = {k: -v for k, v in base.state_dict().items()}
    for each in (model, base):
        each.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
    check(family, compiled, MIXES[0], base=base)
    for each in (model, base):
        each.double()
    got = compiled(MIXES[0])
    assert got.dtype == torch.float64 and error(got, family.truth(INPUTS, MIXES[0], base)) < 1e-6


@pytest.mark.parametrize("shape", [(4, 5), LONG])
def test_gradients_reach_the_input(family: Family, shape: tuple[int, int]) -> None:
    model = family.model("a", "b", "c", max_loras=3)
    compiled = Compiled(model, "aot_eager")
    embeds = model.get_input_embeddings()(ids(*shape)).detach().requires_grad_()
    with model.adapters(MIXES[0]):
        compiled.run(inputs_embeds=embeds).logits.square().sum().backward()
    got, embeds.grad = embeds.grad, None
    model(inputs_embeds=embeds, adapter_names=MIXES[0]).logits.square().sum().backward()
    torch.testing.assert_close(got, embeds.grad, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(got.roll(1, 0), embeds.grad, rtol=1e-2, atol=1e-2)


def test_embeddings_and_conv1d(tmp_path_factory: pytest.TempPathFactory) -> None:
    adapters = {"a": {"targets": ["c_attn", "c_fc", "wte", "wpe"]}, "b": {"targets": ["c_proj", "wte"], "r": 5}}
    family = Family(gpt2(), tmp_path_factory.mktemp("gpt2"), adapters)
    compiled = Compiled(family.model())
    for names in (["a", None, "b", "b"], [None, "b", "a", None], [None] * 4):
        check(family, compiled, names)
    assert compiled.traces == 1
