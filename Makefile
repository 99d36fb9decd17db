# `make train` and `make test` work from a fresh clone with Python 3.11 or newer and nothing else.
PYTHON ?= python3
BIN := .venv/bin
# Processes that run tests, each with a pool of ranks of its own; 0: none beside pytest itself. One more than two cores,
# since many tests wait: for processes to start and to end, or for stages that sleep.
TEST_WORKERS ?= 3

.PHONY: help install train test parity lint format checks clean

help:
	@echo "make train    install, prepare the data, train the main job on eight local ranks"
	@echo "make test     install, run the tests"
	@echo "make parity   compare every layout of eight ranks with one process (slow)"
	@echo "make lint     ruff (lint, format) and pyright"
	@echo "make checks   lint and test: what a change must pass"
	@echo "make format   let ruff format and fix"
	@echo "make clean    remove .venv and caches; runs/ stays"

# Installed again only where pyproject.toml is newer.
.venv/train.stamp: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv: a minute or a few, about 1.5 GB"
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/dev.stamp: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv: a minute or a few, about 1.5 GB"
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ .venv/train.stamp

install: .venv/train.stamp

train: .venv/train.stamp
	$(BIN)/counterflow train $(ARGS)

test: .venv/dev.stamp
	$(BIN)/python -m pytest -m "not slow" -n $(TEST_WORKERS) --dist worksteal $(ARGS)

parity: .venv/train.stamp
	$(BIN)/python -m counterflow.launch.parity_grid $(ARGS)

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: .venv/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

checks: lint test

clean:
	rm -rf .venv *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
