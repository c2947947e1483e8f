# Two commands: `make serve` starts a server, `make test` tests everything; `make help` lists the rest.
# Everything is installed from the locks in requirements/ into $(VENV), and nothing needs root.

PYTHON ?= python3
VENV ?= .venv
# The lock that `make install` takes, and how it installs the package: in place, so that a change of
# the source needs no new install. The Dockerfile sets both.
LOCK ?= serve
PACKAGE ?= --editable .
# The newest JAX has an environment of its own, and may have a Python of its own.
NEWEST_VENV ?= .venv-newest
NEWEST_PYTHON ?= $(PYTHON)
PYTEST_OPTIONS ?=
UV ?= uv

# Options of `make serve`; those left empty have the defaults of `grok1-backend serve --help`.
MODEL ?=
SLOTS ?=
ADDRESS ?=
HTTP_PORT ?=
GRPC_PORT ?=
METRICS_PORT ?=
LOG_LEVEL ?=
option = $(if $($(2)),--$(1) '$($(2))')
SERVE_OPTIONS = $(call option,model,MODEL) $(call option,slots,SLOTS) \
	$(call option,address,ADDRESS) $(call option,http-port,HTTP_PORT) \
	$(call option,grpc-port,GRPC_PORT) $(call option,metrics-port,METRICS_PORT) \
	$(call option,log-level,LOG_LEVEL)

# Options of `make bench`: where benchmarks/peers/install.sh put other engines, rounds to measure.
PEERS ?=
ROUNDS ?=
BENCH_OPTIONS = $(call option,peers,PEERS) $(call option,rounds,ROUNDS)

# A test that hangs is ended and shows where it was.
PYTEST = -m pytest --timeout=600 $(PYTEST_OPTIONS)
# What a newer JAX or NumPy could break; the local tritonserver does not run with them.
NEWEST_TESTS = $(wildcard $(addprefix tests/,checkpoint engine kernels model text training))

.PHONY: help serve install test test-fast test-newest lint bench lock clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

serve: $(VENV)/.installed-serve  ## start a local server (MODEL= SLOTS= HTTP_PORT= GRPC_PORT= ...)
	@exec $(VENV)/bin/grok1-backend serve $(SERVE_OPTIONS)

install: $(VENV)/.installed-$(LOCK)  ## install a lock and the package (LOCK=serve)

test: lint $(VENV)/bin/perf_analyzer $(VENV)/lm_eval/bin/lm_eval  ## lint, types and all tests
	$(VENV)/bin/python $(PYTEST)

test-fast: $(VENV)/.installed-test  ## the tests that need no server and take no long time
	$(VENV)/bin/python $(PYTEST) -m 'not slow and not server'

test-newest:  ## the tests that need no server, on the newest JAX
	@$(MAKE) --no-print-directory install LOCK=newest VENV=$(NEWEST_VENV) PYTHON=$(NEWEST_PYTHON)
	$(NEWEST_VENV)/bin/python $(PYTEST) -m 'not slow and not server' $(NEWEST_TESTS)

lint: $(VENV)/.installed-test  ## lint, format and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/hadolint Dockerfile

bench: $(VENV)/bin/perf_analyzer $(VENV)/.installed-bench  ## measure and write docs/performance.md (PEERS= ROUNDS=)
	JAX_PLATFORMS=cpu $(VENV)/bin/python benchmarks/run.py $(BENCH_OPTIONS); measured=$$?; \
		$(VENV)/bin/python benchmarks/report.py && $(VENV)/bin/python benchmarks/plots.py && \
		exit $$measured

lock:  ## make the locks anew from requirements/*.in (needs uv)
	$(call compile,serve,3.11)
	$(call compile,openai,3.11)
	$(call compile,test,3.11)
	$(call compile,newest,3.11)
	$(call compile,cuda,3.12)
	$(call compile,bench,3.11)
	$(call compile,lm_eval,3.11)
	$(call compile,perf_analyzer,3.11) --no-deps

clean:  ## remove the environments and all caches
	rm -rf $(VENV) $(NEWEST_VENV) build .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf backend_src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

compile = $(UV) pip compile --quiet --universal --python-version $(2) --generate-hashes \
	--no-header --no-emit-index-url requirements/$(1).in --output-file requirements/$(1).txt

$(VENV)/.installed-%: requirements/%.txt pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --require-hashes --requirement $<
	$(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation $(PACKAGE)
	@touch $@

$(VENV)/bin/perf_analyzer: requirements/perf_analyzer.txt tests/tools/install_perf_analyzer.py \
		| $(VENV)/.installed-test
	$(VENV)/bin/python tests/tools/install_perf_analyzer.py

# --no-deps: the lock is complete, and pip does not see that a pin with an extra pins the package.
$(VENV)/lm_eval/bin/lm_eval: requirements/lm_eval.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m venv $(VENV)/lm_eval
	$(VENV)/lm_eval/bin/python -m pip install --quiet --no-deps --require-hashes --requirement $<
	@touch $@

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { \
		echo "There is no $(PYTHON): Python 3.11 or 3.12 is needed, as in PYTHON=python3.12." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1): Python 3.11 or 3.12 is needed," \
		"as in PYTHON=python3.12." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
