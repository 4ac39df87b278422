# Every target that needs the virtual environment makes it first.
#
#   make demo     a walking robot within minutes: see demo/report.html afterwards
#   make test     all tests
#   make check    format, lint and types
#   make setup    the virtual environment alone
#   make clean    removes the virtual environment and what tools left behind; runs/ and demo/ stay
#
# PYTHON=python3.12 chooses another interpreter, TORCH_INDEX=URL a package index with CPU builds of torch.

PYTHON ?= python3.11
VENV ?= .venv
TORCH ?= 2.13.0
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Small networks and many processes: more threads in each cost more than they bring.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test check clean

help:
	@sed -n '/^# /s/^# *//p' Makefile

setup: $(READY)

$(READY): setup.py setup.cfg pyproject.toml scripts/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH) bash scripts/setup.sh
	@touch $@

demo: $(READY)
	$(BIN)/tarsus demo

test: $(READY)
	$(BIN)/python -m pytest -n 2

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
