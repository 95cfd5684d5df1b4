# On a fresh clone: `make demo` and `make test` set up a virtual environment in .venv and run.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-fast test-transformers bench style quality clean

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[demo,test,quality]"
	touch $@

# The main job on a real model: SmolLM2-135M-Instruct, or MODEL=<folder or Hub id>. SHORT=1 for a short run.
demo: $(INSTALLED)
	$(BIN)/gated-attention demo $(if $(MODEL),--model "$(MODEL)") $(if $(SHORT),--short)

# Two files of tests at a time, each with one thread: half of the time goes into starting processes.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test: $(INSTALLED)
	$(PYTEST) tests

# Without the real model and without building wheels.
test-fast: $(INSTALLED)
	$(PYTEST) tests -m "not slow"

# transformers' own tests against our classes; fetches the source distribution of the installed transformers once.
test-transformers: $(INSTALLED)
	$(BIN)/python tests/transformers_suite/fetch.py build/transformers_suite
	$(PYTEST) --dist load tests/transformers_suite

# All benchmarks, and docs/benchmarks.md from what they give: over an hour on two cores.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/page.py --run

style: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

quality: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv build dist *.egg-info
