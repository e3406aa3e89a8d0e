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
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable
# Of pip's many lines a few, so that a minute isn't silent; all from the first error on.
BRIEFLY := 2>&1 | awk '/^ *(ERROR|error):/ { failed = 1 } failed { print } \
  /^Collecting/ && ++n % 20 == 0 { print "  " n " packages found …"; fflush() } \
  /^Installing collected/ { print "  installing " NF - 3 " packages …"; fflush() }'

DEMO := $(or $(IA_MECH_CACHE),cache)/demo

.PHONY: sample demo study test test-all gpu-check lint clean

sample: $(INSTALLED)
	$(BIN)/ia-mech sample $(ARGS)

# Each command prints more by itself; here only progress is shown, and the answer at the end.
demo: $(INSTALLED)
	@echo "1 of 5: a small model (expect clumsy turns) reads 24 conversations and writes the next user turns (a minute, plus 93 MB once)"
	@$(BIN)/ia-mech sample --out $(DEMO) > /dev/null
	@echo "2 of 5: the built-in judge labels each turn: is it a follow-up? (half a minute, plus 83 MB once)"
	@$(BIN)/ia-mech judge run $(DEMO) --replace > /dev/null
	@echo "3 of 5: a comparison: turns are written without the response (half a minute)"
	@$(BIN)/ia-mech perturbations $(DEMO) --conditions remove > /dev/null
	@echo "4 of 5: rates of follow-ups, with intervals"
	@$(BIN)/ia-mech rates $(DEMO) --judge builtin > /dev/null
	@echo "5 of 5: a page with the answer and all turns"
	@echo
	@$(BIN)/ia-mech report $(DEMO)
	@echo "the rates with their intervals: $(BIN)/ia-mech rates $(DEMO)"

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
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed; name one: make PYTHON=python3.12 …" >&2; exit 2; }
	@echo "making the environment $(VENV), once: PyTorch (CPU), transformers and others (some 800 MB)."
	@echo "With packages in pip's cache this takes a minute or two, else as long as the downloads."
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "error: no virtual environment could be made; on Debian: apt install python3-venv" >&2; exit 2; }
	@rm -f $@
	@{ $(PIP) . && touch $@; } $(BRIEFLY); test -e $@

$(TESTED): $(INSTALLED)
	@rm -f $@
	@echo "installing what the tests need"
	@{ $(PIP) '.[test]' && touch $@; } $(BRIEFLY); test -e $@
