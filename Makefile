# make setup | demo | test | verify | lint | format
VENV := .venv
PYTHON ?= python3
RUN := . $(VENV)/bin/activate &&

.PHONY: setup demo test verify lint format

setup: $(VENV)/.ready

# The environment is made again when what it is made from changes.
$(VENV)/.ready: constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headway needs Python 3.11 or newer; set PYTHON=python3.11 or newer.")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) python -m pip install --quiet --upgrade pip
	$(RUN) python -m pip install --quiet torch==2.13.0
	$(RUN) python -m pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	touch $@

demo: setup
	$(RUN) python -m benchmarks.demo

lint: setup
	$(RUN) ruff check . && ruff format --check . && mypy && lint-imports

test: lint
	$(RUN) pytest -n 2 --dist worksteal

verify: setup
	$(RUN) python -m benchmarks.verify

format: setup
	$(RUN) ruff check --fix . && ruff format .
