# Three commands do everything on a fresh machine: `make demo`, `make test` and `make docs`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
PIP = $(BIN)/python -m pip install -c $(CONSTRAINTS)

# What pip says goes to a file, which is shown where it fails.
define install
@echo "Installing $(1) into $(VENV); pip writes to $(VENV)/install.log."
@{ $(PIP) torch && $(PIP) -e "$(1)"; } > $(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }
endef

.PHONY: demo test check test-oldest test-newest test-transformers docs lint clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Laws, tests and lint of one part: make check PART=mixers/linear
check: $(VENV)/.installed-test
	@$(BIN)/python tests/part.py $(PART) > $(VENV)/part.txt
	OMP_NUM_THREADS=1 KINFORMER_PART=$(PART) $(BIN)/python -m pytest -q -x -n 2 --dist worksteal --deselect tests/test_laws.py::test_benchmarks_import_names_that_exist tests/test_laws.py tests/family/test_settings.py $$(cat $(VENV)/part.txt)
	$(BIN)/ruff check $(wildcard src/kinformer/$(PART) src/kinformer/$(PART).py)
	$(BIN)/ruff format --check $(wildcard src/kinformer/$(PART) src/kinformer/$(PART).py)

# The suite with the oldest, and with the newest, version of everything that pyproject allows.
test-oldest test-newest: test-%: $(VENV)-%/.installed
	OMP_NUM_THREADS=1 $(VENV)-$*/bin/python -m pytest -n 2 --dist worksteal

$(VENV)-%/.installed: pyproject.toml tests/oldest.py
	$(PYTHON) -m venv $(VENV)-$*
	{ test $* = newest || $(PYTHON) tests/oldest.py; } > $(VENV)-$*/constraints.txt
	$(VENV)-$*/bin/python -m pip install -q -c $(VENV)-$*/constraints.txt torch -e ".[test]"
	touch $@

# tests/interop with another version of transformers, beside the other packages of .venv.
TRANSFORMERS ?= 5.24.0
test-transformers: $(VENV)-transformers-$(TRANSFORMERS)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=$(abspath $(<D)) $(BIN)/python -m pytest -n 2 --dist worksteal tests/interop

$(VENV)-transformers-%/.installed: | $(VENV)/.installed-test
	$(BIN)/python -m pip install -q --no-deps --target $(@D) transformers==$*
	touch $@

docs: $(VENV)/.installed-docs
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -b html -W --keep-going -q docs build/docs
	@echo "Open build/docs/index.html."

lint: $(VENV)/.installed-test
	$(BIN)/ruff check src tests annotated benchmarks examples docs
	$(BIN)/ruff format --check src tests annotated benchmarks examples docs
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(call install,.[text])
	touch $@

$(VENV)/.installed-test: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(call install,.[test])
	touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(call install,.[docs])
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) $(VENV)-* build dist
