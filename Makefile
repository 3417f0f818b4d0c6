# What people type and what CI runs. Everything happens in .venv; PIP_ARGS is handed to pip, PYTHON chooses the interpreter.
PYTHON ?= python3.11
PIP_ARGS ?=
PYTEST_ARGS ?=
BIN := .venv/bin
# One thread for numerical libraries in the test process: on two cores they otherwise fight with the rank processes.
TEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo ui test test-all lint bench
INSTALL := $(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt

help:  ## what each target does
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/.installed  ## make .venv and install the tested versions into it

# What runs need, without what only tests need.
.venv/.runs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing the tested versions into .venv (once; some minutes)"
	$(INSTALL) -e .
	touch $@

.venv/.installed: .venv/.runs
	$(INSTALL) -e '.[dev]'
	touch $@

demo: .venv/.runs  ## train a small model on real text; kill it and give the command again
	$(BIN)/mem train deployments/demo.yaml

ui: .venv/.runs  ## a local Prefect server with its UI, the deployments, and a process that runs them
	$(BIN)/mem serve

test: setup  ## the tests that CI runs
	$(TEST) -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: setup  ## also the long ones, and those that need a GPU where there is one
	$(TEST) $(PYTEST_ARGS)

lint: setup  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: setup  ## measured ratios, printed as medians with their spread
	@for file in $$(grep -l "from measuring import" tests/benchmarks/*.py); do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done
