# Everything runs in .venv, which is made on first use and again whenever a file that it depends on has changed.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test clean .venv

help: ## show this list
	@echo "make TARGET [PYTHON=python3.12]"
	@sed -n 's/^\([a-z.]*\):[^#]*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

demo: .venv ## train one model on two islands on this machine (a few minutes; results in runs/quickstart)
	@$(BIN)/diloco launch configs/quickstart.yaml

test: .venv ## run the tests
	@$(BIN)/python -m pytest

.venv: .venv/installed ## make or update the virtual environment

# A stamp, not the folder: an installation that was interrupted must not look complete.
.venv/installed: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed, and $(PYTHON) is not that: $$($(PYTHON) --version 2>&1). Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Making .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; }
	@echo "Installing what constraints.txt pins (torch is large: this may take minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@
	@echo "Installed"

clean: ## remove the virtual environment and caches; runs/ stays
	@rm -rf .venv .cache .pytest_cache build dist *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
