# `make demo` and `make test` are the two commands: each prepares what it needs, in .venv, on the first run.

PYTHON ?= python3

CONSTRAINTS := constraints.txt
VENV    := .venv
BIN     := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint $(CONSTRAINTS)
PYTEST  := $(BIN)/python -m pytest --doctest-modules --numprocesses 2 --dist loadfile

# Stamps: they exist when the environment matches pyproject.toml and the constraints.
RUNTIME := $(VENV)/.runtime-ready
TOOLS   := $(VENV)/.tools-ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-gpu hunt lint clean

help:
	@echo "make setup      prepare .venv with everything that the tests and checks need"
	@echo "make demo       prepare what mural needs to run, then run: mural demo"
	@echo "make test       lint, then the tests that are not slow, with fixed random cases"
	@echo "make test-all   lint, then all tests, with fresh random cases"
	@echo "make test-gpu   the law over NCCL, on a machine with one GPU or more"
	@echo "make hunt       search for cases that are neither exact nor refused: MINUTES=30, SEED=…, ONLY=models, OUTPUT=….json"
	@echo "make lint       ruff, pyright and the import contracts"
	@echo "make clean      remove caches, build results and demo-out (.venv stays)"

setup: $(TOOLS)

demo: $(RUNTIME)
	$(BIN)/mural demo

# Two files of tests run at a time: most of them wait for ranks. Both find the same cases in the same order.
test test-all: export PYTHONHASHSEED = 0
test: export HYPOTHESIS_PROFILE = fixed
test: lint
	$(PYTEST) -m "not slow" src tests

test-all: export HYPOTHESIS_PROFILE = fresh
test-all: lint
	$(PYTEST) src tests

# On a machine with a GPU; with an environment of your own: make test-gpu TOOLS= BIN=/path/to/bin
test-gpu: $(TOOLS)
	$(BIN)/python tests/gpu/run.py

# With fresh random cases, or those of a SEED; 1 if it finds something.
MINUTES ?= 30
hunt: export OMP_NUM_THREADS = 1
hunt: $(TOOLS)
	$(BIN)/python tests/hunt/run.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY)) $(if $(OUTPUT),--output $(OUTPUT))

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

clean:
	rm -rf build dist demo-out src/mural_train.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "mural needs Python 3.11 or newer, but $(PYTHON) is %d.%d: run make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(INSTALL) --editable .
	@touch $@

$(TOOLS): $(RUNTIME)
	$(INSTALL) --editable ".[test,dev,bench]"
	-$(BIN)/python tests/get_chromium.py  # for the tests of pages; they are skipped without one
	@touch $@
