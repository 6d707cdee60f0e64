# make setup | demo | test | coverage | verify | verify-vllm | verify-llamacpp | gpu | gpu-wheels | wheel-check | lint | format
VENV := .venv
PYTHON ?= python3
RUN := . $(VENV)/bin/activate &&

.PHONY: setup demo test coverage verify verify-vllm verify-llamacpp gpu gpu-wheels wheel-check lint format

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
	$(RUN) python -m benchmarks.demo --no-compile

lint: setup
	$(RUN) ruff check . && ruff format --check . && mypy && lint-imports

test: lint
	$(RUN) pytest -n 2 --dist worksteal

# Lines and branches of heads/ and train/ that tests reach, in subprocesses too; slower than `make test`.
coverage: setup
	$(RUN) pytest -n 2 --dist worksteal --cov --cov-report=term

verify: setup
	$(RUN) python -m benchmarks.verify

# Exports in a real engine, in an environment of its own under build/, which is made at first: minutes.
verify-vllm: setup
	$(RUN) python -m benchmarks.verify vllm

verify-llamacpp: setup
	$(RUN) python -m benchmarks.verify llamacpp

# On a machine with a GPU, with its own Python and PyTorch: about 25 minutes, or COMMAND=tests, costs, decoding, mx or learn alone.
gpu:
	$(PYTHON) -m benchmarks.gpu $(COMMAND) $(if $(wildcard build/wheels/*.whl),--wheels build/wheels)

# What such a machine may lack, for one without a network: build/wheels travels there.
gpu-wheels: setup
	$(RUN) python -m benchmarks.gpu.wheels build/wheels

# What tests/test_wheel.py emulates, with downloaded packages: the wheel alone in an empty environment decodes.
wheel-check: setup
	rm -rf build/wheel-check
	$(RUN) python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel-check .
	$(PYTHON) -m venv build/wheel-check/environment
	build/wheel-check/environment/bin/python -m pip install --quiet torch==2.13.0
	build/wheel-check/environment/bin/python -m pip install --quiet --constraint constraints.txt build/wheel-check/*.whl
	cd build/wheel-check && environment/bin/python -I -P ../../tests/decode_with_wheel.py

format: setup
	$(RUN) ruff check --fix . && ruff format .
