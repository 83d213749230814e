# `make quickstart` and `make test` need only python3 >= 3.11 and a package index: each creates .venv and installs into it.
PYTHON ?= python3
BIN := .venv/bin
RUN ?= runs/quickstart
# the bytecode of all files takes a minute, that of what is imported seconds
PIP := $(BIN)/python -m pip install --no-compile
# tests start hundreds of processes: without bytecode each takes twice as long to import torch
unexport PYTHONDONTWRITEBYTECODE

# torch for a GPU brings its own Triton, which nothing else may replace.  pytorch.org's build for CPUs has none; where
# that index is out of reach, pip takes the build for GPUs, and then its Triton.  An AMD GPU needs another index, and a
# virtual environment of its own: docs/guide/install.md
FOR_CPU := --no-deps --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0 triton==3.9.0
GPU := $(shell command -v nvidia-smi)

# what a user gets: an environment made by `pip install .` alone
INSTALLED := .venv-installed
PAIR := -m pip list --format freeze | grep -E "^(torch|triton)="
# without Gluon's simulator, which Triton's version does not change
TEST_INSTALLED := $(INSTALLED)/bin/python -m pytest --durations=5 -n 2 --dist worksteal \
	tests/commands/test_install.py tests/kernels --ignore-glob "*/test_hopper_*.py" -m "installed or not slow"

.PHONY: quickstart test test-all test-parallel test-installed installed lint verify compile-all chaos clean

quickstart: .venv/installed
	$(BIN)/python train.py configs/quickstart.yaml --run_dir $(RUN) --resume
	$(BIN)/python -m gpt2_triton sample $(RUN) --prompt "latin " --tokens 100 --temperature 0.7
	$(BIN)/python -m gpt2_triton plot $(RUN) -o loss.png

test: lint # lint and the fast tests: five minutes on two cores
	$(BIN)/python -m pytest --durations=10 --ignore tests/gpu -n 2

test-all: .venv/installed-dev
	$(BIN)/python -m pytest --durations=10 -m "" tests/gpu # first and alone: they measure memory and time
	$(MAKE) -j 2 test-parallel installed # pip waits for its downloads while the tests run
	$(TEST_INSTALLED)

test-parallel: lint
	$(BIN)/python -m pytest --durations=10 -m "" --ignore tests/gpu -n 2 --dist worksteal

test-installed: installed # kernels, quickstart and own with the torch and Triton that `pip install .` chooses
	$(TEST_INSTALLED)

installed: .venv/torch
	$(PYTHON) -m venv $(INSTALLED)
	$(INSTALLED)/bin/python -m pip install --quiet --no-compile .
	@$(INSTALLED)/bin/python $(PAIR) > $(INSTALLED)/pair.txt
	@echo "pip install . chose" $$(cat $(INSTALLED)/pair.txt) "in $$(du -sh $(INSTALLED) | cut -f 1)"
	@if $(BIN)/python $(PAIR) | cmp -s - $(INSTALLED)/pair.txt; then echo "that is .venv's pair: pip finds no other"; fi
	@$(INSTALLED)/bin/python -m pip freeze --exclude gpt2_triton > $(INSTALLED)/chosen.txt
	$(INSTALLED)/bin/python -m pip install --quiet --no-compile -c $(INSTALLED)/chosen.txt pytest pytest-timeout pytest-xdist

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

verify: .venv/installed-dev
	$(BIN)/python -m benchmarks verify

TARGETS ?= all
compile-all: .venv/installed-dev # all kernels for GPUs that are not here: 20 minutes, or two by TARGETS=gfx942
	$(BIN)/python -m tests.kernels.compile_targets $(TARGETS)

MINUTES ?= 60
chaos: .venv/installed-dev # random faults for an hour, a resume after each, the bytes of an undisturbed run at the end
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(KEYS)

clean:
	rm -rf .venv $(INSTALLED) .mypy_cache .pytest_cache .ruff_cache loss.png

.venv/torch:
	@if command -v rocminfo && ! command -v nvidia-smi; then echo "for an AMD GPU see docs/guide/install.md"; exit 1; fi
	$(PYTHON) -m venv .venv
	@echo "installing into .venv: downloads $(if $(GPU),3 GB,0.7 GB or, if only PyPI is reached, 3 GB)"
	$(PIP) $(if $(GPU),torch==2.11.0,$(FOR_CPU))
	@touch $@

.venv/installed: .venv/torch pyproject.toml constraints.txt
	$(PIP) -c constraints.txt -e .
	@touch $@

.venv/installed-dev: .venv/torch pyproject.toml constraints.txt
	$(PIP) -c constraints.txt -e ".[dev]"
	@touch $@ .venv/installed
