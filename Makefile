# Every target makes what it needs. The environment is .venv, pinned by constraints.txt and by what PyTorch's build for
# CPUs or for CUDA needs beside it; name the other file where that is not what pip finds.
PYTHON ?= python3
CONSTRAINTS ?= $(if $(shell command -v nvidia-smi),constraints-cuda.txt,constraints-cpu.txt)
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-fast check races gpu golden bench setup clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

$(VENV)/.ready: pyproject.toml constraints.txt $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Braid needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "== setting up $(VENV) (once; downloads PyTorch and Ray)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[dev]' \
		|| { echo "pip cannot install with $(CONSTRAINTS). If it names Triton, it finds another build of PyTorch:" \
			"choose with make CONSTRAINTS=constraints-cuda.txt (or constraints-cpu.txt)" >&2; exit 1; }
	@touch $@

setup: $(VENV)/.ready  ## make the environment

demo: setup  ## see what hiding communication is worth: two ranks over an emulated slow link, three minutes
	$(BIN)/braid demo

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder

test: setup  ## run the tests that protect training, in two processes: 18 minutes on two cores
	$(PYTEST) --durations 40 -m "not thorough"

test-all: setup  ## run all tests: proofs of papers, benchmarks, long drills and repetitions too
	$(PYTEST) --durations 40

test-fast: setup  ## run the tests that take no more than a few seconds each
	$(PYTEST) -m "not slow and not thorough"

check: setup  ## formatting, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

races: setup  ## the CUDA path on a model of the machine: races, lifetimes, other orders; RACES='--draw 10': some of it
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.cuda.races $(RACES)

gpu:  ## check and measure this machine's GPUs with the python that is here (needs PyTorch and pytest, no setup)
	$(PYTHON) -m tests.gpu $(GPU)

golden: setup  ## renew the golden files under tests/golden; read the difference before you commit it
	$(BIN)/python -m pytest -q tests/scheduling/test_golden.py tests/kernels/triton/test_machine_code.py \
		tests/actors/test_config_reference.py --update-golden

bench: setup  ## one rank against a plain PyTorch loop
	$(BIN)/braid bench training

clean:  ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache *.egg-info
