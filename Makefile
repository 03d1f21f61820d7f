# Each target works alone, makes what it needs, and does nothing when there is nothing to do.
PYTHON ?= python3
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help env models demo test lint docs bench soak clean

help:  ## this list
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 16

env: .venv/.stamp  ## the environment, in .venv/ (PYTHON=python3.12 for another interpreter)

models: env  ## the small models, in .models/
	@.venv/bin/python scripts/make_models.py

demo: models  ## streams a trace of a small real model
	@.venv/bin/python -m examples.demo

test: models  ## lint, types, docs and the whole test suite
	@scripts/test

lint: env  ## lint and types only
	@scripts/lint

docs: env  ## the documentation, in site/
	@scripts/docs

bench: models  ## the benchmarks
	@.venv/bin/python -m benchmarks

soak: models  ## random traces compared with the oracle, for MINUTES=10
	@scripts/soak $(or $(MINUTES),10)

clean:  ## removes everything that was made here, the environment and the models included
	rm -rf .venv .models site build dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache

.venv/.stamp: pyproject.toml constraints/cpu.txt scripts/env
	@scripts/env
	@touch $@
