# make run    everything from nothing, then the page at http://127.0.0.1:7860
# make test   everything from nothing, then the tests
# make slow   the tests that take minutes
# make neon   the NEON kernels: cross-compiled, run by qemu-user (Debian: g++-aarch64-linux-gnu qemu-user)
# make peers  Gainz beside other engines on the same weights, each in an environment of its own (PEERS="--only load")
# make interop  auto-gptq and autoawq, in an environment of their own, load what Gainz writes
# make servers  models of other servers against a real one: llama-cpp-python's, in an environment of its own, on the starter's weights
# make venv   only the virtual environment
# Variables: PYTHON=python3.12  ARGS="--port 8000"  TESTS="tests/test_api.py"

SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$p"; break; fi; done)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
TESTS ?=

.PHONY: run test slow neon peers interop servers starter venv venv-dev lint clean
.DEFAULT_GOAL := run

run: venv
	@$(PY) app.py serve $(ARGS)

test: venv-dev starter
	@$(PY) -m pytest -m "not slow" $(TESTS)

slow: venv-dev starter
	@$(PY) -m pytest -m slow $(TESTS)

neon: venv-dev
	@$(PY) -m pytest tests/test_neon.py

PEERS ?=
peers: venv starter
	@$(PY) -m benchmarks.peers --json outputs/peers.json --plot outputs/peers.svg --merge $(PEERS)

# 98 MB, once; without a network the tests that need real weights are skipped, and say so.
starter: venv
	@$(PY) app.py pull starter >/dev/null || echo "The starter model is not there: the tests that need its weights are skipped." >&2

INTEROP := .venv-interop
interop: venv-dev $(INTEROP)/.ready
	@GAINZ_INTEROP_PYTHON=$(CURDIR)/$(INTEROP)/bin/python $(PY) -m pytest tests/test_interop.py

# The two packages come without their dependencies (those of theirs that are needed are in the file) and without CUDA code.
$(INTEROP)/.ready: requirements-interop.txt
	@echo "Installing auto-gptq and autoawq into $(INTEROP) …" >&2
	@"$(PYTHON)" -m venv $(INTEROP)
	@$(INTEROP)/bin/pip --disable-pip-version-check install --quiet -r requirements-interop.txt
	@BUILD_CUDA_EXT=0 $(INTEROP)/bin/pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation auto-gptq==0.7.1
	@$(INTEROP)/bin/pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --no-binary autoawq autoawq==0.2.9
	@touch $@

# The wheels are the project's own for the CPU; where there is none, pip compiles it (minutes, a C++ compiler).
SERVERS := .venv-servers
servers: venv-dev starter $(SERVERS)/.ready
	@GAINZ_LLAMA_PYTHON=$(CURDIR)/$(SERVERS)/bin/python GAINZ_LLAMA_GGUF="$$(ls models/SmolLM2*/*.gguf | head -1)" \
		$(PY) -m pytest tests/test_remote_contract.py

$(SERVERS)/.ready:
	@echo "Installing llama-cpp-python and its server into $(SERVERS) …" >&2
	@"$(PYTHON)" -m venv $(SERVERS)
	@$(SERVERS)/bin/pip --disable-pip-version-check install --quiet "llama-cpp-python[server]==0.3.36"
	@touch $@

lint: venv-dev
	@$(PY) -m ruff check .

venv: $(VENV)/.ready
venv-dev: $(VENV)/.ready-dev

# The stamp keeps a second run cheap; it is written last, so an interrupted install is done again.
$(VENV)/.ready: requirements.txt | $(VENV)/.made
	@echo "Installing what Gainz needs into $(VENV) (a few minutes the first time) …" >&2
	@$(PIP) install --quiet -r requirements.txt || { echo "The packages could not be installed. Online? A proxy? Room on the disk? Then run make again: it goes on from here." >&2; exit 1; }
	@touch $@

$(VENV)/.ready-dev: requirements-dev.txt $(VENV)/.ready
	@echo "Installing what the tests need into $(VENV) …" >&2
	@$(PIP) install --quiet -r requirements-dev.txt || { echo "The test packages could not be installed. Online? A proxy? Then run make again." >&2; exit 1; }
	@touch $@

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "Gainz needs Python 3.11 or newer, and none was found. Install one, or name it: make run PYTHON=/path/to/python3.12" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Gainz needs Python 3.11 or newer; $(PYTHON) is older. Name another: make run PYTHON=/path/to/python3.12" >&2; exit 2; }
	@"$(PYTHON)" -m venv $(VENV) || { echo "The virtual environment could not be made. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	@$(PIP) install --quiet --upgrade pip || { echo "pip could not be brought up to date. Online? A proxy? Then run make again." >&2; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache
