# All targets work from a fresh clone: they set up .venv first where it is missing or pyproject.toml has changed.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
EXTRAS := golden,xla,remote,report,pytest,dev
# Number of processes that share the test files: one more than two cores, as tests wait for what they start.
WORKERS ?= 3
PYTEST := -m pytest -q -rs --dist loadfile
# Tests that `make check` and `make test-scripts` run; `make test` runs all others that are not slow.
CHECK_TESTS := tests/test_floors.py tests/test_house.py tests/test_packaging.py tests/test_project_files.py
FAST_PYTEST := $(PYTEST) -n $(WORKERS) -m "not slow"
FAST_TESTS := $(FAST_PYTEST) $(CHECK_TESTS:%=--ignore %) --ignore tests/scripts
# Byte code is kept: without it each of the tests' processes compiles mm2 anew, and each run all tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-scripts test-lowest test-wheel slow torture models check fix clean

help: ## List the targets
	@echo "mm2 finds where a port of MiniMax-M2 to AWS Trainium goes wrong. Targets:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "The first target that needs .venv installs it: 3-4 minutes, about 8 GB of disk on Linux x86-64."

venv: $(STAMP) ## Set up .venv with mm2 and all that its tests need

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: .venv needs Python 3.11 or later (transformers 5.23 does; mm2 alone runs on 3.10)." >&2; \
	  echo "make: '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true). Try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
	  exit 1; }
	@echo "Installing mm2[$(EXTRAS)] into .venv: 3-4 minutes and, on Linux x86-64, about 8 GB of disk,"
	@echo "because the torch that torch_xla needs brings the CUDA libraries."
	@echo "This is done once, and again in seconds when pyproject.toml changes."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[$(EXTRAS)]'
	@touch $(STAMP)

demo: $(STAMP) ## Find planted bugs in a toy port, and read real text, on the CPU
	@echo "Running scripts/demo.py: writes a toy checkpoint, captures a golden, finds planted bugs, reads real text. CPU, 1-3 minutes."
	$(BIN)/python scripts/demo.py

test: $(STAMP) ## Run the tests without the slow ones, and without those of check and of scripts/
	@echo "Running the tests, about 11 minutes on 2 cores. Tests that need a device or a checkpoint are skipped, with the reason."
	$(BIN)/python $(FAST_TESTS)

test-scripts: $(STAMP) ## Run the tests of the benchmarks and tools in scripts/, without the slow ones
	$(BIN)/python $(FAST_PYTEST) tests/scripts

test-lowest: ## Run the tests with the lowest versions that pyproject.toml admits
	@echo "Installing the lowest versions into .venv-lowest: about 8 GB. uv finds them; pip has no such resolution."
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --disable-pip-version-check --quiet uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest --resolution lowest-direct --editable '.[golden,remote,report,pytest,dev]'
	.venv-lowest/bin/python $(FAST_TESTS)

test-wheel: ## Install a wheel of mm2 in a fresh environment, and run the demo there; PYTHON=python3.13 picks the Python
	rm -rf build/wheel && mkdir -p build/wheel
	$(PYTHON) -m venv build/wheel/venv
	$(PYTHON) -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir build/wheel .
	build/wheel/venv/bin/python -m pip install --disable-pip-version-check --quiet "$$(ls $(CURDIR)/build/wheel/mm2-*.whl)[golden]"
	cd build/wheel && venv/bin/python $(CURDIR)/scripts/demo.py --backend cpu

slow: $(STAMP) ## Run the slow tests: about half an hour on 2 cores
	$(BIN)/python $(PYTEST) -n 2 -m slow

torture: $(STAMP) ## Killed commands, great sizes, many runs in one process: count what breaks
	$(BIN)/python scripts/bench_torture.py

models: $(STAMP) ## Train the learned models again (output: mm2-models)
	@echo "Running scripts/train_models.py: fourteen small models, 5-20 minutes of one core each, into mm2-models."
	$(BIN)/python scripts/train_models.py

check: $(STAMP) ## Check format, lint, types, floors, the house, packages and the project's files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(CHECK_TESTS)

fix: $(STAMP) ## Format, and apply the fixes of ruff
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove caches and build output, but not .venv
	rm -rf build *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
