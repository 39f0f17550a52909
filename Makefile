# Works on a machine with Python 3.10 or newer, its venv module, and nothing else. `make PYTHON=python3.12 ...` picks another one.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

.PHONY: demo test chaos lint format docs clean

demo: $(READY)
	$(BIN)/python examples/train_lm.py --stages 4

test: lint
	$(BIN)/python -m pytest

chaos: $(READY)
	$(BIN)/python -m pytest -m chaos

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:
	rm -rf .venv docs/_build build dist *.egg-info lightning_logs checkpoints

# torch is named exactly and first: an open range may resolve to another build, with gigabytes of CUDA libraries.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is older than Python 3.10: make PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; echo "the venv module of $(PYTHON) is missing (Debian: apt-get install python3-venv)"; exit 1; }
	$(BIN)/python -m pip install --quiet --requirement constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all]'
	@touch $@
