"""onepass.patch on and off, its report, its scope (all threads of a process); torch computes everything after it."""

import concurrent.futures
import sys

import pytest
import torch
import torch.nn.functional as F

import onepass
from lib.patch import dispatch_tables
from lib.paths import ROOT
from onepass import patching as module


@pytest.fixture(autouse=True)
def _nothing_is_rewritten():
    """No patch is on before a test, and none after it; kernels are installed by the first patch, and no other."""
    with onepass.patch():
        pass
    assert not module._active
    before = dispatch_tables()
    yield
    assert not module._active
    assert dispatch_tables() == before


several_overrides = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 13), reason="torch took one override from Python alone"
)

# On and off ---------------------------------------------------------------------------------------------------------


def _served(patched: onepass.patch) -> int:
    torch.zeros(3).softmax(0)
    return sum(patched.report.served.values())


def test_a_switch_a_context_and_an_exception_end_it():
    installed = dispatch_tables()
    handle = onepass.patch(report=True)
    assert _served(handle) == 1
    assert dispatch_tables() == installed  # no kernel is replaced by a switch
    for _ in range(2):
        handle.restore()
        assert _served(handle) == 1
    with onepass.patch(report=True) as patched:
        patched.restore()
        assert _served(patched) == 0
    with pytest.raises(KeyError), onepass.patch(report=True) as patched:
        raise KeyError
    assert _served(patched) == 0


def test_patches_nest_end_in_any_order_and_are_entered_again():
    outer, inner = onepass.patch(report=True), onepass.patch(report=True)
    assert (_served(outer), _served(inner)) == (1, 2)
    outer.restore()
    assert (_served(outer), _served(inner)) == (2, 4)
    inner.restore()
    assert _served(inner) == 4
    with onepass.patch(report=True) as patched:
        with patched as same:
            assert same is patched
        assert _served(patched) == 1  # still on
    assert _served(patched) == 1
    with patched:
        assert _served(patched) == 2
    assert _served(patched) == 2


@several_overrides
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
        with onepass.patch():  # which rewrites no entry: the newest kernel has the calls
            assert x.softmax(0).tolist() == [7, 7, 7]
    with onepass.patch(report=True) as patched:
        assert _served(patched) == 1


# Another library's kernels, there before the first patch of the process.
BEFORE = """
import warnings, torch, onepass
warnings.simplefilter("ignore")

class Mine(Exception):
    pass

def mine(x, dim, half_to_float):
    if x.dtype == torch.int64:
        raise Mine("words of mine")
    return torch.full_like(x, 7)

library = torch.library.Library("aten", "IMPL")
library.impl("_softmax", mine, "CPU", allow_override=True)
x = torch.zeros(3)
for _ in range(2):
    with onepass.patch(report=True) as patched:
        print(x.softmax(0)[0].item() != 7, patched.report.served)
        try:
            torch.ops.aten._softmax(x.long(), 0, False)
        except Mine as error:
            print(error, patched.report.fallbacks)
    print(x.softmax(0).tolist(), abs(x.log_softmax(0).exp().sum().item() - 1) < 1e-6)
"""


@several_overrides
def test_kernels_that_were_there_before_have_their_calls(processes, tmp_path):
    (done,) = processes.run(tmp_path, BEFORE)
    assert done.errors == ""
    assert done.out.splitlines() == 2 * [
        "True {'softmax': 1}",
        "words of mine {('softmax', 'dtype torch.int64'): 1}",
        "[7.0, 7.0, 7.0] True",
    ]


@pytest.mark.parametrize("given", [1, None, "yes"])
def test_report_is_a_bool(given):
    with pytest.raises(TypeError, match=r"onepass.patch\(\): report must be a bool, got"):
        onepass.patch(report=given)


# The report ---------------------------------------------------------------------------------------------------------


def test_report():
    x = torch.zeros(3, 4, requires_grad=True)
    with onepass.patch(report=True) as patched:
        F.cross_entropy(x, torch.zeros(3, dtype=torch.int64)).backward()
        F.cross_entropy(x, torch.zeros(3, dtype=torch.uint8)).backward()
        F.softmin(x, 0).sum().backward()
        torch.logsumexp(x.to(torch.complex64), 0)
        with onepass.patch() as silent:
            x.logsumexp(1).sum().backward()
    assert silent.report is None
    assert patched.report.served == {
        "cross_entropy": 1,
        "log_softmax": 1,
        "log_softmax backward": 1,
        "softmax": 1,
        "softmax backward": 1,
        "logsumexp": 1,
    }
    assert patched.report.fallbacks == {
        ("cross_entropy", "arguments that onepass does not take"): 1,
        ("logsumexp", "dtype torch.complex64"): 1,
    }
    assert str(patched.report).splitlines() == [
        "function                 calls  by",
        "cross_entropy                1  onepass",
        "cross_entropy                1  torch: arguments that onepass does not take",
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


# Four threads call while a fifth switches, all as often as they can, and a sixth imports what DTensors take.
RACE = """
import sys, threading, time, torch, onepass

torch.set_num_threads(1)
sys.setswitchinterval(1e-6)
x = torch.arange(35.0).view(5, 7).cos()
want, end, wrong = x.softmax(1), time.time() + 2, []

def compute():
    try:
        while time.time() < end and not wrong:
            for _ in range(100):
                y = torch.softmax(x, 1)
            torch.testing.assert_close(y, want)
    except BaseException as error:
        wrong.append(error)

def imports():
    import torch.distributed.tensor

threads = [threading.Thread(target=compute) for _ in range(4)] + [threading.Thread(target=imports)]
for thread in threads:
    thread.start()
switches = 0
while time.time() < end and not wrong:
    onepass.patch().restore()
    switches += 1
for thread in threads:
    thread.join()
print(wrong, switches > 100, "onepass.dtensor" in sys.modules)
"""


def test_patched_and_restored_while_other_threads_compute(processes, tmp_path):
    (done,) = processes.run(tmp_path, RACE)
    assert (done.status, done.out.strip()) == (0, "[] True True"), done.errors


FRESH = """
import os, sys, warnings
warnings.simplefilter("error", UserWarning)
import torch, onepass
handle = onepass.patch(report=True)
child = os.fork()
x = torch.zeros(3).softmax(0)
if child:
    os.waitpid(child, 0)
print(handle.report.served, [m for m in ("triton", "torch._dynamo") if m in sys.modules], torch.cuda.is_initialized())
"""


def test_a_fresh_process_is_patched_in_silence_and_so_are_its_forks(processes, tmp_path):
    (done,) = processes.run(tmp_path, FRESH)
    assert (done.errors, done.status) == ("", 0)
    assert done.out.splitlines() == ["{'softmax': 1} [] False"] * 2


# Before the first patch of the process and after it, with gradients and without.
GRAPHS = """
import torch, onepass
from lib.modes import Graphs

x, y = torch.randn(5, 6, requires_grad=True), torch.arange(5)

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.cross_entropy(x * 2, y, label_smoothing=0.1)

def seen():
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(Model(), backend=graphs, fullgraph=True)
    torch.autograd.grad(compiled(x), x)
    with torch.no_grad():
        compiled(x)
    program = torch.export.export(Model(), (x.detach(),))
    return graphs.calls(), str(program.graph), str(program.run_decompositions().graph)

before = seen()
with onepass.patch(report=True) as patched:
    print(seen() == before, patched.report.served.get("cross_entropy"), len(before[0]))
    torch.compile(Model(), backend="eager", fullgraph=True)(x)
    print(patched.report.served["cross_entropy"])
print(seen() == before)
"""


def test_graphs_of_a_cross_entropy_are_what_they_were(compilers, tmp_path):
    (done,) = compilers.run(tmp_path, f"import sys\nsys.path.append({str(ROOT / 'tests')!r})\n{GRAPHS}")
    assert done.status == 0, done.errors
    assert done.out.splitlines() == ["True None 3", "1", "True"]


# Memory -------------------------------------------------------------------------------------------------------------

LEAK = """
import resource, torch, onepass

torch.set_num_threads(1)  # threads that wait for a small call cost more than it

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

x, half, out = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float16), torch.zeros(2, 3)
loss, classes = torch.nn.functional.cross_entropy, torch.zeros(2, dtype=torch.int64)
calls = {
    "off": lambda: torch.softmax(x, 1),
    "off, with a list": lambda: torch.logsumexp(x, (0, 1)),
    "off, in Python": lambda: torch.softmax(x, 1, dtype=torch.float32, out=out),
    "off, a loss": lambda: loss(x, classes),
    "left": lambda: torch._softmax_backward_data(x, x, 1, torch.float64),
    "left, with a list": lambda: torch.logsumexp(x.long(), (0, 1)),
    "left, with out": lambda: torch.softmax(x, 1, out=out[:0].view(0)),
    "left, a loss": lambda: loss(x, classes.byte()),
    "served": lambda: torch.softmax(half, 1, dtype=torch.float32, out=out),
}
for name, call in calls.items():
    handle = onepass.patch()
    if name.startswith("off"):
        handle.restore()
    for _ in range(1000):
        call()
    before, count = resident(), 100_000 if name == "left" else 10_000
    for _ in range(count):
        call()
    print(name, (resident() - before) / count, sep=": ")
    handle.restore()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_calls_that_torch_computes_leave_no_memory_behind(processes, tmp_path):
    (done,) = processes.run(tmp_path, LEAK)
    assert done.status == 0, done.errors
    grown = {name: float(size) for name, size in (line.split(": ") for line in done.out.splitlines())}
    assert len(grown) == 9
    assert max(grown.values()) < 24, grown  # bytes a call
