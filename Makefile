# Everything happens in a virtual environment in this checkout; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo check test lint types bench clean

demo: $(VENV)/.installed  ## set up, and run the example on the embedded model
	$(BIN)/python example.py

check: lint types  ## what to run after each change: lint, types and the fast tests
	$(BIN)/python -m pytest -n auto -m "not slow"

test: $(VENV)/.testing  ## set up, and run all tests
	$(BIN)/python -m pytest -n auto --ignore tests/test_ray_serve.py
	$(BIN)/python -m pytest tests/test_ray_serve.py  # its processes need the machine for themselves

lint: $(VENV)/.testing  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.testing  ## mypy, strict for the package
	$(BIN)/mypy

bench: $(VENV)/.installed  ## the classic benchmark, on this machine
	$(BIN)/python bench.py

clean:  ## remove the virtual environment and the tools' caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing nanovllm and what it needs into $(VENV) (PyTorch is large) ..."
	$(INSTALL) -e .
	@touch $@

$(VENV)/.testing: $(VENV)/.installed
	$(INSTALL) -e '.[plot,ray,ray-serve,serve,test,lint]'
	@touch $@
