"""Marks: `gpu` tests run where a CUDA device is, and are skipped elsewhere; with `--emulate` those of forced plans
run on the CPU, by an emulator (slow)."""

import os
from collections import Counter

import pytest
import torch

from emulator import Emulator
from lib.forced import Engine, Gpu


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulate", action="store_true", help="run forced plans by the emulator of CUDA kernels")


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    return Emulator()


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Engine:
    """What serves forced plans."""
    return request.getfixturevalue("emulator") if request.config.getoption("--emulate") else Gpu()


def pytest_configure() -> None:
    """Workers share cores: they and what they start take as many threads as they have cores each, lest they wait for
    each other's (half the processor time of calls on the CPU). Tests of threads say how many they take.
    """
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        threads = max(1, torch.get_num_threads() // int(workers))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    emulated = config.getoption("--emulate")
    skip = pytest.mark.skip(reason="no CUDA device here")
    for item in items:
        if "gpu" in item.keywords and not (emulated and "engine" in getattr(item, "fixturenames", ())):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests were skipped, a line for each reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
