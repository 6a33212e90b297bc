# Every target sets up what it needs: a fresh clone needs Python 3.9 to 3.12, a C++ compiler and nothing else.
PYTHON ?= python3
VENV ?= .venv
PROMPTS ?=
WORKERS ?= 2
READY := $(VENV)/.ready
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench clean

help:
	@echo "make demo     answers of SmolLM2 with plain and with ngram decoding, side by side"
	@echo "make test     the whole test suite; WORKERS=N runs it in N processes (2), each takes about 4 GB"
	@echo "make lint     ruff and mypy"
	@echo "make bench    speed and memory against their targets; PROMPTS=FILE.jsonl takes prompts in Spec-Bench's format"
	@echo "make setup    only the virtual environment in $(VENV)"
	@echo "make clean    removes what was built here (clean-venv: the environment too)"

setup: $(READY)

# The stamp is older than setup.cfg or pyproject.toml when a dependency may have changed: pip then brings it up to date.
$(READY): setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -e '.[test,dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/python scripts/demo.py

test: $(READY)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/typecheck.py

bench: $(READY)
	$(BIN)/python -m benchmarks $(if $(PROMPTS),--prompts $(PROMPTS))

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis bench.jsonl rank_0 kernel_meta output
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print | xargs rm -rf

.PHONY: clean-venv
clean-venv: clean
	rm -rf $(VENV)
