# make setup    .venv with everything in it, and onepass built for this machine (5 minutes)
# make bench    set up, then check and time onepass against torch (1 minute)
# make smoke    set up, then the tests that are quick and touch everything (1 minute)
# make test     set up, then the tests (12 minutes in all from a bare clone on two cores)
# make test-all set up, then the tests with their long sweeps (40 minutes)
# make test-browser the page of `onepass report` in Chromium (3 minutes)
# make lint     ruff, mypy, clang-format
# make format   let them mend what they can
# make sanitize the C++ that needs no GPU, with AddressSanitizer and UndefinedBehaviorSanitizer, over random calls
# make figures  the tables and pictures of the docs, from benchmarks/results
# make docs     the site of the docs, in build/site
# make wheel    the wheel and the source distribution, checked, in dist
# make kernels  the wheels onepass-kernels, of compiled CUDA kernels, in dist (hours on two cores)
# make clean    remove what was built
PYTHON ?= python3
TORCH ?= 2.13.0
RESULTS ?= build/bench
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))

BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE  # else each process compiles torch's modules anew: 3 s
NATIVE := setup.py pyproject.toml $(shell find src/onepass -name '*.cpp' -o -name '*.h')
CLANG := $(shell find src/onepass -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# Public functions and states, accuracy, engines, plans, the gallery, the command line, the patch, what the docs show.
SMOKE := $(addprefix tests/api/test_,reference.py accuracy.py documentation.py explain.py state.py nn.py patch_switch.py)
SMOKE += $(addprefix tests/tools/test_,gallery.py cli.py)

.PHONY: setup help bench smoke test test-all test-browser sanitize lint format figures docs wheel kernels clean
setup: .venv/.ready

help:
	@sed -n 's/^# make /make /p' Makefile

.venv/.ready: scripts/make_venv.py $(NATIVE)
	$(PYTHON) scripts/make_venv.py --torch $(TORCH)

.venv/.lint: .venv/.ready
	$(PYTHON) scripts/make_venv.py --torch $(TORCH) --lint

.venv/.browser: .venv/.ready
	$(PYTHON) scripts/make_venv.py --torch $(TORCH) --browser

.venv/.docs: .venv/.ready
	$(PYTHON) scripts/make_venv.py --torch $(TORCH) --docs

.venv/.release: .venv/.ready
	$(PYTHON) scripts/make_venv.py --torch $(TORCH) --release

bench: setup
	$(BIN)/onepass bench models --quick --json $(RESULTS)/models.json --plot $(RESULTS)

smoke: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(SMOKE)

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-all: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m ""

test-browser: .venv/.browser
	$(BIN)/python -m pytest tests/browser

sanitize: setup
	$(BIN)/python scripts/sanitize.py
	ONEPASS_SANITIZE=1 $(BIN)/python -m pytest tests/engines/cpu/test_sanitize.py

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CLANG)

format: .venv/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CLANG)

figures: setup
	$(BIN)/python scripts/make_figures.py

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

wheel: .venv/.release
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python scripts/make_wheel.py

kernels: setup
	$(BIN)/python scripts/make_kernels.py $(KERNELS)

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info src/onepass/*.so
