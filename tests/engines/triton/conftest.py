"""Processes of Triton, one that interprets and one that compiles, and what runs the kernels."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lib.triton import Interpreted, OnGpu, Runs, process, unavailable


@pytest.fixture(scope="session")
def interpreting() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process where Triton interprets."""
    for call in process("1"):
        reason = call(unavailable, "cpu")
        if reason is not None and "NumPy" in reason:
            pytest.skip(reason)
        assert reason is None
        yield call


@pytest.fixture(scope="session")
def compiling() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process where Triton compiles."""
    yield from process("0")


@pytest.fixture
def gpu() -> OnGpu:
    reason = unavailable("cuda")
    assert reason is None, reason
    return OnGpu()


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def runs(request: pytest.FixtureRequest) -> Runs:
    """What runs the engine's kernels: Triton's interpreter, or a GPU."""
    if request.param == "gpu":
        return request.getfixturevalue("gpu")
    return Interpreted(request.getfixturevalue("interpreting"))
