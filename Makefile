# Every target works from a fresh clone: it makes .venv first, if that is not up to date.
PYTHON ?= python3.11
BIN := .venv/bin
DIST ?= dist

.PHONY: demo test proof lint docs package lock clean setup

demo: setup  ## Train SmolLM2-135M on arithmetic, on this machine
	@$(BIN)/rlflow train recipe=grpo_arithmetic

test: setup  ## Lint, then the test suite
	@$(BIN)/ruff check .
	@$(BIN)/python -m pytest --durations=25

proof: setup  ## What takes longer and grows: chaos, and every layout and model family
	@$(BIN)/python -m pytest -m proof --durations=25

lint: setup  ## Lint, format, spelling, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell
	@$(BIN)/pyright

docs: setup  ## The documents as a site, in build/site/html
	@$(BIN)/python scripts/site.py

package: setup  ## Build the wheel and the source distribution into DIST
	@$(BIN)/python scripts/package.py $(DIST)

lock: setup  ## Resolve requirements/*.lock anew
	@scripts/lock.sh

setup:
	@command -v $(PYTHON) >/dev/null || { echo "setup: error: $(PYTHON) was not found; install Python 3.11, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) scripts/setup.py

clean:  ## Remove everything that can be made again; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
