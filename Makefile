# The two commands of the README are `make demo` and `make test`; each does all set-up itself.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# A test that hangs prints every thread's stack and ends the run, instead of using up the CI's time.
PYTEST_LIMITS := -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true

# GPU tests run in the virtual environment if its torch was built for CUDA, else with the system's python.
GPU_PYTHON = $(shell $(BIN)/python -c 'import torch; assert torch.version.cuda' 2>/dev/null && echo $(BIN)/python || echo $(PYTHON))

.PHONY: help fuzz venv demo test test-operations test-gpu bench-gpu bench-cpu sanitize-gpu lint format

help:
	@echo "make demo [ARGS=...]    a real engine and the daemon: inject faults, print what was found"
	@echo "make test [ARGS=...]    lint, types and all tests that need no GPU"
	@echo "make simulate [SEEDS=N] [SEED=k]  engine, client, wire and core in seeded simulated worlds"
	@echo "make test-operations    alerts against a real Prometheus, image; fails without Debian's packages"
	@echo "make test-gpu           what needs a GPU; fails without one"
	@echo "make fuzz TARGET=frames  coverage-guided fuzzing (frames, stream, attach, config, findings); ARGS=-runs=1000000"
	@echo "make bench-gpu [ARGS=...]  the kernels' table on a GPU; fails if one differs from its reference"
	@echo "make bench-cpu          speed of the host's digest, cost of the ledger and of the client"
	@echo "make sanitize-gpu       the kernels' GPU tests under compute-sanitizer"
	@echo "make lint, make format  ruff and mypy; ruff's fixes"
	@echo "make venv               the virtual environment in $(VENV) that the others use"
	@echo "PYTHON=python3.12       chooses the interpreter (3.11 or later)"

venv: $(VENV)/.ready

$(VENV)/.ready: requirements-dev.txt constraints-gpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "canaryd needs Python 3.11 or later, and '$(PYTHON)' is older or missing." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot create virtual environments: its ensurepip or venv module is missing." >&2; \
	  echo "On Debian and Ubuntu: sudo apt-get install python3-venv" >&2; exit 1; }
	@echo "Setting up $(VENV) (once; later runs skip this)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -r requirements-dev.txt
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

demo: venv
	$(BIN)/canaryd demo $(ARGS)

TARGET ?= frames
fuzz: venv
	$(BIN)/python -m tests.fuzz $(TARGET) -max_len=600 $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST_LIMITS) $(ARGS)

simulate: venv
	$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),50))

test-operations: venv
	CANARYD_TEST_OPERATIONS=1 $(BIN)/python -m pytest -m operations $(PYTEST_LIMITS) $(ARGS)

test-gpu:
	CANARYD_TEST_GPU=1 PYTHONPATH=.:kernels $(GPU_PYTHON) -m pytest -m gpu $(ARGS)

bench-gpu:
	PYTHONPATH=.:kernels $(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

bench-cpu: venv
	PYTHONPATH=.:kernels $(BIN)/python benchmarks/cpu_digest.py
	PYTHONPATH=.:kernels $(BIN)/python benchmarks/ledger_apply.py
	PYTHONPATH=.:kernels $(BIN)/python benchmarks/client_step.py

sanitize-gpu:
	PYTHONPATH=.:kernels $(GPU_PYTHON) tests/kernels/sanitize.py $(ARGS)
