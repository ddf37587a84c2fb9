# `make demo` and `make test` set up all that they need: Python 3.10+, pip and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test suite sameness lint fix types check conformance bench soak build setup clean help
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

setup: $(READY) ## make .venv with the pinned versions of constraints.txt

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and "samestep needs Python 3.10 or newer; %s is %d.%d. Name another one: make PYTHON=python3.12 ..." % (sys.executable, v[0], v[1]))'
	@echo "Setting up $(VENV) (once; torch is a large download) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

demo: $(READY) ## train the digits classifier on 2 processes, checkpoint, load, evaluate
	@$(BIN)/samestep run --nproc 2 examples/digits.py

test: $(READY) ## run the tests (CPU only, some minutes)
	@$(BIN)/python -m pytest --ignore=tests/conformance/test_ddp_suite.py

suite: $(READY) ## torch's own DDP tests with our class on 2 ranks (a minute or two)
	@$(BIN)/python -m pytest tests/conformance/test_ddp_suite.py

sameness: $(READY) ## train on 1, 2, 3 and 4 processes and compare every bit; prints a table (some minutes)
	@$(BIN)/python -W ignore -m tests.sameness

lint: $(READY) ## check style, formatting and the layering of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo

fix: $(READY) ## mend style and formatting
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(READY) ## type-check src/ in strict mode
	@$(BIN)/mypy

check: lint types test suite ## lint, types and tests: what CI runs

conformance: $(READY) ## the same with torch's class too, on 2 and 3 ranks; writes docs/conformance.md (5 min)
	@$(BIN)/python -m tests.conformance.ddp_suite --write-docs

bench: $(READY) ## time steps, collectives, start, sampler, allocator; writes docs/benchmarks.md (20 min, idle machine)
	@$(BIN)/samestep run --nproc 2 benchmarks/step.py --shm --page docs/benchmarks.md
	@$(BIN)/samestep run --nproc 2 benchmarks/sameness.py --page docs/benchmarks.md
	@$(BIN)/samestep run --nproc 1 benchmarks/sameness.py --page docs/benchmarks.md
	@$(BIN)/python benchmarks/collectives.py --page docs/benchmarks.md
	@$(BIN)/python benchmarks/collectives.py --ranks 4 --page docs/benchmarks.md
	@$(BIN)/python benchmarks/start.py --page docs/benchmarks.md
	@$(BIN)/python benchmarks/sampler.py --page docs/benchmarks.md
	@$(BIN)/python benchmarks/allocator.py --page docs/benchmarks.md

soak: $(READY) ## a million collectives over shm checked against Gloo, and 200 killed runs (hours)
	@$(BIN)/python -W ignore benchmarks/soak.py

build: $(READY) ## build the sdist and the wheel into dist/
	@$(BIN)/python -m build

clean: ## remove what the targets made
	rm -rf $(VENV) dist build runs ckpt.pt .pytest_cache .mypy_cache .ruff_cache .hypothesis
