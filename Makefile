# make demo      set up, train a small model on the machine's own Python library, sample, write a report page
# make test      set up, then linters, types, import order, docs and every fast test (at most 10 minutes on 2 cores)
# make test-all  the same and the slow tier: kill tests, long parities, end-to-end runs
#
# PYTHON=python3.12 chooses the interpreter, VENV=… the environment.

PYTHON ?= python3
VENV ?= .venv
RUN := runs/demo
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# Two test processes with one thread each use two cores better than two threads in one process.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n 2 --dist worksteal -q

.PHONY: demo test test-all test-slow check docs install clean

demo: $(VENV)/.installed
	$(BIN)/phylon train demo --out $(RUN) --fresh

test: check
	$(PYTEST) -m "not slow"

test-all: test test-slow

test-slow: $(VENV)/.test
	$(PYTEST) -m slow

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

docs: $(VENV)/.test
	$(BIN)/python -m phylon.cli.docs

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Phylon needs Python 3.11 or newer; this is %s. Name one: make PYTHON=python3.12 …" % sys.version.split()[0])'
	@test -x $(BIN)/python || echo "making the environment in $(VENV)"
	@test -x $(BIN)/pip || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); } || { rm -rf $(VENV); \
		echo "this Python cannot make environments: install its venv package (Debian: apt-get install python3-venv)"; exit 1; }
	@echo "installing PyTorch and Phylon (once)"
	@$(PIP) torch
	@$(PIP) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	@echo "installing what the tests need (once)"
	@$(PIP) --editable ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) runs build dist src/*.egg-info
