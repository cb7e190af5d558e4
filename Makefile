# macfabric: every target sets up what it needs; Python 3.11-3.13 and make are enough.
# Written for GNU Make 3.81, which is what macOS ships.

SHELL  := /bin/sh
VENV   := .venv
PYTHON ?=
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TESTS  ?= tests
ARGS   ?=
PART   ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all nightly fuzz mac-check bench-smoke reference vendored lint clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(READY)  ## make .venv with the pinned versions (PYTHON=/path/to/python3.12 chooses one)

demo: $(READY)  ## show the product: agents that remember, on a local fabric of three nodes
	@$(BIN)/macfabric demo $(ARGS)

# tests/conftest.py orders the files. Compiled files are kept, even if the environment disables that:
# the tests start many processes, which would otherwise compile the same files again and again.
# Three processes for each of two cores: a test waits for half of its time.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 6 --dist loadfile --no-loadscope-reorder

test: $(READY)  ## run what a change needs: minutes (TESTS=tests/node ARGS="-k name" narrow it)
	@$(PYTEST) $(TESTS) $(ARGS)

test-all: $(READY)  ## run every test: hours (10,000 simulated lives, every kill, emulated Macs)
	@$(PYTEST) -m "" $(TESTS) $(ARGS)

# Parts with one file are distributed test by test; otherwise one process would run all of them.
SPREAD = $(if $(filter lives-% routers-% fuzz templates,$(PART)),--dist worksteal)
# Real clusters starve each other on two cores: one at a time.
SPREAD += $(if $(filter cluster chaos fleet,$(PART)),-n 1)

nightly: $(READY)  ## run one part of the nightly tests, up to an hour (PART=lives-1); without: list
	@if [ -n "$(PART)" ]; then $(PYTEST) $(SPREAD) -m nightly --part $(PART) $(TESTS) $(ARGS); \
	else $(BIN)/python -m tests.nightly_parts; fi

fuzz: $(READY)  ## a million hostile inputs for every parser: minutes (ARGS="-k manifest" narrows)
	@$(BIN)/python -m pytest tests/fuzz -q -s -m nightly $(ARGS)

mac-check: $(READY)  ## run every check for one Mac, as a table for an issue: ten minutes (ARGS=--quick)
	@$(BIN)/python -m benchmarks.mac_check $(ARGS)

bench-smoke: $(READY)  ## run every benchmark for seconds; list figures worse than committed: minutes
	@$(BIN)/python -m benchmarks.smoke $(ARGS)

reference: $(READY)  ## write docs/commands.md from the commands' own descriptions
	@$(BIN)/python -m tests.support.command_page

vendored: $(READY)  ## fetch the libraries of the dashboard and its tests again, at pinned versions; needs npm
	@$(BIN)/python -m tests.support.vendored

lint: $(READY)  ## ruff, mypy and the import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

clean:  ## remove caches and build output; the virtual environment stays
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find fabric node router tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} + \
		2>/dev/null || true

# Compiled files stay in the virtual environment, in a folder of their own: `ray up` hashes everything
# beside the sources, and would mistake newly compiled files for changed code. That folder is
# filled here, once; otherwise every process of a first start would compile the same modules.
# Runs again only when the requirements change. A virtual environment whose Python is missing
# or unsuitable (as after a Homebrew upgrade) is recreated.
SUITABLE := import platform, sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14) \
	or platform.system() == "Darwin" and platform.machine() != "arm64")

$(READY): pyproject.toml constraints.txt
	@set -e; \
	unset VIRTUAL_ENV CONDA_PREFIX PYTHONHOME PYTHONPATH; \
	python=""; \
	for candidate in $(PYTHON) $(if $(PYTHON),,python3 python3.13 python3.12 python3.11); do \
		if "$$candidate" -c '$(SUITABLE)' >/dev/null 2>&1; then python="$$candidate"; break; fi; \
	done; \
	uv=""; if uv --version >/dev/null 2>&1; then uv=uv; fi; \
	if [ -z "$$python" ] && { [ -z "$$uv" ] || [ -n "$(PYTHON)" ]; }; then \
		echo "macfabric needs Python 3.11, 3.12 or 3.13 (on a Mac: built for Apple Silicon);" >&2; \
		echo "none found as $(or $(PYTHON),python3 or python3.11 to python3.13)." >&2; \
		echo "On a Mac: brew install python@3.12, or install uv." >&2; \
		echo "It lies elsewhere? make setup PYTHON=/path/to/python3.12" >&2; \
		exit 1; \
	fi; \
	if ! $(BIN)/python -c '$(SUITABLE)' >/dev/null 2>&1; then \
		echo "setup: making $(VENV) with $${uv:-venv} and $${python:-a Python fetched by uv}"; \
		if [ -f $(VENV)/pyvenv.cfg ]; then rm -rf $(VENV); fi; \
		if [ -n "$$uv" ]; then uv venv --quiet --python "$${python:-3.12}" $(VENV); \
		else "$$python" -m venv $(VENV) || { \
			echo "$$python makes no virtual environment (on Debian: apt install python3-venv)" >&2; \
			exit 1; }; \
		fi; \
	fi; \
	echo "setup: installing the versions of constraints.txt (several minutes on a fresh machine)"; \
	quiet=--quiet; if [ -t 1 ]; then quiet=""; fi; \
	if [ -n "$$uv" ]; then \
		uv pip install $$quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'; \
	else \
		$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null; \
		$(BIN)/python -m pip install $$quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'; \
	fi; \
	purelib=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo 'import sys; sys.pycache_prefix = sys.pycache_prefix or sys.prefix + "/compiled"' \
		> "$$purelib/compiled.pth"; \
	echo "setup: compiling"; \
	$(BIN)/python -m compileall -qq -j 0 -x '/test_' "$$purelib" fabric node router benchmarks tests || true; \
	touch $(READY)
