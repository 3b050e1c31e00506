"""Executes the notebooks of this folder and writes them back with their outputs: make notebooks.

pip install -e '.[dev,notebook]'
python examples/run_notebooks.py [NAME.ipynb ...]
"""

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).parent


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
