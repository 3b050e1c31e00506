"""Experts outside Transformers' interface: whose tokens an expert gets, through all that may happen around a call."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hf_multilora import AdapterError, MultiLoRAModel, RoutingError
from hf_multilora.census import take_census
from hf_multilora.layers.base import MIXINS
from hf_multilora.patches.experts import GATHERING, PARAMETERS, REFUSED
from hf_multilora.patches.facts import Facts
from tests.architecture_table import ARCHITECTURES
from tests.architectures import HEADED, Architecture, plain
from tests.tiny import error, snapshot

NAMES = ["a", None, "b", "a"]
TOLERANCE, FAR = 1e-5, 1e-3
BOTH = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
LINEARS = {"target_modules": r".*expert_\d\.(w[io]|fc[12])"}
STEP = Architecture("Step3p7Config", "Step3p7ForConditionalGeneration", {
    "text_config": {**HEADED, "num_experts_per_tok": 2, "num_local_experts": 4, "n_routed_experts": 4,
        "moe_intermediate_size": 12, "share_expert_dim": 8, "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["full_attention"] * 2, "sliding_window": 16},
    "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14},
    "image_token_id": 39}, plain)  # fmt: skip
# architecture -> what PEFT trains
CASES: dict[str, tuple[Architecture, dict[str, Any]]] = {
    "llama4": (ARCHITECTURES["llama4"], BOTH),
    "jetmoe": (ARCHITECTURES["jetmoe"], {"target_parameters": ["input_linear.weight", "output_linear.weight"]}),
    "step3p7": (STEP, BOTH),
    "switch": (ARCHITECTURES["switch_transformers"], LINEARS),
    "nllb": (ARCHITECTURES["nllb_moe"], LINEARS),
}


class Case:
    """A base, adapters that PEFT made, and each row's answer with its adapter merged by hand."""

    def __init__(self, name: str, folder: Path) -> None:
        arch, settings = CASES[name]
        self.base, self.folder = arch.build(), folder
        made = torch.Generator().manual_seed(7)
        ids = torch.randint(3, 36, (len(NAMES), 6), generator=made)
        self.inputs: dict[str, Tensor] = {"input_ids": ids}
        if self.base.config.is_encoder_decoder:
            self.inputs["decoder_input_ids"] = ids.flip(1)
        self.merged: dict[str | None, Any] = {None: self.base}
        for key, r in (("a", 2), ("b", 3)):
            config = LoraConfig(r=r, lora_alpha=2 * r, **({"target_modules": []} | settings))
            peft = get_peft_model(copy.deepcopy(self.base), config)
            with torch.no_grad():
                for own, parameter in peft.named_parameters():
                    if "lora_" in own:
                        parameter.normal_(std=0.3, generator=made)
            peft.save_pretrained(folder / key)
            self.merged[key] = by_hand(self.base, peft)

    def model(self, base: Any = None) -> Any:
        base = copy.deepcopy(self.base) if base is None else base
        return MultiLoRAModel.from_pretrained(base, {key: str(self.folder / key) for key in "ab"})

    @torch.no_grad()
    def row(self, name: str | None, i: int) -> Tensor:
        return self.merged[name](**{key: value[i : i + 1] for key, value in self.inputs.items()}).logits[0]

    @torch.no_grad()
    def check(self, got: Tensor) -> None:
        """Each row is its own adapter's, and with the names turned by one no row that differs would be near."""
        want = [self.row(name, i) for i, name in enumerate(NAMES)]
        assert max(error(*pair) for pair in zip(got, want, strict=True)) < TOLERANCE
        assert min(error(self.row(NAMES[i - 1], i), want[i]) for i in (1, 2, 3)) > FAR

    @torch.no_grad()
    def run(self, model: Any) -> Tensor:
        return model(**self.inputs, adapter_names=NAMES).logits


def by_hand(base: Any, peft: Any) -> Any:
    """A copy of the base with scaling * B A in its own parameters: of one linear, or of each expert [E, rows, columns]
    as A [(E, r), columns] and B [rows, (r, E)] say."""
    model = copy.deepcopy(base)
    for path, layer in peft.base_model.model.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
        name = getattr(layer, "parameter_name", "weight")
        weight = getattr(model.get_submodule(path.replace(".base_layer", "")), name)
        with torch.no_grad():
            if weight.dim() == 2:
                delta = b @ a
            else:
                count, rows, columns = weight.shape
                delta = b.view(rows, -1, count).permute(2, 0, 1) @ a.view(count, -1, columns)
            weight.add_(layer.scaling["default"] * delta)
    return model


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if not hasattr(transformers, CASES[name][0].config):
            pytest.skip(f"this Transformers has no {name}")
        return made.setdefault(name, made.get(name) or Case(name, tmp_path_factory.mktemp(name)))

    return get


def tellers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if "_told" in module.__dict__]


@pytest.mark.parametrize("name", CASES)
def test_copies_generation_and_what_is_left(cases: Callable[[str], Case], name: str) -> None:
    case = cases(name)
    base = copy.deepcopy(case.base)
    base(**case.inputs)  # routers keep the dtype of their last input
    before = snapshot(base)
    model = case.model(base)
    case.check(case.run(model))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        case.check(case.run(copied))
    given: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 2}
    row = {"input_ids": case.inputs["input_ids"]}
    got = model.generate(**row, adapter_names=NAMES, **given)
    want = [case.merged[one].generate(row["input_ids"][i : i + 1], **given) for i, one in enumerate(NAMES)]
    assert torch.equal(got, torch.cat(want))
    case.check(case.run(model))
    assert tellers(model) if name in ("jetmoe", "switch", "nllb") else not tellers(model)
    model.delete_adapter("b")
    got = model(**case.inputs, adapter_names=["a", None, None, "a"]).logits
    assert error(got[3], case.row("a", 3)) < TOLERANCE
    model.unpatch()
    assert not tellers(base)
    after = snapshot(base)
    assert after.keys() == before.keys() and not [key for key, value in before.items() if after[key] != value]


@pytest.mark.parametrize("name", CASES)
def test_gradients(cases: Callable[[str], Case], name: str) -> None:
    case = cases(name)
    model = case.model()

    def gradient(of: Any, rows: slice, **named: Any) -> Tensor:
        inputs = {key: value[rows] for key, value in case.inputs.items()}
        embeds = of.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
        of(inputs_embeds=embeds, **inputs, **named).logits.square().sum().backward()
        assert embeds.grad is not None
        return embeds.grad

    got = gradient(model, slice(None), adapter_names=NAMES)
    want = [gradient(case.merged[one], slice(i, i + 1))[0] for i, one in enumerate(NAMES)]
    assert max(error(*pair) for pair in zip(got, want, strict=True)) < 1e-4
    case.check(case.run(model))


@pytest.mark.parametrize("name", ["llama4", "jetmoe", "step3p7"])
def test_packed_rows(cases: Callable[[str], Case], name: str) -> None:
    case = cases(name)
    ids = case.inputs["input_ids"]
    positions = torch.arange(ids.shape[1]).repeat(len(ids))[None]
    with torch.no_grad():
        got = case.model()(input_ids=ids.view(1, -1), position_ids=positions, adapter_names=NAMES).logits
    case.check(got.view(*ids.shape, -1))


@pytest.mark.parametrize("name", CASES)
def test_offloaded(cases: Callable[[str], Case], name: str) -> None:
    case = cases(name)
    base = copy.deepcopy(case.base)
    for module in list(base.modules()):
        if any(type(child).__name__ in (*PARAMETERS, *GATHERING) for child in module.children()):
            accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    if name == "jetmoe":  # its attention's block reads a parameter that accelerate keeps away
        with pytest.raises(RuntimeError):
            base(**case.inputs)
        return
    case.check(case.run(case.model(base)))


def test_compiled_in_one_graph(cases: Callable[[str], Case]) -> None:
    case = cases("llama4")
    model = case.model()
    torch._dynamo.reset()
    with torch.no_grad(), model.adapters(NAMES):
        case.check(torch.compile(model, backend="eager", fullgraph=True)(**case.inputs).logits)


@pytest.mark.parametrize("name", ["jetmoe", "step3p7", "switch", "nllb"])
def test_captured(cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = cases(name)
    model = case.model()
    case.run(model)
    with monkeypatch.context() as captured:
        captured.setattr(model.__dict__["_multilora"].routing, "on_cuda", True)
        captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RoutingError, match="neither compiled in one graph nor captured"):
            case.run(model)
    case.check(case.run(model))


@pytest.mark.parametrize("name", ["switch", "nllb"])
def test_only_the_teller_calls_its_experts(cases: Callable[[str], Case], name: str) -> None:
    case = cases(name)
    model = case.model()
    experts = tellers(model)[0]
    linear = next(module for module in experts.modules() if isinstance(module, nn.Linear))
    x = torch.randn(len(NAMES), 6, linear.in_features)
    with model.adapters(NAMES), pytest.raises(RoutingError, match=r"expert_0.*must be called by .*experts"):
        linear(x)
    with model.adapters(["a"] * 4):
        assert linear(x).shape == (len(NAMES), 6, linear.out_features)
    fails = linear.register_forward_hook(lambda *_: 1 / 0)  # in the middle of an expert
    with pytest.raises(ZeroDivisionError):
        case.run(model)
    fails.remove()
    case.check(case.run(model))


def test_sizes_must_come_from_the_router(cases: Callable[[str], Case]) -> None:
    case = cases("jetmoe")
    model = case.model()
    experts = next(module for module in model.modules() if type(module).__name__ == "JetMoeParallelExperts")
    x, sizes = torch.randn(8, experts.input_size), [2] * 4
    with model.adapters(NAMES), pytest.raises(RoutingError, match="expert_size must be what the router"):
        experts(x, sizes)
    with model.adapters(["a"] * 4):
        assert experts(x, sizes).shape == (8, experts.output_size)


@pytest.mark.parametrize("name", ["llama4", "step3p7"])
def test_another_forward_is_no_silent_loss(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As if Transformers multiplied otherwise one day."""
    model = (case := cases(name)).model()
    own = next(type(m).__bases__[-1] for m in model.modules() if type(m).__name__ in PARAMETERS)
    forward = own.forward

    def other(self: Any, *args: Any) -> Any:
        with OtherProducts():
            return forward(self, *args)

    monkeypatch.setattr(own, "forward", other)
    with pytest.raises(RoutingError, match="its forward must multiply"):
        case.run(model)
    assert torch.equal(model(**case.inputs).logits, case.base(**case.inputs).logits)


class OtherProducts(TorchFunctionMode):
    """While it is on, what is asked of bmm and linear is done by matmul."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.bmm, F.linear):
            with self:
                return torch.matmul(args[0], args[1] if func is torch.bmm else args[1].t())
        return func(*args, **(kwargs or {}))


def test_a_saved_linear_of_an_expert_runs_by_adapter(cases: Callable[[str], Case], tmp_path: Path) -> None:
    case = cases("switch")
    path = next(n for n, m in case.base.named_modules() if isinstance(m, nn.Linear) and "expert_1" in n)
    config = LoraConfig(r=2, target_modules=r".*SelfAttention\.q", modules_to_save=[path])
    peft = get_peft_model(copy.deepcopy(case.base), config)
    with torch.no_grad():
        for key, parameter in peft.named_parameters():
            if "modules_to_save" in key:
                parameter.normal_(std=0.3)
    peft.save_pretrained(tmp_path)
    truth = copy.deepcopy(case.base)
    saved = peft.base_model.model.get_submodule(path).modules_to_save["default"]
    truth.get_submodule(path).load_state_dict(saved.state_dict())
    model = case.model()
    model.load_adapter(str(tmp_path), "saved")
    with torch.no_grad():
        want = truth(**case.inputs).logits
        got = model(**case.inputs, adapter_names=["saved", None, "a", "saved"], use_cache=False).logits
    assert max(error(got[i], want[i]) for i in (0, 3)) < TOLERANCE
    assert error(got[1], case.row(None, 1)) < TOLERANCE and error(got[2], case.row("a", 2)) < TOLERANCE


def test_a_teller_follows_one_model(cases: Callable[[str], Case]) -> None:
    case = cases("switch")
    first = copy.deepcopy(case.base)
    second = copy.deepcopy(case.base)
    case.model(first)
    second.encoder = first.encoder
    with pytest.raises(ValueError, match="share no module"):
        case.model(second)


def test_tables_agree() -> None:
    assert not set(REFUSED) & set(PARAMETERS)
    assert {("experts", held.multiplies) for held in PARAMETERS.values()} < set(MIXINS)


def test_every_experts_class_of_transformers_is_known() -> None:
    """By its source: in Transformers' interface, followed here, refused, or found to be served as other modules are."""
    served = {
        "AriaSharedExpertsMLP",  # linears that get all tokens
        "VitPoseNaiveMoe",  # linears that get all tokens, rows in front
        "InklingSharedExperts",  # no adapter can target its parameters
        "DbrxExperts",  # holds DbrxExpertGLU
    }
    refused = {"LongcatFlashExperts", "AriaExperts", "AriaGroupedExpertsGemm"}  # by their place in the model
    known = {*PARAMETERS, *GATHERING, *REFUSED, *served, *refused}
    found = set[str]()
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        source = file.read_text("utf-8")
        for match in re.finditer(r"^class (\w*(?:Experts?|NaiveMoe)(?![a-z])\w*)\(nn\.", source, re.MULTILINE):
            decorators = source[: match.start()].rpartition("\n\n")[2]
            if "use_experts_implementation" not in decorators:
                found.add(match[1])
    assert "Llama4TextExperts" in found and not found - known


def test_experts_that_get_tokens_of_one_kind_do_not_mix() -> None:
    sizes = {
        **HEADED, "moe_intermediate_size": [12, 8], "moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    base = transformers.Ernie4_5_VLMoeTextModel(transformers.Ernie4_5_VLMoeTextConfig(**sizes))
    census = take_census(base, Facts())
    mixable = {name: shape.mixable for name, shape in census.items() if shape.kind in ("experts", "router", "linear")}
    assert not mixable["layers.1.mlp.text_moe.experts"] and not mixable["layers.1.mlp.vision_moe.gate"]
    assert mixable["layers.1.mlp.shared_experts.up_proj"] and mixable["layers.0.mlp.up_proj"]


def test_refused_with_the_reason(tmp_path: Path) -> None:
    base = ARCHITECTURES["dbrx"].build()
    peft = get_peft_model(copy.deepcopy(base), LoraConfig(target_parameters=["experts.mlp.w1"], target_modules=[]))
    with pytest.raises(AttributeError):  # the reason is true
        peft(**plain(2, 3))
    peft.save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match="DbrxExperts reads the weights of the module that PEFT wraps"):
        MultiLoRAModel.from_pretrained(base, {"a": str(tmp_path)})


def test_quantized_experts_are_refused() -> None:
    base = ARCHITECTURES["qwen3_moe"].build()
    path, experts = next((n, m) for n, m in base.named_modules() if n.endswith("mlp.experts"))
    assert take_census(base, Facts())[path].refused is None
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.data.to(torch.float8_e4m3fn), requires_grad=False)
    assert "quantized" in str(take_census(base, Facts())[path].refused)
