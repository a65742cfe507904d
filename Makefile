# `make demo` and `make test` set everything up by themselves; see docs/how-to/develop.md.
.DEFAULT_GOAL := help
.PHONY: help demo test check setup docs lint test-gpu format typecheck exports contracts unit coverage bench mutants docs-test session page testbed-packages testbeds-down clean

BIN := .venv/bin
INSTALLED := .venv/.orc-installed-all
FOR_DEMO := .venv/.orc-installed-demo
ROOMS := runtime launchers orchestrator templates
LINKS := $(ROOMS:%=.types/orc/%)
DEMO_STATE := .orc-demo
SLURM_TESTBED := tests/testbed/slurm
HOSTS_TESTBED := tests/testbed/hosts
# For example: make test PYTEST_FLAGS="-k bundle -x"
PYTEST_FLAGS ?=
# For example: make check CHECK_FROM=HEAD~1
CHECK_FROM ?= main
# For example: make bench BENCH="data collectives"
BENCH ?=
# For example: make mutants MUTANTS="ledger data"
MUTANTS ?=

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/:.*  ## /\t/' | expand -t 16

demo: $(FOR_DEMO)  ## Train on two local processes with `orc submit --follow`
	ORC_STATE_DIR=$(CURDIR)/$(DEMO_STATE) $(BIN)/orc submit --follow templates/starters/digits/job.yaml
	@echo 'next: . $(BIN)/activate, then: orc init'

test: lint typecheck contracts unit  ## Everything: lint, types, import contracts, tests

check: lint contracts $(LINKS)  ## Lint, contracts, types, and the tests near what differs from main: two minutes
	MYPYPATH=.types $(BIN)/python .ci/near.py $(CHECK_FROM)

setup: $(INSTALLED)  ## Make .venv with everything in it

# Stamped by the files that decide what is installed, so that a second run starts at once. What the demo needs is a tenth of
# what the tests need.
.venv/.orc-installed-%: pyproject.toml .ci/constraints.txt .ci/setup.sh
	@.ci/setup.sh $*

lint: $(INSTALLED)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)  ## ruff: repair what can be repaired
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Import names differ from folder names (orc.runtime is runtime/), so mypy and editors get a tree of links.
$(LINKS): .types/orc/%:
	@mkdir -p .types/orc
	@ln -sfn ../../$* $@

typecheck: $(INSTALLED) $(LINKS)  ## mypy --strict on everything that is imported
	MYPYPATH=.types $(BIN)/mypy -p orc.runtime -p orc.launchers -p orc.orchestrator
	MYPYPATH=.types $(BIN)/mypy tests/runtime/typed_program.py  # what users import is typed, too

exports: $(INSTALLED)  ## runtime/__init__.pyi from the table of public names in runtime/__init__.py
	$(BIN)/python .ci/exports.py > runtime/__init__.pyi.new && mv runtime/__init__.pyi.new runtime/__init__.pyi

contracts: $(INSTALLED)  ## import-linter: which room may import which
	$(BIN)/lint-imports --no-logo

# Slurm, MariaDB, PostgreSQL, Chromium, kubectl, Open MPI, sshd … come from apt; without root the tests that need them are skipped and say so.
testbed-packages:
	@if [ "$$(id -u)" = 0 ]; then $(SLURM_TESTBED)/up.sh --install-only && $(HOSTS_TESTBED)/up.sh --install-only && \
	  tests/testbed/postgres/install.sh && tests/testbed/chromium/install.sh && tests/testbed/kubernetes/install.sh; fi

# Installs nothing: needs torch and pytest, and the checkout. GPU_PYTHON says which Python has them.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
test-gpu: $(LINKS)  ## The tests that need a GPU (tests/gpu); says so and succeeds where there is none
	@PYTHON=$(GPU_PYTHON) tests/gpu/run.sh $(PYTEST_FLAGS)

unit: $(INSTALLED) $(LINKS) testbed-packages  ## The tests alone
	tests/run.sh $(PYTEST_FLAGS)

coverage: export COVERAGE = 1
coverage: unit  ## The tests, and which lines they run

# `make test` ends what it has started, also after Ctrl-C; this is for what a SIGKILL or pytest by hand has left.
testbeds-down:  ## End the Slurm cluster and the SSH hosts of the tests, and remove their files
	$(SLURM_TESTBED)/down.sh --purge
	$(HOSTS_TESTBED)/down.sh
	HOSTS_TESTBED_DIR="$${HOSTS_TESTBED_DIR:-/tmp/hosts-testbed}-e2e" $(HOSTS_TESTBED)/down.sh

bench: $(INSTALLED)  ## Benchmarks: one table against peers and budgets (minutes; on a quiet machine)
	$(BIN)/python tests/benchmarks/harness.py $(BENCH)

mutants: $(INSTALLED)  ## Which changes of the code the tests do not notice (mutmut; hours), MUTANTS="ledger data"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c .ci/constraints.txt -e '.[mutants]'
	$(BIN)/python tests/mutants/run.py $(MUTANTS)

docs: $(INSTALLED) $(LINKS)  ## The documentation as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

session: $(INSTALLED)  ## The picture of a session in the README, from real commands
	$(BIN)/python .ci/session.py

page: $(INSTALLED)  ## The pictures of the web page in the documentation, from real trainings (needs Chromium)
	$(BIN)/python .ci/page.py

docs-test: $(INSTALLED)  ## Links and examples of the documentation
	$(BIN)/python -m pytest tests/test_docs.py tests/test_docs_site.py $(PYTEST_FLAGS)

clean:  ## Remove everything that make made
	rm -rf .venv .types .mutants build dist *.egg-info $(DEMO_STATE) .coverage .coverage.* htmlcov \
	  .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
