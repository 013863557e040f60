# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup train test test-all lint clean

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

lint: setup
	$(BIN)/ruff check polyreme tests benchmarks
	$(BIN)/ruff format --check polyreme tests benchmarks
	$(BIN)/pyright

clean:
	rm -rf $(VENV) runs
