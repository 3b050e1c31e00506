"""What of modules saved in full cannot be served is refused by name, and nothing of them is dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from hf_multilora.formats import AUTO_CLASSES, AdapterError, ModuleShape, read_adapter
from tests.formats import tiny

C = "base_model.model.classifier"
IN_LORA = {
    f"{C}.out_proj.lora_A.weight": torch.ones(2, 16),
    f"{C}.out_proj.lora_B.weight": torch.ones(3, 2),
}


def _without(end: str) -> Callable[[tiny.Tensors], tiny.Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if not key.endswith(end)}


def _renamed(old: str, new: str) -> Callable[[tiny.Tensors], tiny.Tensors]:
    return lambda tensors: {key.replace(old, new): tensor for key, tensor in tensors.items()}


def _with(key: str, tensor: torch.Tensor) -> Callable[[tiny.Tensors], tiny.Tensors]:
    return lambda tensors: tensors | {key: tensor}


# each done to the adapter of a RoBERTa head: classifier.dense [16, 16] and classifier.out_proj [3, 16], with biases
FILES: dict[str, tuple[Callable[[tiny.Tensors], tiny.Tensors], str]] = {
    "no bias": (
        _without("out_proj.bias"),
        r"module classifier\.out_proj: the file holds weight of it, but must hold bias too",
    ),
    "no weight": (_without("dense.weight"), r"module classifier\.dense: .*must hold weight too"),
    "half a container": (
        lambda tensors: _without("dense.weight")(_without("dense.bias")(tensors)),
        r"saves classifier in full.*holds nothing of classifier\.dense inside it",
    ),
    "none of it": (
        lambda tensors: {key: tensor for key, tensor in tensors.items() if "classifier" not in key},
        r"modules_to_save names classifier, which the base has \(classifier\), but the file holds nothing of it",
    ),
    "another name": (
        _renamed(".dense.", ".hidden."),
        r"saves classifier\.hidden in full.*no such module.*classifier\.dense",
    ),
    "a tensor more": (
        _with(f"{C}.dense.scale", torch.ones(16)),
        r"module classifier\.dense: the adapter saves its scale \[16\], but the base has no such tensor",
    ),
    "a tensor of the container": (
        _with(f"{C}.scale", torch.ones(16)),
        r"module classifier: the adapter saves its scale",
    ),
    "NaN": (tiny.changed(f"{C}.dense.bias", lambda t: t / 0 * 0), r"module classifier\.dense: .*got NaN"),
    "Inf": (tiny.changed(f"{C}.dense.bias", lambda t: t.abs() / 0), r"module classifier\.dense: .*got Inf"),
    "integers": (tiny.changed(f"{C}.dense.weight", lambda t: t.to(torch.int8)), r"must be float32.*torch\.int8"),
    "fp8": (tiny.changed(f"{C}.dense.weight", lambda t: t.to(torch.float8_e4m3fn)), "must be float32.*float8"),
    "empty": (tiny.changed(f"{C}.dense.weight", lambda t: t[:0]), "got the empty shape.*ZeRO-3"),
    "flat": (tiny.changed(f"{C}.dense.weight", lambda t: t.reshape(-1)), r"must have shape \[16, 16\].*\[256\]"),
    "wider": (
        tiny.changed(f"{C}.dense.weight", lambda t: torch.cat([t, t])),
        r"module classifier\.dense: weight must have shape \[16, 16\].*\[32, 16\]: only the labels of a head and the",
    ),
    "more labels, not all": (
        tiny.changed(f"{C}.out_proj.weight", lambda t: torch.cat([t, t])),
        r"module classifier\.out_proj: bias must have shape \[6\] as its weight has 6 outputs, got \[3\]",
    ),
    "LoRA as well": (
        lambda tensors: tensors | IN_LORA,
        r"module classifier\.out_proj: the adapter trains it with LoRA and saves it in full as well",
    ),
    "LoRA inside": (
        _with(f"{C}.modules_to_save.default.dense.lora_A.default.weight", torch.ones(2, 16)),
        r"modules_to_save \(fully trained modules\) is not supported",
    ),
    "two values": (
        _with(f"{C}.dense.modules_to_save.bias", torch.ones(16)),
        r"two keys land on bias of module classifier\.dense",
    ),
    "two names": (_with("model.classifier.dense.bias", torch.ones(16)), r"module classifier\.dense: .*both land on it"),
}


@pytest.mark.parametrize("fault", FILES)
def test_files(fault: str, tmp_path: Path) -> None:
    config = {"target_modules": ["query"], "task_type": "SEQ_CLS"}
    tiny.save(tiny.twin(tiny.roberta), tmp_path, touch=tiny.touch_saved, **config)
    assert len(tiny.read(tmp_path, tiny.twin(tiny.roberta)).factors) == 3  # without the fault it loads
    change, message = FILES[fault]
    tiny.edit_weights(tmp_path, change)
    with pytest.raises(AdapterError, match=message):
        tiny.read(tmp_path, tiny.twin(tiny.roberta))


def test_one_module_under_two_names(tmp_path: Path) -> None:
    tiny.save(tiny.twin(tiny.scorer), tmp_path, touch=tiny.touch_saved, task_type="SEQ_CLS")
    tiny.edit_weights(tmp_path, lambda t: t | {"model.score.weight": t["base_model.model.score.weight"]})
    with pytest.raises(AdapterError, match=r"module score: .*both land on it; keep one"):
        tiny.read(tmp_path, tiny.twin(tiny.scorer))


@pytest.mark.parametrize("task", [*AUTO_CLASSES, None, "SOMETHING"])
def test_a_head_that_the_base_lacks(task: str | None, tmp_path: Path) -> None:
    tiny.save(tiny.twin(tiny.scorer), tmp_path, touch=tiny.touch_saved, task_type="SEQ_CLS")
    tiny.edit_config(tmp_path, task_type=task)
    remedy = (
        f"task_type {task}: auto_class='{AUTO_CLASSES[task]}'"
        if task in AUTO_CLASSES
        else "with auto_class of its task"
    )
    with pytest.raises(AdapterError, match=rf"saves score in full \(modules_to_save\), .*no such module.*{remedy}"):
        tiny.read(tmp_path, tiny.twin(tiny.llama))


def test_every_auto_class_is_one() -> None:
    assert all(hasattr(tf, name) for name in AUTO_CLASSES.values())


class Owner(torch.nn.Module):
    """A module with a parameter beside the module inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)
        self.scale = torch.nn.Parameter(torch.ones(6))


class Counted(torch.nn.Linear):
    """A linear with a tensor more."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("steps", torch.ones(2))


class Model(torch.nn.Module):
    base_model_prefix = ""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.last = torch.nn.Linear(6, 6), Owner(), Counted()


def test_containers_with_tensors_of_their_own(tmp_path: Path) -> None:
    config = {"target_modules": ["first"], "touch": tiny.touch_saved}
    tiny.save(tiny.twin(Model), tmp_path, modules_to_save=["head"], **config)
    with pytest.raises(AdapterError, match=r"module head: it has tensors of its own \(scale\) beside those of the mod"):
        tiny.read(tmp_path, tiny.twin(Model))
    tiny.save(tiny.twin(Model), tmp_path / "inner", modules_to_save=["inner"], **config)
    assert "head.inner:saved" in tiny.read(tmp_path / "inner", tiny.twin(Model)).factors
    tiny.save(tiny.twin(Model), tmp_path / "last", modules_to_save=["last"], **config)
    with pytest.raises(AdapterError, match="module last: a linear with steps cannot be saved in full here"):
        tiny.read(tmp_path / "last", tiny.twin(Model))


def test_modules_that_the_model_refuses(tmp_path: Path) -> None:
    tiny.save(tiny.twin(tiny.scorer), tmp_path, touch=tiny.touch_saved, task_type="SEQ_CLS")
    modules = tiny.shapes(tiny.twin(tiny.scorer))
    modules["score"] = ModuleShape(**(vars(modules["score"]) | {"refused": "it is never called"}))
    with pytest.raises(AdapterError, match="module score: no adapter may save it here: it is never called"):
        read_adapter(tmp_path, modules)
    tiny.save(tiny.twin(tiny.scorer), tmp_path, task_type="SEQ_CLS")  # an untrained copy is none of the adapter's
    assert not [site for site in read_adapter(tmp_path, modules).factors if ":" in site]


def test_what_is_never_called(tmp_path: Path) -> None:
    """PEFT computes without the `shared` that it saves, as only modules tied to the original are called."""
    config = {"target_modules": ["q"], "modules_to_save": ["shared"]}
    peft_model = tiny.save(tiny.twin(tiny.t5), tmp_path, **config)
    before = tiny.outputs(peft_model)
    assert len(tiny.read(tmp_path, tiny.twin(tiny.t5), aliases=tiny.SHARED).factors) == 6
    with torch.no_grad():
        tiny.touch_saved(peft_model)
    assert torch.equal(tiny.outputs(peft_model), before)
    peft_model.save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match="shared is never called in this model, so PEFT computes without"):
        tiny.read(tmp_path, tiny.twin(tiny.t5), aliases=tiny.SHARED)


def test_original_modules_of_another_base(tmp_path: Path) -> None:
    """What the base held under a saved module has no influence on the adapter; under no saved module it has."""
    config = {"target_modules": ["query"], "task_type": "SEQ_CLS"}
    tiny.save(tiny.twin(tiny.roberta), tmp_path, touch=tiny.touch_saved, **config)
    other = "base_model.model.classifier.original_module.dense.weight"
    tiny.edit_weights(tmp_path, _with(other, torch.ones(16, 16)))
    assert len(tiny.read(tmp_path, tiny.twin(tiny.roberta)).factors) == 3
    stray = "base_model.model.roberta.encoder.layer.0.output.dense.original_module.weight"
    tiny.edit_weights(tmp_path, _with(stray, torch.ones(16, 24)))
    with pytest.raises(
        AdapterError, match=r"module roberta\.encoder\.layer\.0\.output\.dense: .*differs from the base"
    ):
        tiny.read(tmp_path, tiny.twin(tiny.roberta))


def test_another_kind_of_module(tmp_path: Path) -> None:
    tiny.save(tiny.twin(tiny.scorer), tmp_path, touch=tiny.touch_saved, task_type="SEQ_CLS")
    modules = tiny.shapes(tiny.twin(tiny.scorer))
    modules["score"] = ModuleShape("other", own={"gain": torch.Size([4])})
    with pytest.raises(
        AdapterError, match=r"module score: the adapter saves its weight .*no such tensor there \(it has gain"
    ):
        read_adapter(tmp_path, modules)
    modules["score"] = ModuleShape("other", own={"weight": torch.Size([4])})
    with pytest.raises(
        AdapterError, match=r"module score: weight must have shape \[4\] .*\[3, 16\]: the adapter belongs"
    ):
        read_adapter(tmp_path, modules)


def test_tensors_without_data(tmp_path: Path) -> None:
    """As a state dict in memory may hold them."""
    from hf_multilora.formats import adapter_from_tensors

    peft_model: Any = tiny.save(tiny.twin(tiny.scorer), tmp_path, task_type="SEQ_CLS")
    config = peft_model.peft_config["default"].to_dict() | {"peft_type": "LORA", "task_type": "SEQ_CLS"}
    for odd in (torch.ones(3, 16).to_sparse(), torch.ones(3, 16, device="meta")):
        with pytest.raises(AdapterError, match="weight must be a dense tensor with data"):
            adapter_from_tensors("memory", config, {"score.weight": odd}, tiny.shapes(tiny.twin(tiny.scorer)))
