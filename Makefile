# Every target sets up what it needs: `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Some images forbid Python its caches: each test worker would rewrite every assertion anew, and each process that a test
# starts would compile what it imports.
export PYTHONDONTWRITEBYTECODE :=

# Timeouts are the runner's, one-row tables and counts of members need no bigint, and migrations run in a transaction
# before the server serves.
SQUAWK_EXCLUDED := require-timeout-settings,prefer-bigint-over-int,prefer-robust-stmts,require-concurrent-index-creation

FAST := $(wildcard $(addprefix tests/,commands core wire agent/machine test_style.py test_documentation.py))

.DEFAULT_GOAL := help
.PHONY: help venv demo serve test test-fast check lint types contracts soak coldfront coldfront-nerc bench proto schema lock clean

help:  ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

venv: $(STAMP)  ## Create .venv with everything, from hash-pinned requirements

$(STAMP): requirements/bootstrap.txt requirements/dev.txt pyproject.toml scripts/venv.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) sh scripts/venv.sh
	@touch $@

demo: venv  ## Start Bursar on its embedded PostgreSQL and watch it work (ends by itself)
	@$(BIN)/python scripts/demo.py

serve: venv  ## Start Bursar and stay up; prints the URL, an admin token and what to do next (TLS=1: HTTPS)
	@$(BIN)/bursar serve --data .data --grpc 127.0.0.1:8081 --grpc-admin 127.0.0.1:8082 --admin-token-file .data/admin-token --show-token $(if $(TLS),--tls auto)

test: venv  ## Run all tests
	@sh scripts/test-tools.sh
	@$(BIN)/python -m compileall -q src
	@$(BIN)/pytest -n 5 --dist worksteal --share --durations 50 tests

test-fast: venv  ## Run the tests of rules, types and documents that need no server, without property tests
	@$(BIN)/pytest -n 2 --dist worksteal --fast $(FAST)

check: lint types contracts test  ## What CI does: lint, types, import contracts, tests

lint: venv
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/buf lint
	@$(BIN)/squawk --pg-version 15.0 --assume-in-transaction --exclude $(SQUAWK_EXCLUDED) src/bursar/store/sql/migrations/*.sql

types: venv
	@$(BIN)/mypy

contracts: venv
	@$(BIN)/lint-imports --no-cache | tail -n 20

soak: venv  ## The long races and fault tests
	@BURSAR_SOAK=1 $(BIN)/pytest -n 2 --dist worksteal --timeout 1800 -o faulthandler_timeout=3600 tests/ops/quota/test_quota_machine.py tests/ops/quota/test_quota_races.py tests/ops/approval/test_approval_machine.py tests/ops/credit/test_ledger_machine.py tests/ops/credit/test_ledger_faults.py tests/api/http/test_schema.py tests/api/http/test_mutation_fuzz.py tests/loops/test_informer.py tests/loops/test_scheduler_races.py tests/process/test_scheduling.py tests/process/test_agent_outages.py tests/process/test_credit_faults.py tests/process/test_waldur_serve.py tests/store/usage/test_usage_machine.py tests/ops/nodes/test_claims_machine.py

coldfront: venv  ## The tests of ColdFront's plugin, on a real ColdFront in a virtual environment of its own
	@$(PYTHON) -m venv .coldfront/venv
	@VIRTUAL_ENV=$(CURDIR)/.coldfront/venv $(BIN)/uv pip sync --quiet --require-hashes requirements/coldfront.txt
	@VIRTUAL_ENV=$(CURDIR)/.coldfront/venv $(BIN)/uv pip install --quiet --no-deps --editable . --editable coldfront
	@BURSAR_BIN=$(BIN)/bursar .coldfront/venv/bin/pytest -q -c /dev/null --rootdir coldfront -p no:cacheprovider coldfront/tests

coldfront-nerc: venv  ## The OpenShift tests of nerc's ColdFront plugin (COLDFRONT_PLUGIN_CLOUD=checkout, PYTHON=3.11 to 3.13)
	@PYTHON=$(PYTHON) VENV=$(VENV) sh scripts/coldfront_nerc.sh

bench: venv  ## All benchmarks, briefly
	@$(BIN)/bursar bench api --seconds 5 --json
	@$(BIN)/bursar bench schedule --nodes 1000 --allocations 4000 --singles 50 --json
	@$(BIN)/bursar bench agents --agents 500 --heartbeat 1 --seconds 5 --secure 50 --binds 50 --json
	@$(BIN)/bursar bench leases --jobs 2000 --seconds 3 --json
	@$(BIN)/bursar bench usage --records 200000 --reports 20 --json

proto: venv  ## Make the Python of proto/ anew
	@sh scripts/proto.sh

schema: venv  ## Write docs/schema.sql anew from the migrations
	@$(BIN)/python scripts/schema.py

lock: venv  ## Pin the dependencies anew
	@sh scripts/lock.sh

clean:  ## Remove what make created
	rm -rf $(VENV) .data .pytest_cache .mypy_cache .ruff_cache .hypothesis
