# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.installed-test
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(BIN)/python -m pip install -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e ".[text]"
	touch $@

$(VENV)/.installed-test: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(BIN)/python -m pip install -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e ".[test]"
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build dist
