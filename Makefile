# Two commands matter: `make sample` runs the main job, `make test` runs the tests.
# `make demo` runs the main job, judges what it wrote, counts, and writes a page to open.
# `make test-all` runs the slow tests, too; `make lint` checks style, types and spelling.
# `make study` makes a whole study of the embedded model, in some two hours.
# `make gpu-check` measures, and tests, what needs a GPU; see benchmarks/README.md.
# All create .venv and install on first use, tests with what they need; later calls reuse it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TESTED := $(VENV)/.tested
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

DEMO := $(or $(IA_MECH_CACHE),cache)/demo

.PHONY: sample demo study test test-all gpu-check lint clean

sample: $(INSTALLED)
	$(BIN)/ia-mech sample $(ARGS)

demo: $(INSTALLED)
	$(BIN)/ia-mech sample --out $(DEMO)
	$(BIN)/ia-mech judge run $(DEMO) --replace
	$(BIN)/ia-mech rates $(DEMO) --judge builtin
	$(BIN)/ia-mech report $(DEMO)

study: $(INSTALLED)
	$(BIN)/python -m experiments.study smollm2-135m-instruct $(ARGS)

test: $(TESTED)
	$(BIN)/python -m pytest $(ARGS)

test-all: $(TESTED)
	$(BIN)/python -m pytest -m '' $(ARGS)

gpu-check: $(TESTED)
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

lint: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

clean:
	rm -rf $(VENV)

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV), quietly; this takes a minute or more"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed; name one: make PYTHON=python3.12 …" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "error: no virtual environment could be made; on Debian: apt install python3-venv" >&2; exit 2; }
	$(PIP) .
	@touch $@

$(TESTED): $(INSTALLED)
	$(PIP) '.[test]'
	@touch $@
