"""Warming up: the kernels are then on disk (and on a GPU loaded), no call waits for one, and what is rejected."""

import sys
from typing import Any

import pytest
import torch

import onepass
from lib.scripts import python_output
from lib.support import slow
from lib.transcript import replay
from lib.warmup import BF16, F32, F64, call, needs_nvrtc, plan_of
from onepass import native
from onepass._kernel_compiler import compile_all

# The cache


PAIRS: dict[str, Any] = {"dtypes": [F32, (BF16, F32)], "arch": 90}
FILLED: dict[str, tuple[dict[str, Any], str, dict[str, Any], list[tuple[Any, ...]]]] = {
    # by name: the options, as the command takes them, those of a call before it, and whose kernels are then compiled:
    # function, types, direction
    "rows": (
        {**PAIRS, "functions": ["softmax", "logsumexp"], "lengths": [100]},
        "softmax,logsumexp --dtypes f32,bf16:f32 --lengths 100",
        {},
        [(function, x_type, F32, "forward") for function in ("softmax", "logsumexp") for x_type in (F32, BF16)],
    ),
    "gradients": (
        {**PAIRS, "functions": ["softmax", "logsumexp", "state"], "lengths": [3], "backward": True},
        "softmax,logsumexp,state --dtypes f32,bf16:f32 --lengths 3 --backward",
        {"backward": False},
        [  # of a bfloat16 input: read float32, write bfloat16
            *(("softmax", F32, to, which) for to in (F32, BF16) for which in ("backward", "backward_broadcast")),
            *(("logsumexp", F32, to, "backward") for to in (F32, BF16)),
        ],
    ),
    "other dims": (
        {"functions": ["logsumexp"], "dtypes": [F64], "lengths": [3], "arch": 90, "backward": True, "all_dims": True},
        "logsumexp --dtypes f64 --lengths 3 --backward --all-dims",
        {},
        [("logsumexp", F64, F64, which, True) for which in native.PASSES],
    ),
}


@needs_nvrtc
@pytest.mark.parametrize("what", [slow(what) if what == "other dims" else what for what in FILLED])
def test_warmup_fills_the_cache_for_a_gpu_that_is_elsewhere(what, cache):
    options, given, before, kinds = FILLED[what]
    known = onepass.warmup(**options | before) if before else 0
    steps: list[tuple[int, int]] = []
    count = onepass.warmup(**options, progress=lambda *step: steps.append(step))
    assert steps == [(done, count - known) for done in range(count - known + 1)]
    assert len(list(cache.iterdir())) == count

    asked = [(kind, native.kernels_to_warm(*kind[:3], -1, 90, options["lengths"], *kind[3:])) for kind in kinds]
    wanted = [(kind, kernel) for kind, kernels in asked for kernel in kernels.values()]
    assert len(wanted) == count - known
    compiled, from_disk = native.counts()
    for kind, kernel in wanted:
        native.compile_kernel(*kind[:3], kernel, 90, which=kind[3])
    assert native.counts() == (compiled, from_disk + len(wanted))
    columns = [kernel for _, kernel in wanted if plan_of(kernel)["tier"].startswith("columns")]
    assert (len(columns) > 8) == (what == "other dims")

    again: list[tuple[int, int]] = []
    assert onepass.warmup(**options, progress=lambda *step: again.append(step)) == count
    assert again == [(0, 0)]
    said = call("--arch", "90", "--functions", *given.split()).output
    assert said == f"{count} kernels for compute capability 9.0, 0 of them compiled now\n"


MANY = [1, 3, 8, 33, 64, 100, 300, 1000, 5000]  # 13 kernels


@needs_nvrtc
@pytest.mark.parametrize(
    ("options", "executable"),
    [
        slow({"functions": ["logsumexp"], "dtypes": [F32], "lengths": MANY}, sys.executable),
        slow({"functions": ["logsumexp"], "dtypes": [F32], "lengths": MANY}, "/bin/false"),
        slow(
            {"functions": ["softmax"], "dtypes": [BF16], "lengths": [3, 50257, 100003], "backward": True},
            sys.executable,
        ),
    ],
    ids=["rows", "processes that do not start", "gradients"],
)
def test_many_kernels_are_compiled_by_several_processes(options, executable, cache, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(sys, "executable", executable)
    compiled = native.counts()[0]
    count = onepass.warmup(**options, arch=80)
    assert count > 12, "or one process does"
    assert len(list(cache.iterdir())) == count
    assert executable == "/bin/false" or native.counts()[0] == compiled, "none of them here"


@needs_nvrtc
def test_an_architecture_that_nvrtc_does_not_know(cache):
    with pytest.raises(RuntimeError, match="does not compile here"):
        onepass.warmup(functions=["softmax"], dtypes=[F32], lengths=[8], arch=999)
    result = call("--arch", "999", "--functions", "softmax", "--dtypes", "f32", "--lengths", "8")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


@needs_nvrtc
def test_nothing_is_compiled_that_cannot_be_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", "off")
    compiled = native.counts()[0]
    with pytest.raises(RuntimeError, match="no disk cache to fill: switched off"):
        onepass.warmup(arch=90)
    assert native.counts()[0] == compiled
    assert list(compile_all([], 90)) == []


@needs_nvrtc
def test_the_command_says_how_many(cache):
    said = call("--arch", "90", "--functions", "softmax", "--dtypes", "bf16:f32,f32", "--lengths", "64,65").output
    count = len(list(cache.iterdir()))
    assert onepass.warmup(functions=["softmax"], dtypes=[(BF16, F32), F32], lengths=[64, 65], arch=90) == count
    assert said == f"{count} kernels for compute capability 9.0, {count} of them compiled now\n"


# What is rejected


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_what_there_is_instead():
    with pytest.raises(RuntimeError, match="no CUDA device here; arch=90"):
        onepass.warmup()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"functions": ["tanh"]}, ValueError, "functions are softmax, .*got 'tanh'"),
        ({"functions": "softmax"}, TypeError, "a sequence of names, got 'softmax'"),
        ({"dtypes": [torch.int8]}, TypeError, r"got torch\.int8"),
        ({"dtypes": ["float32"]}, TypeError, "got 'float32'"),
        ({"dtypes": [(F32, F32, F32)]}, TypeError, r"pairs \(input, result\)"),
        ({"lengths": [0]}, ValueError, "at least 1 .*got 0"),
        ({"lengths": [True]}, TypeError, "got True"),
        ({"lengths": [3.5]}, TypeError, r"got 3\.5"),
        ({"lengths": []}, ValueError, "None is for any length"),
        ({"arch": 75}, ValueError, "80 or more .*got 75"),
        ({"arch": 9.0}, ValueError, r"got 9\.0"),
        ({"arch": 90, "device": "cuda:0"}, ValueError, "device or arch, got both"),
    ],
)
def test_wrong_arguments(options, error, words, cache):
    with pytest.raises(error, match=words):
        onepass.warmup(**{"arch": 90, **options})
    assert not cache.exists()


def test_wrong_options_are_reported_in_one_line(cache):
    replay("warmup-errors")
    assert not cache.exists()


# With a GPU


# In a process of its own, since kernels stay loaded: calls of any sizes and alignment.
CALLS = """
import random, torch, onepass
from onepass import native
rng = random.Random(0)
bf16, f32 = torch.bfloat16, torch.float32

def view(*shape, dtype=bf16):
    size, first = torch.Size(shape).numel(), rng.choice([0, 0, 1, 2, 3, 4, 7])
    return torch.randn(size + first, device="cuda").to(dtype)[first:].view(shape)

def rows():
    n = int(2 ** rng.uniform(0, 22))
    return view(max(1, min(int(2 ** rng.uniform(0, 14)), 2**24 // n)), n)

def forward():
    x = rows()
    onepass.softmax(x, -1, out=x) if rng.random() < 0.3 else onepass.softmax(x)

def gradient():
    x = rows().requires_grad_()
    if rng.random() < 0.3:
        onepass.logsumexp(x, -1).sum().backward()
        return
    y = onepass.softmax(x, -1, dtype=rng.choice([None, f32]))
    y.sum().backward() if rng.random() < 0.3 else y.backward(view(*y.shape, dtype=y.dtype))

def other_dim():
    n = rng.choice([21, 1000, 30000])
    inner = max(2, min(int(2 ** rng.uniform(0, 12)), 2**24 // n))
    x = view(max(1, min(int(2 ** rng.uniform(0, 6)), 2**24 // n // inner)), n, inner).requires_grad_()
    y = onepass.softmax(x, 1)
    y.sum().backward() if rng.random() < 0.3 else y.backward(torch.randn_like(y))

steps = []
count = onepass.warmup({options}, progress=lambda *step: steps.append(step))
assert steps[0][0] == 0 and steps[-1][0] == steps[-1][1] >= count > 10, steps[-1]
before = native.counts()
for _ in range({times}):
    {call}()
torch.cuda.synchronize()
assert native.counts() == before, (native.counts(), before)
"""


@pytest.mark.parametrize("which", native.PASSES)
@pytest.mark.parametrize("function", ["softmax", "logsumexp"])
@pytest.mark.parametrize("x_type", [BF16, slow(F32)])
@pytest.mark.parametrize("lengths", [(1, 100, 30_000), slow((2, 21, 1000, 4096, 1 << 20)), slow(())], ids=str)
def test_every_kernel_to_warm_is_one_that_can_be_compiled(lengths, x_type, function, which):
    """The planner makes plans that the rules of forced plans refuse: vectors of one element in shared memory, say."""
    kind = function, x_type, F32
    plans = native.kernels_to_warm(*kind, -1, 90, lengths, which, True).values()
    assert plans or (function, which) == ("logsumexp", "backward_broadcast")  # which is no kernel of its own
    assert not any(native.is_kernel_cached(*kind, plan, 91, which) for plan in plans)  # nobody has compiled for 9.1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("call", "times", "options"),
    [
        ("forward", 300, 'dtypes=[bf16], functions=["softmax"]'),
        ("gradient", 300, 'dtypes=[bf16, (bf16, f32)], functions=["softmax", "logsumexp"], backward=True'),
        (
            "other_dim",
            200,
            'dtypes=[bf16], functions=["softmax"], lengths=[21, 1000, 30000], backward=True, all_dims=True',
        ),
    ],
)
def test_no_call_compiles_after_it(call, times, options, cache):
    code = CALLS
    for name, value in (("options", options), ("times", times), ("call", call)):
        code = code.replace(f"{{{name}}}", str(value))
    python_output(code)


@pytest.mark.gpu
def test_devices(cache):
    options = {"dtypes": [F32], "functions": ["softmax"], "lengths": [100]}
    count = onepass.warmup(**options)
    assert count == onepass.warmup(0, **options) == onepass.warmup("cuda", **options)
    assert count == onepass.warmup(torch.device("cuda", torch.cuda.current_device()), **options)
    with pytest.raises(ValueError, match="takes a CUDA device, got 'cpu'"):
        onepass.warmup("cpu", **options)
    with pytest.raises(RuntimeError, match="no 'cuda:99' here"):
        onepass.warmup("cuda:99", **options)
    result = call("--dtypes", "f32", "--functions", "softmax", "--lengths", "100")
    assert result.output == f"{count} kernels loaded, 0 of them compiled now\n"


@pytest.mark.gpu
def test_without_a_cache_kernels_are_loaded_all_the_same(monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", "off")
    n = 333
    assert onepass.warmup(dtypes=[F64], functions=["softmin"], lengths=[n]) >= 1
    compiled = native.counts()[0]
    onepass.softmin(torch.randn(8, n, device="cuda", dtype=F64), -1)
    assert native.counts()[0] == compiled
