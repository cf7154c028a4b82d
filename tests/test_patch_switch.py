"""onepass.patch on and off, its report, its scope (all threads of a process); torch has everything back after it."""

from __future__ import annotations

import concurrent.futures
import importlib
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

import onepass
from patch_support import dispatch_tables
from support import maker

module = importlib.import_module("onepass.patch")  # `onepass.patch` the attribute is the class


@pytest.fixture(autouse=True)
def _nothing_stays():
    """No patch is on before a test, and none after it."""
    assert not module._active
    before = dispatch_tables()
    yield
    assert not module._active
    assert dispatch_tables() == before


# On and off ---------------------------------------------------------------------------------------------------------


def _served(patched: onepass.patch) -> int:
    torch.zeros(3).softmax(0)
    return sum(patched.report.served.values())


def test_as_a_switch():
    handle = onepass.patch(report=True)
    assert _served(handle) == 1
    handle.restore()
    handle.restore()
    assert _served(handle) == 1


def test_patches_nest_and_end_in_any_order():
    outer, inner = onepass.patch(report=True), onepass.patch(report=True)
    assert (_served(outer), _served(inner)) == (1, 2)
    outer.restore()
    assert (_served(outer), _served(inner)) == (2, 4)
    inner.restore()
    assert _served(inner) == 4


def test_one_patch_is_entered_again():
    with onepass.patch(report=True) as patched:
        with patched as same:
            assert same is patched
        assert _served(patched) == 1  # still on
    assert _served(patched) == 1
    with patched:
        assert _served(patched) == 2
    assert _served(patched) == 2


def test_restored_within_its_context():
    with onepass.patch(report=True) as patched:
        patched.restore()
        assert _served(patched) == 0


def test_an_exception_ends_it():
    with pytest.raises(KeyError), onepass.patch():
        raise KeyError


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13),
    reason="torch took one override from Python alone",
)
def test_another_override_of_the_operator_stays():
    def mine(x, dim, half_to_float):
        return torch.full_like(x, 7)

    x = torch.zeros(3)
    with torch.library._scoped_library("aten", "IMPL") as library:
        with onepass.patch():
            assert x.softmax(0).tolist() != [7, 7, 7]
            library.impl("_softmax", mine, "CPU")
            assert x.softmax(0).tolist() == [7, 7, 7]
        assert x.softmax(0).tolist() == [7, 7, 7]
        with onepass.patch():
            assert x.softmax(0).tolist() != [7, 7, 7]
            assert x.long().softmax(0, dtype=torch.float32).sum() == 1
        assert x.softmax(0).tolist() == [7, 7, 7]


@pytest.mark.parametrize("given", [1, None, "yes"])
def test_report_is_a_bool(given):
    with pytest.raises(TypeError, match=r"onepass.patch\(\): report must be a bool, got"):
        onepass.patch(report=given)


# The report ---------------------------------------------------------------------------------------------------------


def test_report():
    x = torch.zeros(3, 4, requires_grad=True)
    with onepass.patch(report=True) as patched:
        F.cross_entropy(x, torch.zeros(3, dtype=torch.int64)).backward()
        F.softmin(x, 0).sum().backward()
        torch.logsumexp(x.to(torch.complex64), 0)
        with onepass.patch() as silent:
            x.logsumexp(1).sum().backward()
    assert silent.report is None
    assert patched.report.served == {
        "log_softmax": 1,
        "log_softmax backward": 1,
        "softmax": 1,
        "softmax backward": 1,
        "logsumexp": 1,
    }
    assert patched.report.left == {("logsumexp", "dtype torch.complex64"): 1}
    assert str(patched.report).splitlines() == [
        "function                 calls  by",
        "log_softmax                  1  onepass",
        "log_softmax backward         1  onepass",
        "logsumexp                    1  onepass",
        "logsumexp                    1  torch: dtype torch.complex64",
        "softmax                      1  onepass",
        "softmax backward             1  onepass",
    ]


# Threads and processes ----------------------------------------------------------------------------------------------


def test_all_threads_are_patched_and_all_calls_counted():
    x = torch.zeros(2, 3)
    with onepass.patch(report=True) as patched, concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: [x.softmax(1) for _ in range(200)], range(8)))
    assert patched.report.served == {"softmax": 1600}


# Without Python's lock, as autograd's threads compute.
LOOP = torch.jit.CompilationUnit("""
def last(x: Tensor, calls: int) -> Tensor:
    y = x
    for _ in range(calls):
        y = torch.softmax(x, 1)
    return y
""")


def test_patched_and_restored_while_other_threads_compute():
    x = maker(torch.float32)(20, 30)
    want, end, wrong = x.softmax(1), threading.Event(), []

    def compute():
        while not end.is_set():
            try:
                torch.testing.assert_close(LOOP.last(x, 100), want)
            except BaseException as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        with onepass.patch():
            torch.testing.assert_close(x.softmax(1), want)
    end.set()
    for thread in threads:
        thread.join()
    assert not wrong


FRESH = """
import os, sys, torch, onepass
handle = onepass.patch(report=True)
child = os.fork()
x = torch.zeros(3).softmax(0)
if child:
    os.waitpid(child, 0)
print(handle.report.served, [m for m in ("triton", "torch._dynamo") if m in sys.modules], torch.cuda.is_initialized())
"""


def test_a_fresh_process_is_patched_in_silence_and_so_are_its_forks():
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-W", "ignore::DeprecationWarning", "-c", FRESH],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines() == ["{'softmax': 1} [] False"] * 2
