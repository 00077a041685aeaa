# Sets up and checks a checkout with nothing but make and Python 3.11 or newer. `make help` lists the targets.

VENV := .venv
BIN := $(VENV)/bin

# The first Python found that is new enough; `make env PYTHON=/path/to/python` skips the search.
SUITABLE = import sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c '$(SUITABLE)' 2>/dev/null && echo $$p && break; done)

# The versions of a rented H100 need Python 3.12: `make test-aot-device PYTHON_DEVICE=/path/to/python` skips this search.
NEWER = import sys, venv; sys.exit(sys.version_info < (3, 12))
PYTHON_DEVICE ?= $(shell for p in python3.12 python3.13 python3.14 python3 "$$(pyenv root 2>/dev/null)"/versions/3.1[2-9]*/bin/python; do \
	"$$p" -c '$(NEWER)' 2>/dev/null && echo "$$p" && break; done)
# What is compiled with them: the programs of `make prove` and those of an engine, and products with experts.
FOR_DEVICE = tests/aot/test_committed.py tests/aot/test_experts.py tests/aot/test_prove.py

# Tests start processes by the dozen, and without files of bytecode each compiles the sources of jax anew: 2 s instead of 0.6.
unexport PYTHONDONTWRITEBYTECODE

PYTEST = $(BIN)/python -m pytest --numprocesses auto
# Simulated devices are threads that wait for each other: on a busy machine longer than XLA's 40 seconds.
MESH = JAX_NUM_CPU_DEVICES=8 XLA_FLAGS="--xla_cpu_collective_call_terminate_timeout_seconds=600 $$XLA_FLAGS"
# Programs of tests take longer to compile than to run: without optimisation a fifth of the time. jax 0.12 no longer knows the
# last flag, and would abort.
UNOPTIMISED := --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1
OLD_EMITTERS := --xla_cpu_use_fusion_emitters=false
define unoptimised
case "$$JAX_PLATFORMS" in "" | cpu) \
	flags="$(UNOPTIMISED) $(OLD_EMITTERS)"; \
	XLA_FLAGS="$$flags" JAX_PLATFORMS=cpu $(BIN)/python -c 'import jax; jax.devices()' 2> /dev/null || flags="$(UNOPTIMISED)"; \
	export XLA_FLAGS="$$flags $$XLA_FLAGS"; echo "XLA_FLAGS=$$XLA_FLAGS";; esac
endef
# `make check-all` sets SLOW, and so may any target.
QUICK = $(if $(SLOW),, and not slow)
# Tests that compare bits of programs run in programs compiled as users do, and nowhere else.
OPTIMISED = -m 'optimised and not kernels and not sweep$(QUICK)'
# Tests on many devices, unless ARGS name other files.
ON_MESH = tests/mesh tests/promises/test_chips.py
WITH_MESH = $(if $(filter tests/% scripts/%,$(ARGS)),$(filter $(ON_MESH:=%),$(ARGS)),yes)
FAST = -m 'not optimised and not kernels and not slow and not sweep'
# What a commit must pass, in this order; and what a release must.
STEPS = env lint test test-optimised test-kernels test-mesh prove test-aot docs
ALL_STEPS = env lint test test-slow test-optimised test-kernels test-mesh prove test-aot parity evals tunix notebooks docs

.DEFAULT_GOAL := help
.PHONY: help env demo test check check-all test-slow test-optimised test-sweeps test-kernels test-mesh test-aot test-aot-device kernels parity evals tunix prove lint format notebooks pairs docs docs-serve dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(VENV)/.installed ; @: ## create .venv and install detspec with its developer tools (once)

demo: $(VENV)/.installed-demo ## run the demonstration: requests alone and in a crowd, ordinary and deterministic
	$(BIN)/detspec demo

# Exit code 5: ARGS choose none of these tests.
test: env ## run the tests that a change is tried with; ARGS='-k rope' runs a part
	@$(unoptimised); $(PYTEST) $(FAST) --dist loadfile --no-loadscope-reorder $(ARGS) || { code=$$?; [ $$code -ne 5 ] || \
		echo "no such test is among those of make test; what compares bits is in make test-optimised ARGS=..."; exit $$code; }

check: ## run all that a commit must pass, with the seconds of each step; stops at the first failure
	@export CI=true DETSPEC_TEST_RUN=check-$$$$; trap 'rm -rf "$${TMPDIR:-/tmp}/detspec-test-$$DETSPEC_TEST_RUN"' EXIT; \
	for step in $(STEPS); do \
		echo "==> make $$step"; start=$$(date +%s); \
		$(MAKE) --no-print-directory $$step || exit 1; \
		echo "==> make $$step: passed in $$(($$(date +%s) - start)) s"; \
	done

check-all: ## run everything, slow tests too: about an hour, before a release
	@$(MAKE) --no-print-directory check SLOW=yes STEPS="$(ALL_STEPS)"

test-slow: env ## run the slow tests: whole commands, training runs, worked examples
	@$(unoptimised); $(PYTEST) -m 'slow and not optimised and not kernels and not sweep' --dist loadfile --no-loadscope-reorder $(ARGS)

test-optimised: env ## compare the bits of programs that are compiled as users do: those of the promises; SLOW=yes compares all
	$(PYTEST) $(if $(SLOW)$(ARGS),,tests/promises) $(OPTIMISED) --dist loadfile --no-loadscope-reorder $(ARGS) || [ $$? -eq 5 ]
	$(if $(WITH_MESH),$(MESH) $(PYTEST) $(ON_MESH) $(OPTIMISED) --dist worksteal $(ARGS) || [ $$? -eq 5 ])

test-sweeps: env ## run further cases of the slow tests; `make check` does not
	@$(unoptimised); $(PYTEST) -m 'sweep and not optimised' --dist loadfile --no-loadscope-reorder $(ARGS) || [ $$? -eq 5 ]
	$(PYTEST) -m 'sweep and optimised' --dist loadfile --no-loadscope-reorder $(ARGS) || [ $$? -eq 5 ]
	@echo "sweeps of programs for missing devices: make test-aot ARGS='-m sweep'"

test-kernels: env ## run the TPU and GPU kernels in Pallas's simulators
	@$(unoptimised); $(PYTEST) tests -m 'kernels$(QUICK)' --dist worksteal $(ARGS)

test-mesh: env ## run the tests on eight simulated devices, but for those that test-optimised runs
	@$(unoptimised); $(MESH) $(PYTEST) $(ON_MESH) -m 'not optimised and not sweep$(QUICK)' --dist worksteal $(ARGS)

test-aot: $(VENV)/aot/.installed ## compile kernels and programs for TPUs and GPUs without having one; ARGS='-k v6e' runs a part
	$(VENV)/aot/bin/python -m pytest tests/aot -m 'not sweep$(QUICK)' --numprocesses auto --dist worksteal $(ARGS)

test-aot-device: $(VENV)/aot-device/.installed ## the part of test-aot for an H100, with the versions of a rented one; before it is rented
	$(VENV)/aot-device/bin/python -m pytest $(FOR_DEVICE) --numprocesses auto --dist worksteal -k 'not v6e and not h200' $(ARGS)

kernels: $(VENV)/aot/.installed ## compile every kernel and rewrite docs/kernels.md
	$(VENV)/aot/bin/python tests/aot/compile_kernels.py

parity: $(VENV)/.installed-parity ## compare every model family with Hugging Face transformers
	@$(unoptimised); OMP_NUM_THREADS=1 $(PYTEST) tests/parity --dist worksteal $(ARGS)

evals: $(VENV)/.installed-evals ## run the tests of `detspec eval`, with the lm-evaluation-harness
	@$(unoptimised); $(PYTEST) tests/evals --dist loadfile $(ARGS)

tunix: $(VENV)/tunix/.installed ## train by Tunix's GRPO with detspec's rollouts and policy; installs Tunix
	@$(unoptimised); JAX_PLATFORMS=cpu $(VENV)/tunix/bin/python -m pytest tests/trainers $(ARGS)

prove: env ## rehearse with tiny shapes what scripts/prove_on_device.py measures on a GPU or TPU
	@rm -rf out/rehearsal; $(unoptimised); \
	JAX_PLATFORMS=cpu $(BIN)/python scripts/prove_on_device.py --out out/rehearsal --size tiny

lint: env ## check with ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env ## fix and format with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(VENV)/.installed-notebooks ## execute every notebook into out/notebooks; what is kept in notebooks/ must be of these cells
	@$(BIN)/python scripts/pair_notebooks.py --check

pairs: $(VENV)/.installed-notebooks ## write each notebook's .ipynb from its .py, and execute it if its code or the version changed
	@$(BIN)/python scripts/pair_notebooks.py

docs: $(VENV)/.installed-docs ## build the documentation site into out/site; its links, anchors and references must lead somewhere
	$(BIN)/python scripts/make_site.py

docs-serve: docs ## show the documentation site on http://localhost:8000
	$(BIN)/python -m http.server --bind localhost --directory out/site 8000

dist: env ## build the wheel and the sdist into dist/
	$(BIN)/python -m build --outdir dist

clean: ## remove .venv, caches and outputs
	rm -rf $(VENV) build dist out .cache *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(if $(PYTHON),:,echo "detspec needs Python 3.11 or newer with venv, and none was found. Give its path: make env PYTHON=/path/to/python" >&2; exit 1)
	@{ $(PYTHON) -c '$(SUITABLE)'; } 2>/dev/null || { echo "detspec needs Python 3.11 or newer with venv; $(PYTHON) is not" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# uv installs in seconds what takes pip half a minute; where it cannot be had, or does not reach the packages, pip does it.
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
define install
index=$$($(BIN)/python -m pip config get global.index-url 2> /dev/null); \
links=$$($(BIN)/python -m pip config get global.find-links 2> /dev/null); \
{ $(PIP) uv && UV_HTTP_RETRIES=1 $(BIN)/uv pip install --quiet --python $(BIN)/python $${index:+--default-index "$$index"} \
	$${links:+--find-links "$$links"} $(1); } 2> /dev/null || $(PIP) $(1)
endef

$(VENV)/.installed-demo: pyproject.toml | $(BIN)/python
	@echo "installing detspec into $(VENV)"
	@$(call install,--editable .)
	@touch $@

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing detspec and the tools of its developers into $(VENV)"
	@$(call install,--editable '.[dev]')
	@touch $(VENV)/.installed-demo $@

$(VENV)/.installed-parity: $(VENV)/.installed
	@echo "installing torch and transformers"
	@$(call install,--editable '.[parity]')
	@touch $@

$(VENV)/.installed-evals: $(VENV)/.installed
	@echo "installing the lm-evaluation-harness"
	@$(call install,--editable '.[eval]' 'lm_eval[api]')
	@touch $@

$(VENV)/.installed-notebooks: $(VENV)/.installed
	@echo "installing the packages for notebooks"
	@$(call install,--editable '.[notebooks]')
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing the packages for the documentation"
	@$(call install,--editable '.[docs]')
	@touch $@

# With compilers for missing devices installed, every import of jax looks for these devices and prints errors; Tunix asks for
# other versions of packages than the rest does. So both have their own environment, which also sees the packages of .venv, pip
# among them.
$(VENV)/aot/.installed $(VENV)/tunix/.installed: $(VENV)/.installed
	@echo "installing the packages of the extra $(notdir $(@D)) into $(@D)$(if $(findstring aot,$@), (about 500 MB))"
	@$(BIN)/python -m venv --without-pip $(@D)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(notdir $(@D))"], sep="\n")' \
		| $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement /dev/stdin
	@touch $@

$(VENV)/aot-device/.installed: pyproject.toml
	@$(if $(PYTHON_DEVICE),:,echo "the versions of a rented H100 need Python 3.12 or newer, and none was found. Give its path: make test-aot-device PYTHON_DEVICE=/path/to/python" >&2; exit 1)
	@echo "installing the compilers of a rented H100 into $(VENV)/aot-device (about 700 MB)"
	@"$(PYTHON_DEVICE)" -m venv $(VENV)/aot-device
	@$(VENV)/aot-device/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[aot-device]'
	@touch $@
