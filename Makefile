# Everything happens in a virtual environment of this checkout, .venv, which the first target that needs it makes.
# PYTHON says which interpreter to make it with: make PYTHON=python3.12 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
NAME ?= hourly_closing

.DEFAULT_GOAL := help
.PHONY: help venv demo example test test-rest test-all check docs format bench mutations clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 19

venv: $(READY) ## make .venv and install sublet into it, with all it takes to work on it

demo: $(READY) ## see groups share work, move it and lose nothing, on a Postgres and a Spark of their own
	$(BIN)/sublet demo $(ARGS)

example: $(READY) ## run a program of examples/ (NAME says which: make example NAME=hourly_closing)
	$(BIN)/python -m examples.$(NAME) $(ARGS)

# Tests start hundreds of processes: without bytecode on the disk each of them would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Some tests wait more than they compute: four at a time keep two cores busy. The long ones have a Spark each, which
# fails if a Python worker of its does not start within ten seconds. With loadfile, xdist never ends once it has
# replaced a worker that crashed: the crash fails the run, and the other workers finish it.
PYTEST := $(BIN)/pytest --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 10

test: $(READY) ## run tests of every kind, what a change waits for (ARGS are pytest's: make test ARGS="-k embedded -x -n0")
	$(PYTEST) -n 4 -m "not long" $(ARGS)

test-rest: $(READY) ## run the tests that `make test` leaves out: all kills, long runs, other seeds, demo, tutorial, examples
	$(PYTEST) -n 2 -m long $(ARGS)

test-all: $(READY) ## run all tests
	$(PYTEST) -n 2 $(ARGS)

check: $(READY) ## ruff, mypy --strict, the import contracts, the generated pages, and every link of the site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.settings_doc --check
	$(BIN)/python -m tools.cli_doc --check
	$(BIN)/python -m tools.metrics_doc --check
	$(BIN)/python -m tools.limits_doc --check
	$(BIN)/python -m tools.protocol_doc --check
	$(BIN)/python -m tools.scenarios_doc --check
	$(BIN)/python -m tools.conformance --check
	$(MKDOCS) build --strict

docs: $(READY) ## make the site of the pages below docs/, in build/site
	$(MKDOCS) build --strict

format: $(READY) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## measure, as ratios against raw limits, and write the results below bench/results
	$(BIN)/python -m bench $(ARGS)

mutations: $(READY) ## plant faults one by one, listed and drawn ones, and show which test turns red
	$(BIN)/python -m tools.mutations $(ARGS)

clean: ## remove what the targets made: .venv, caches, builds (not .sublet, which holds data)
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist spark-warehouse
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no $(PYTHON). Install Python 3.11 or later, or say which one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$$($(PYTHON) --version) is too old: 3.11 or later is needed. Say which one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  v=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	  echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install $$v" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@
