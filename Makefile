# The front door. `make demo` and `make test` work from a fresh clone and do their own set-up:
# an active environment that has torch is used (its torch is never replaced), else .venv is made.
#
# PYTHON=...           interpreter for a new .venv (default: the first of python3.11, 3.12, ... found)
# TORCH_INDEX_URL=...  index that torch is installed from, for instance PyTorch's CPU wheel index
# PYTEST_JOBS=2        test processes     PYTEST_ARGS=...  more arguments for pytest
# DEMO_ARGS=..., ESTIMATE_ARGS=..., BENCH_ARGS=...  arguments of the demo, the estimate, the benchmarks

.DEFAULT_GOAL := help
.PHONY: help demo estimate test test-full test-models test-tpu-compile bench lint format build clean ready-run ready-dev

export TORCH_INDEX_URL PYTHON
PYTEST_JOBS ?= 2
IN_ENV = "$$(cat build/env/python)"
CLANG_FORMAT = "$$(dirname $(IN_ENV))/clang-format"
CXX_FILES = $(shell find csrc -name '*.cpp' -o -name '*.h')
# What is run again in the other eager modes.
MODE_TESTS = tests/device tests/core tests/bounded tests/modules tests/regressions \
	tests/opinfo/test_ops.py
PYTEST = $(IN_ENV) -m pytest -n $(PYTEST_JOBS) $(PYTEST_ARGS)

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ready-run  ## train a small GPT on Python's own sources, on device tpu (3 minutes)
	@$(IN_ENV) examples/char_gpt.py $(DEMO_ARGS)

estimate: ready-run  ## what the TPU compiler says of a GPT-2 training step, without a TPU (3 minutes)
	@$(IN_ENV) -c "import libtpu" 2>/dev/null || $(IN_ENV) -m pip install -q libtpu==0.0.52
	@$(IN_ENV) -m torch_tpu estimate examples/models/mingpt.py:train --target v6e-1 $(ESTIMATE_ARGS)

test: lint  ## formatters, type checks and the test suite
	@$(PYTEST)
	@TORCH_TPU_TEST_MODE=fused $(PYTEST) $(MODE_TESTS)
	@TORCH_TPU_TEST_MODE=debug $(PYTEST) tests/device tests/core

test-full: lint  ## the test suite with the long sweeps
	@$(PYTEST) -m ""
	@TORCH_TPU_TEST_MODE=fused TORCH_TPU_TEST_SHARE=1 $(PYTEST) $(MODE_TESTS)
	@TORCH_TPU_TEST_MODE=debug TORCH_TPU_TEST_SHARE=1 $(PYTEST) $(MODE_TESTS)

test-tpu-compile: ready-dev  ## only what the TPU compiler (libtpu, no chip needed) is asked
	@$(PYTEST) -m tpu_compile

test-models: ready-dev  ## every model type of Transformers, forward and backward (an hour)
	@$(IN_ENV) -m tests.integrations.transformers.sweep $(MODELS_ARGS)

bench: ready-run  ## figures beside torch CPU, as ratios
	@$(IN_ENV) benchmarks/run.py $(BENCH_ARGS)

lint: ready-dev  ## ruff, clang-format and mypy; changes nothing
	@$(IN_ENV) -m ruff check .
	@$(IN_ENV) -m ruff format --check .
	@$(CLANG_FORMAT) --dry-run -Werror $(CXX_FILES)
	@$(IN_ENV) -m mypy

format: ready-dev  ## rewrite the sources as lint wants them
	@$(IN_ENV) -m ruff check --fix .
	@$(IN_ENV) -m ruff format .
	@$(CLANG_FORMAT) -i $(CXX_FILES)

build: ready-run  ## environment and native core

clean:  ## remove what was built; .venv stays
	rm -rf build dist torch_tpu.egg-info torch_tpu/_C*.so torch_tpu/_build_info.json
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

ready-run:
	@sh scripts/setup_env.sh run

ready-dev:
	@sh scripts/setup_env.sh dev
