# Every target sets up .venv first; PYTHON chooses the interpreter, EXTRAS what is installed (cuda,dev for an
# NVIDIA GPU), ARGS is passed on to pytest or to the demo.
.PHONY: demo setup test lint types docs check evidence mutations hooks fuzz clean
.DEFAULT_GOAL := demo

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
comma := ,
EXTRAS ?= $(if $(filter Darwin,$(shell uname -s)),dev,cpu$(comma)dev)
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
PROMPT ?= A mixture-of-experts model

demo: $(STAMP)
	$(BIN)/registry generate api/demo --prompt "$(PROMPT)" --max-tokens 80 --temp 0 $(ARGS)

setup: $(STAMP)

test: $(STAMP)
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/registry fmt --check

# mypy finds the package's modules only where it is installed as users have it, not in the editable copy.
types: $(STAMP)
	@rm -rf build $(VENV)/types
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/types .
	MYPYPATH=$(VENV)/types $(BIN)/mypy -p mlx_experts

docs: $(STAMP)
	$(BIN)/python tests/tooling/docs.py $(ARGS)

check: $(STAMP)
	$(BIN)/registry check

# What ran, on the present text of every family.
evidence: $(STAMP)
	$(BIN)/registry check --record tests/evidence/check.json
	$(BIN)/registry parity --originals tests/cases --record tests/evidence/originals.json
	$(BIN)/python tests/tooling/docs.py

# Random families, configs, quantisation entries, headers, indexes and checkpoints; SEED and EXAMPLES choose which.
SEED ?= 1
EXAMPLES ?= 2000
FUZZERS := tests/robustness/test_fuzz_families.py tests/robustness/test_fuzz_config.py \
  tests/robustness/test_fuzz_quantisation.py tests/robustness/test_damaged_files.py \
  tests/registry/checkpoint/test_safetensors_header.py tests/registry/checkpoint/test_checkpoint.py
fuzz: $(STAMP)
	EXAMPLES=$(EXAMPLES) $(BIN)/pytest --hypothesis-profile long --hypothesis-seed $(SEED) $(FUZZERS)

# Every literal of every family file, changed one at a time; about half an hour.
mutations: $(STAMP)
	$(BIN)/python scripts/mutate_families.py

hooks: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pre-commit
	$(BIN)/pre-commit install

clean:
	rm -rf $(VENV) build *.egg-info

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or newer is needed; name one with make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make virtual environments; on Debian run: apt-get install python3-venv" >&2; \
	  exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time takes a few minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$(EXTRAS)]"
	@touch $@
