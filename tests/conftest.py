"""Shared by all tests: arguments that are parametrised over all values, fixtures, and marks.

If a test has one of these arguments, without a fixture or a parametrisation of its own, it runs over all values:
`function`, `dtype`, `layout`, `engine` with `device` (every engine that runs here), and `device` alone (a CPU, a GPU).

Tests with the mark `gpu` are skipped without a CUDA device. With `--emulate`, tests of forced plans run on the CPU with
an emulator, which is slow. The mark `slow` is for sweeps that `make test` skips and `make test-all` runs.
"""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from emulator import Emulator
from lib.plans import Engine, Runner
from lib.scripts import Forks, forks
from lib.support import DTYPES, FUNCTIONS, LAYOUTS, engines_at_hand

DEVICES = ["cpu", *[pytest.param("cuda", marks=pytest.mark.gpu)] * torch.cuda.is_available()]
EVERY: dict[str, Any] = {"function": FUNCTIONS, "dtype": DTYPES, "layout": list(LAYOUTS)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = (mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    given = {name for names in marks for name in (names.split(",") if isinstance(names, str) else names)}
    given |= set(metafunc.definition._fixtureinfo.name2fixturedefs)
    free = [name for name in metafunc.fixturenames if name not in given]
    for name in free:
        if name in EVERY:
            metafunc.parametrize(name, EVERY[name], ids=lambda value: str(value).removeprefix("torch."))
    if {"engine", "device"} <= set(free):
        metafunc.parametrize(("engine", "device"), engines_at_hand())
    elif "device" in free:
        metafunc.parametrize("device", DEVICES)


@pytest.fixture
def fresh_compiler() -> Any:
    """Resets torch.compile before and after the test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def room() -> Any:
    """Requires 24 GiB of GPU memory, and frees the test's memory afterwards."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for compiled kernels that does not exist yet."""
    folder = tmp_path / "a" / "cache"
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(folder))
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulate", action="store_true", help="run forced plans by the emulator of CUDA kernels")


@pytest.fixture(scope="session")
def processes() -> Iterator[Forks]:
    """Python processes that have imported torch."""
    with forks("pytest, torch") as made:
        yield made


@pytest.fixture(scope="session")
def compilers() -> Iterator[Forks]:
    """Processes that have also imported the modules of torch.compile, DTensors and optimizers (2 s), but not
    onepass."""
    with forks("pytest, torch._inductor.compile_fx, torch.distributed.tensor.parallel") as made:
        yield made


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    return Emulator()


@pytest.fixture(scope="session")
def runner(request: pytest.FixtureRequest) -> Runner:
    """The engine or emulator that runs forced plans."""
    return request.getfixturevalue("emulator") if request.config.getoption("--emulate") else Engine("cuda")


def pytest_configure() -> None:
    """Divides the cores among the workers: each worker, and the processes that it starts, use as many threads as its
    share of the cores. Otherwise they wait for each other (half of the CPU time). Tests of threads set their number.
    """
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        threads = max(1, torch.get_num_threads() // int(workers))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    else:
        os.environ["ONEPASS_EMULATOR_DIR"] = tempfile.mkdtemp()  # one folder for all workers
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # otherwise it tries all vector ISAs with g++: 10 s


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER_COUNT" not in os.environ:
        shutil.rmtree(os.environ["ONEPASS_EMULATOR_DIR"], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # These tests override torch's kernels for a while. A patch that was installed before would go on calling theirs.
    items.sort(key=lambda item: "test_no_torch_softmax" not in item.nodeid)
    if torch.cuda.is_available():
        return
    emulated = config.getoption("--emulate")
    skip = pytest.mark.skip(reason="no CUDA device here")
    for item in items:
        if "gpu" in item.keywords and not (emulated and "runner" in getattr(item, "fixturenames", ())):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints why tests were skipped, one line per reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
