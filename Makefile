# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

PADDLE := .venv-paddle/bin/python

DOCS := .venv-docs

.PHONY: setup docs train test test-fast test-all mutation oracle fuzz lint types clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -m compileall -q -j 0 polyreme # else the first run spends two seconds on bytecode before it begins
	touch $(STAMP)

# compiled for a run of a minute: a quarter sooner, and steps of this size are as fast
train: setup
	XLA_FLAGS="--xla_backend_optimization_level=1 $$XLA_FLAGS" CPU_NUM=16 $(BIN)/polyreme pretrain configs/first_run.yaml

# builds the site into build/docs/html: every snippet is run, every warning is an error, every link is checked
docs: $(DOCS)/.installed
	$(DOCS)/bin/python -m sphinx -W --keep-going -b html docs build/docs/html
	@echo "open build/docs/html/index.html"

$(DOCS)/.installed: pyproject.toml
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --editable ".[docs,logs,vision,text,convert,data,serve,eval]"
	touch $(DOCS)/.installed

# two workers, each with half of the files, that take from each other at the end: neighbours share compiled programs.
# The modules that one process has compiled are written down for its children: beginning takes them a third as long
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 2 --dist worksteal

test: setup
	$(PYTEST) -m "not slow and not oracle"

# the inner loop: what compiles little and starts no process
test-fast: setup
	$(PYTEST) -m "unit and not slow and not oracle"

# compiled as users have it, which takes twice as long
test-all: setup
	XLA_FLAGS="--xla_cpu_collective_call_terminate_timeout_seconds=280" $(PYTEST) -m "not oracle"

# breaks twelve ops one at a time and shows that their tests fail
mutation: setup
	$(BIN)/python tools/mutate_ops.py

# compares every function with PaddlePaddle 3.3.1 and writes docs/oracle_report.md; about half an hour
oracle: setup
	test -x $(PADDLE) || $(PYTHON) -m venv .venv-paddle
	$(PADDLE) -m pip install --quiet paddlepaddle==3.3.1 numpy==2.2.6
	POLYREME_TEST_PADDLE_PYTHON=$(abspath $(PADDLE)) $(BIN)/python -m pytest -m oracle tests/oracle

# calls drawn at random, eager against captured and Programs: make fuzz FUZZ="--seconds 60 --seed 7"
fuzz: setup
	$(BIN)/python -m tests.oracle.fuzz $(FUZZ)

lint: setup
	$(BIN)/ruff check polyreme tests benchmarks
	$(BIN)/ruff format --check polyreme tests benchmarks

# what editors know of the public names: at least 95% of them
types: setup
	$(BIN)/python -m tools.check_types

clean:
	rm -rf $(VENV) .venv-paddle $(DOCS) build runs
