# Two commands matter: `make sample` runs the main job, `make test` runs the tests.
# `make demo` runs the main job, judges what it wrote, counts, and writes a report to open.
# `make test-all` runs the slow tests, too; `make lint` checks style and types.
# `make study` makes the run that docs/ reports of, and its analyses, in about an hour and a half.
# `make gpu-check` runs the tests that need a GPU and the benchmark; see docs/engine.md.
# All create .venv and install on first use; later calls reuse it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

DEMO := $(or $(IA_MECH_CACHE),cache)/demo
STUDY := $(or $(IA_MECH_CACHE),cache)/study

.PHONY: sample demo study test test-all gpu-check lint clean

sample: $(INSTALLED)
	$(BIN)/python -m ia_mech.sample $(ARGS)

demo: $(INSTALLED)
	$(BIN)/python -m ia_mech.sample --out $(DEMO)
	$(BIN)/python -m ia_mech.judge run $(DEMO) --replace
	$(BIN)/python -m ia_mech.rates $(DEMO)
	$(BIN)/python -m ia_mech.report $(DEMO)

study: $(INSTALLED)
	$(BIN)/python -m ia_mech.sample --dataset benchmarks/study.jsonl --limit all --response generate --responses 8 \
	  --response-temperature 1 --temperatures 0.7 1 --header-logits 1000 --out $(STUDY) $(ARGS)
	$(BIN)/python -m experiments.reaction $(STUDY)
	$(BIN)/python -m ia_mech.judge run $(STUDY) --replace
	$(BIN)/python -m ia_mech.rates $(STUDY)
	for target in rate grounded reaction; do $(BIN)/python -m probes.train $(STUDY) --target $$target --replace || exit; done
	$(BIN)/python -m ia_mech.report $(STUDY)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -m '' $(ARGS)

gpu-check: $(INSTALLED)
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed; name one: make PYTHON=python3.12 …" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "error: no virtual environment could be made; on Debian: apt install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@
