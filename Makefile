# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

PADDLE := .venv-paddle/bin/python

.PHONY: setup train test test-all oracle lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(STAMP)

train: setup
	CPU_NUM=16 $(BIN)/polyreme pretrain configs/gpt_kjv.yaml

test: setup
	$(BIN)/python -m pytest -n 2 -m "not slow and not oracle"

test-all: setup
	$(BIN)/python -m pytest -n 2 -m "not oracle"

# compares every function with PaddlePaddle 3.3.1 and writes docs/oracle_report.md; about half an hour
oracle: setup
	test -x $(PADDLE) || $(PYTHON) -m venv .venv-paddle
	$(PADDLE) -m pip install --quiet paddlepaddle==3.3.1 numpy==2.2.6
	POLYREME_TEST_PADDLE_PYTHON=$(abspath $(PADDLE)) $(BIN)/python -m pytest -m oracle tests/oracle

lint: setup
	$(BIN)/ruff check polyreme tests benchmarks
	$(BIN)/ruff format --check polyreme tests benchmarks
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) .venv-paddle runs
