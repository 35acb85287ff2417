PYTHON ?= python3
VENV := .venv
ARGS ?=

.PHONY: help venv demo test test-gpu lint format

help:
	@echo "make demo [ARGS=...]   real engine + daemon, inject faults, print what was found"
	@echo "make test              lint, types and tests (no GPU needed)"
	@echo "make test-gpu          what needs a GPU; fails without one"
	@echo "make venv              the virtual environment that the others use"

venv: $(VENV)/.ready

$(VENV)/.ready: requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -q -r requirements-dev.txt
	$(VENV)/bin/python -m pip install --disable-pip-version-check -q --no-deps -e .
	touch $@

demo: venv
	$(VENV)/bin/canaryd demo $(ARGS)

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: venv
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

test: lint
	$(VENV)/bin/python -m pytest -m "not gpu" $(ARGS)

test-gpu:
	$(PYTHON) -m pytest -m gpu $(ARGS)
