# make setup   .venv with everything in it, onepass built        make bench   the main job: check and race the softmax of here
# make test    all tests                                         make lint    ruff, mypy, clang-format
# make sanitize   the C++ that needs no GPU, built with AddressSanitizer and UndefinedBehaviorSanitizer, over random calls
PYTHON ?= python3
TORCH ?= 2.13.0
RESULTS ?= build/bench
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))

BIN := .venv/bin
NATIVE := setup.py pyproject.toml $(shell find src/onepass -name '*.cpp' -o -name '*.h')
CLANG := $(shell find src/onepass -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: setup bench test sanitize lint format clean
setup: .venv/.ready

.venv/.ready: scripts/make_venv.py $(NATIVE)
	$(PYTHON) scripts/make_venv.py --torch $(TORCH)

.venv/.lint: .venv/.ready
	$(PYTHON) scripts/make_venv.py --torch $(TORCH) --lint

bench: setup
	$(BIN)/onepass bench models --quick --json $(RESULTS)/models.json --plot $(RESULTS)

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

sanitize: setup
	$(PYTHON) scripts/sanitize.py
	ONEPASS_SANITIZE=1 $(BIN)/python -m pytest tests/test_sanitize.py

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CLANG)

format: .venv/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CLANG)

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info src/onepass/*.so
