"""Executes the notebooks of this folder and writes them back with their outputs: make notebooks.

pip install -e '.[dev,notebook]'
python examples/run_notebooks.py [NAME.ipynb ...]
"""

import argparse
from pathlib import Path

import nbformat
from base_model import smollm2
from nbclient import NotebookClient
from nbformat import NotebookNode
from reranker_model import reranker

HERE = Path(__file__).parent
MODELS = {"mixed_adapters.ipynb": smollm2, "rerankers.ipynb": reranker}


def execute(notebook: NotebookNode, seconds_per_cell: int = 600) -> NotebookNode:
    """The notebook with new outputs, run by a kernel of this interpreter in this folder.

    Raises nbclient.exceptions.CellExecutionError, which shows the cell, where one fails.
    """
    resources = {"metadata": {"path": str(HERE)}}
    settings = {"timeout": seconds_per_cell, "kernel_name": "python3", "coalesce_streams": True}
    client = NotebookClient(notebook, resources=resources, **settings)
    done: NotebookNode = client.execute()
    for cell in done.cells:
        cell.metadata.pop("execution", None)  # times
    done.metadata.language_info.pop("version", None)
    return done


def read(path: Path) -> NotebookNode:
    """The notebook, once its model is converted: the conversion's messages would be among the outputs."""
    if path.name in MODELS:
        MODELS[path.name]()
    notebook: NotebookNode = nbformat.read(path, as_version=4)
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute notebooks in place.")
    parser.add_argument("notebook", type=Path, nargs="*", help="default: all of this folder")
    for path in parser.parse_args().notebook or sorted(HERE.glob("*.ipynb")):
        print(path.name)
        nbformat.write(execute(read(path)), path)


if __name__ == "__main__":
    main()
