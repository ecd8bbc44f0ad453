# Two commands do everything on a fresh machine:
#   make run    set up and decode a long context on a real model
#   make test   set up and run the tests
# Needs Python 3.11+, a C++17 compiler and `make`; all else is installed into $(VENV).

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= models,remote,sweep,dev
ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE_SOURCES := $(shell find custom_calls ffi cmake -type f 2>/dev/null)

.PHONY: setup run test check clean

setup: $(STAMP)

$(STAMP): pyproject.toml CMakeLists.txt $(NATIVE_SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[$(EXTRAS)]'
	@touch $@

run: setup
	$(BIN)/blockcompact run $(ARGS)

test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	git ls-files '*.h' '*.cc' '*.cu' '*.inc' | xargs $(BIN)/clang-format --dry-run --Werror

clean:
	rm -rf $(VENV) build
