"""Marks: `gpu` tests run where a CUDA device is, and are skipped elsewhere."""

import os

import pytest
import torch


def pytest_configure() -> None:
    """Workers share cores: they and what they start take as many threads as they have cores each, lest they wait for
    each other's (half the processor time of calls on the CPU). Tests of threads say how many they take.
    """
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        threads = max(1, torch.get_num_threads() // int(workers))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
