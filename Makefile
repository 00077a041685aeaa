# Everything a checkout needs, with nothing but make and a Python of at least 3.11. `make help` lists the targets.

VENV := .venv
BIN := $(VENV)/bin
NOTEBOOKS := $(wildcard notebooks/*.py)

# The first Python that is new enough; `make env PYTHON=/path/to/python` overrides the search.
SUITABLE = import sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c '$(SUITABLE)' 2>/dev/null && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help env demo test lint format notebooks clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(VENV)/.installed ; @: ## create .venv and install detspec with its developer tools (once)

demo: env ## the whole product in one picture: generate, verify, roll back, compare bits
	$(BIN)/detspec demo

test: env ## run the tests
	$(BIN)/python -m pytest $(ARGS)

lint: env ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(VENV)/.installed-notebooks ## execute every notebook into out/notebooks
	@test -n "$(NOTEBOOKS)" || echo "no notebooks"
	@mkdir -p out/notebooks
	@for source in $(NOTEBOOKS); do \
		name=$$(basename $$source .py); \
		echo "executing $$source"; \
		$(BIN)/jupytext --quiet --to ipynb --output out/notebooks/$$name.ipynb $$source && \
		$(BIN)/jupyter nbconvert --log-level WARN --to notebook --execute --inplace out/notebooks/$$name.ipynb || exit 1; \
	done

clean: ## remove .venv, caches and outputs
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(if $(PYTHON),:,echo "detspec needs Python 3.11 or newer with venv; none was found. Say where: make env PYTHON=/path/to/python" >&2; exit 1)
	@{ $(PYTHON) -c '$(SUITABLE)'; } 2>/dev/null || { echo "detspec needs Python 3.11 or newer with venv; $(PYTHON) is not" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing detspec and its tools into $(VENV) (about a minute)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(VENV)/.installed-notebooks: $(VENV)/.installed
	@echo "installing what notebooks need"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[notebooks]'
	@touch $@
