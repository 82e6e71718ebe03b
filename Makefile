# make serve    install into .venv, fetch the demo model, serve it on http://127.0.0.1:8000
# make test     install the dev extras, run the whole test suite that needs no GPU; TEST_WORKERS=2 takes two files at a time
# make check    formatting, lint, types
# make check-gpu  kernels that changed, compiled for GPUs that are not here; the GPU's own check in small, on the CPU
#
# On a machine without a GPU, the small CPU build of torch is enough:
#   make serve PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
# Reruns install nothing until pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
MODEL ?= smollm2-135m
SERVE_FLAGS ?=
TEST_WORKERS ?= 0
TEST_FLAGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS)
TORCH := "torch>=2.11,<=2.13.0"

.PHONY: serve test test-slow check check-gpu format lines clean

serve: $(VENV)/.installed
	$(BIN)/halfbyte fetch $(MODEL)
	$(BIN)/halfbyte serve $(MODEL) $(SERVE_FLAGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile --durations=30 -m "not slow and not gpu and not soak" $(TEST_FLAGS)

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -m slow $(TEST_FLAGS)

check: $(VENV)/.installed-dev
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

check-gpu: $(VENV)/.installed-dev
	$(BIN)/python scripts/aot --changed
	$(BIN)/python scripts/gpu_check --dry --out build/gpu_check

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lines:
	$(PYTHON) scripts/lines

clean:
	rm -rf build dist *.egg-info .typing .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and by itself: a range that only torch answers leaves pip no reason to take a larger build.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV); the first time this takes some minutes"
	$(PIP) $(TORCH)
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV), with what tests need; the first time this takes some minutes"
	$(PIP) $(TORCH)
	$(PIP) -e ".[dev]"
	touch $@ $(VENV)/.installed
