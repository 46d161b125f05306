# SPDX-License-Identifier: 0BSD
# `make help` lists the targets. Virtual environments are made when first needed, and kept.

PYTHON ?= python3
VENV ?= .venv
PIP = -m pip install --quiet --disable-pip-version-check
RUFF = --line-length 120 --target-version py311
FREE_PORT = import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])

.PHONY: help run test replay lint openenv bench clean
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' Makefile

run: $(VENV)/ready ## serve the environment on port 8000, or: make run ARGS="--port 9000"
	@exec $(VENV)/bin/python server.py $(ARGS)

test: $(VENV)/ready ## run the unit tests, then the replay against a server on a free port
	@$(VENV)/bin/python -W ignore::ResourceWarning -m unittest test_server
	@port=$$($(VENV)/bin/python -c '$(FREE_PORT)') || exit 1; \
	$(VENV)/bin/python server.py --port $$port & server=$$!; \
	trap 'kill $$server 2>/dev/null; wait $$server' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; \
	$(VENV)/bin/python replay.py ws://127.0.0.1:$$port/ws --wait 10

replay: $(VENV)/ready ## play the example actions against a running server, or: make replay ARGS="URL LOG"
	@$(VENV)/bin/python replay.py $(ARGS)

lint: .venv-dev/ready ## check style and types of all Python files
	@.venv-dev/bin/ruff check $(RUFF) --extend-select B,I,UP .
	@.venv-dev/bin/ruff format $(RUFF) --check .
	@.venv-dev/bin/mypy --strict server.py replay.py

openenv: $(VENV)/ready .venv-openenv/ready .venv-openenv-old/ready .venv-openenv-mid/ready ## compare with OpenEnv's clients, validator and server
	@SERVER_PYTHON=$(abspath $(VENV))/bin/python .venv-openenv/bin/python compat/test_openenv.py

bench: $(VENV)/ready .venv-bench/ready ## measure against a bare echo and OpenEnv's server, or: make bench ARGS=--quick
	@BENCH_PYTHON=$(abspath $(VENV))/bin/python .venv-bench/bin/python bench/bench.py $(ARGS)

clean: ## remove what the other targets made
	rm -rf .venv .venv-* .mypy_cache .ruff_cache __pycache__ */__pycache__ replay.json

$(VENV)/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo '$(PYTHON) is not Python 3.11 or later; name one that is: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	{ echo 'no virtual environment in $(VENV); for another place: make VENV=/tmp/venv ...' >&2; exit 1; }
	@$(VENV)/bin/python $(PIP) -r requirements.txt || \
	{ echo 'pip could not install $(shell cat requirements.txt): is there a network?' >&2; exit 1; }
	@touch $@

.venv-openenv/ready: compat/requirements.txt
.venv-openenv-old/ready: compat/requirements-old.txt
.venv-openenv-mid/ready: compat/requirements-mid.txt
.venv-bench/ready: bench/requirements.txt
.venv-openenv/ready .venv-openenv-old/ready .venv-openenv-mid/ready .venv-bench/ready:
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP) -r $<
	@touch $@

.venv-dev/ready: Makefile requirements.txt
	@$(PYTHON) -m venv .venv-dev
	@.venv-dev/bin/python $(PIP) -r requirements.txt ruff==0.17.6 mypy==2.4.1 numpy
	@touch $@
