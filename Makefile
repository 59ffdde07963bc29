# `make` or `make help` lists the targets. PYTHON may be set: make test PYTHON=python3.12
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
MODELS ?= .cache/models
OLD    ?= .cache/transformers-5.17
LEAKS  ?= .cache/leaks
STAMP   = $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test slow real old leaks sanitize fuzz browser check bench checkpoint clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[dev]"
	touch $@

demo: $(STAMP)  ## set up, then run `clearhead look hell`
	$(BIN)/clearhead look hell

test: $(STAMP)  ## set up, then run the tests, without the slow ones
	$(BIN)/python -m pytest -m "not slow"

slow: $(STAMP)  ## run the slow tests: ranks, notebooks, pytest inside of pytest
	$(BIN)/python -m pytest -m slow

real: $(STAMP) $(MODELS)/.fetched  ## download three real models (180 MB), then run the tests on them
	HF_HUB_OFFLINE=1 CLEARHEAD_MODELS=$(abspath $(MODELS)) $(BIN)/python -m pytest --override-ini=addopts= tests/real

$(MODELS)/.fetched: $(STAMP) tests/real/fetch.py
	$(BIN)/python tests/real/fetch.py $(MODELS)
	touch $@

old: $(STAMP) $(OLD)/.fetched  ## audit the leaks that transformers 5.17.0 shipped
	HF_HUB_OFFLINE=1 PYTHONPATH=$(abspath $(OLD)) $(BIN)/python -m pytest --override-ini=addopts= -p no:cacheprovider tests/old/audit_5_17.py

$(OLD)/.fetched: $(STAMP)
	mkdir -p $(OLD) && grep -v '^transformers=' constraints.txt > $(OLD)/constraints.txt
	$(BIN)/python -m pip install --quiet --target $(OLD) -c $(OLD)/constraints.txt "transformers==5.17.0"
	touch $@

# A sweep ends with 1 where it finds a fault, and with 3 where a class could not be tested. What was done goes on.
SWEEP = $(BIN)/clearhead audit --library transformers
leaks: $(STAMP) $(OLD)/.fetched  ## audit every class of transformers, of 5.17.0 too, and write docs/leaks.md (an hour)
	PYTHONPATH=$(abspath $(OLD)) $(SWEEP) --out $(LEAKS)/5.17.0 > /dev/null || test $$? -eq 1 -o $$? -eq 3
	$(SWEEP) --out $(LEAKS)/installed --beside $(LEAKS)/5.17.0 || test $$? -eq 1 -o $$? -eq 3
	cp $(LEAKS)/installed/report.md docs/leaks.md

sanitize: $(STAMP)  ## run the kernel's tests under address, undefined-behaviour and thread sanitizers
	PYTHON=$(BIN)/python native/check/sanitize.sh

fuzz: $(STAMP)  ## run 100,000 random problems forward and 20,000 backward
	$(BIN)/python -m tests.fuzz_native 100000
	$(BIN)/python -m tests.fuzz_gradients 20000

browser: tests/view/node_modules/.installed  ## fetch what drives the tests in a browser (node, npm)

tests/view/node_modules/.installed: tests/view/package.json
	cd tests/view && npm install --no-package-lock --no-audit --no-fund --silent
	touch $@

check: $(STAMP)  ## format, lint and types
	find native -name '*.cpp' -o -name '*.h' -o -name '*.inl' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/basedpyright
	test ! -d tests/view/node_modules || tests/view/node_modules/.bin/tsc -p tests/view

# onnxruntime is an optional peer: where it cannot be installed, its columns report that.
bench: $(STAMP)  ## measure this machine beside torch and onnxruntime (a table on the terminal)
	-$(BIN)/python -m pip install --quiet -c constraints.txt onnx onnxruntime
	$(BIN)/python benchmarks/run.py

checkpoint: $(STAMP)  ## retrain the shipped GPT from its seed
	$(BIN)/python -m clearhead.models.train

clean:  ## remove what the targets created, except the downloaded models
	rm -rf build dist $(VENV) .pytest_cache .ruff_cache .hypothesis
