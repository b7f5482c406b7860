# Every target works from a fresh clone: it makes .venv first, if that is not up to date.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: demo test lint lock clean setup

demo: setup  ## Train SmolLM2-135M on arithmetic, on this machine
	@$(BIN)/rlflow train recipe=grpo_arithmetic

test: setup  ## Lint, then the whole test suite
	@$(BIN)/ruff check .
	@$(BIN)/python -m pytest

lint: setup  ## Lint, types, spelling
	@$(BIN)/ruff check .
	@$(BIN)/pyright
	@$(BIN)/codespell

lock: setup  ## Resolve requirements/*.lock anew
	@scripts/lock.sh

setup:
	@command -v $(PYTHON) >/dev/null || { echo "setup: error: $(PYTHON) was not found; install Python 3.11, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) scripts/setup.py

clean:  ## Remove everything that can be made again; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
