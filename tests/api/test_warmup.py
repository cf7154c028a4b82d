"""Warming up: the kernels are then on disk (and on a GPU loaded), no call waits for one, and what is rejected."""

import re
import sys

import pytest
import torch

import onepass
from lib.scripts import python_output
from lib.warmup import BF16, F32, F64, call, needs_nvrtc, plan_of
from onepass import native
from onepass._kernel_compiler import compile_all


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(folder))
    return folder


# The cache


@needs_nvrtc
def test_warmup_fills_the_cache_for_a_gpu_that_is_elsewhere(cache):
    lengths, steps = [100, 4096], []
    options = {"functions": ["softmax", "logsumexp"], "dtypes": [F32, (BF16, F32)], "lengths": lengths, "arch": 90}
    count = onepass.warmup(**options, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(done, count) for done in range(count + 1)]
    assert len(list(cache.iterdir())) == count

    kinds = [(f, x, F32) for f in ("softmax", "logsumexp") for x in (F32, BF16)]
    wanted = [(kind, kernel) for kind in kinds for kernel in native.kernels_to_warm(*kind, -1, 90, lengths)]
    assert len(wanted) == count
    compiled, from_disk = native.counts()
    for kind, kernel in wanted:
        native.warm_kernel(*kind, -1, 90, kernel)
    assert native.counts() == (compiled, from_disk + count)

    again = []
    assert onepass.warmup(**options, progress=lambda done, total: again.append((done, total))) == count
    assert again == [(0, 0)]


MANY = [1, 3, 8, 33, 64, 100, 300, 1000, 5000, 20000, 50257, 100003, 1000000]  # 19 kernels


@needs_nvrtc
def test_many_kernels_are_compiled_by_several_processes(cache, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    compiled = native.counts()[0]
    count = onepass.warmup(functions=["logsumexp"], dtypes=[F32], lengths=MANY, arch=80)
    assert count > 12, "or one process does"
    assert len(list(cache.iterdir())) == count
    assert native.counts()[0] == compiled, "none of them here"


@pytest.mark.slow
@needs_nvrtc
def test_processes_that_do_not_start_are_no_matter(cache, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(sys, "executable", "/bin/false")
    count = onepass.warmup(functions=["logsumexp"], dtypes=[F32], lengths=MANY, arch=80)
    assert count > 12
    assert len(list(cache.iterdir())) == count


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
def test_warmup_fills_the_cache_with_those_of_gradients_too(cache, monkeypatch):
    functions, lengths = ["softmax", "logsumexp", "state"], [100]
    options = {"functions": functions, "dtypes": [F32, (BF16, F32)], "lengths": lengths, "arch": 90}
    forward = onepass.warmup(**options)
    count = onepass.warmup(**options, backward=True)
    assert len(list(cache.iterdir())) == count

    kinds = [
        ("softmax", F32, F32, "backward"),
        ("softmax", F32, F32, "backward_broadcast"),
        ("softmax", F32, BF16, "backward"),  # of a bfloat16 input: read float32, write bfloat16
        ("softmax", F32, BF16, "backward_broadcast"),
        ("logsumexp", F32, F32, "backward"),
        ("logsumexp", F32, BF16, "backward"),
    ]
    wanted = [(k, kernel) for k in kinds for kernel in native.kernels_to_warm(*k[:3], -1, 90, lengths, k[3])]
    assert len(wanted) == count - forward
    compiled, from_disk = native.counts()
    for (*kind, which), kernel in wanted:
        native.warm_kernel(*kind, -1, 90, kernel, which)
    assert native.counts() == (compiled, from_disk + len(wanted))

    again = []
    onepass.warmup(**options, backward=True, progress=lambda done, total: again.append((done, total)))
    assert again == [(0, 0)]


@pytest.mark.slow
@needs_nvrtc
def test_many_kernels_of_gradients_are_compiled_by_several_processes(cache, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    compiled = native.counts()[0]
    lengths = [3, 50257, 100003]
    count = onepass.warmup(functions=["softmax"], dtypes=[BF16], lengths=lengths, backward=True, arch=80)
    assert count > 12, "or one process does"
    assert len(list(cache.iterdir())) == count
    assert native.counts()[0] == compiled, "none of them here"


@needs_nvrtc
def test_the_command_says_how_many_with_gradients(cache, monkeypatch):
    arguments = ("--arch", "90", "--functions", "log_softmax", "--dtypes", "bf16:f32", "--lengths", "64")
    forward = int(call(*arguments).output.split()[0])
    result = call(*arguments, "--backward")
    count = len(list(cache.iterdir()))
    assert count > forward
    said = f"{count} kernels for compute capability 9.0, {count - forward} of them compiled now\n"
    assert result.output == said


@needs_nvrtc
def test_warmup_fills_the_cache_with_those_over_other_dims(cache, monkeypatch):
    options = {"functions": ["logsumexp"], "dtypes": [F64], "lengths": [4], "arch": 90}
    rows = onepass.warmup(**options, backward=True)
    count = onepass.warmup(**options, backward=True, all_dims=True)
    assert len(list(cache.iterdir())) == count
    kinds = [
        (which, native.kernels_to_warm("logsumexp", F64, F64, -1, 90, [4], which, True)) for which in native.PASSES
    ]
    assert (
        sum(plan_of(kernel)["tier"].startswith("columns") for _, kernels in kinds for kernel in kernels)
        == count - rows
        > 8
    )
    compiled, from_disk = native.counts()
    for which, kernels in kinds:
        for kernel in kernels:
            native.warm_kernel("logsumexp", F64, F64, -1, 90, kernel, which)
    assert native.counts() == (compiled, from_disk + count)


@needs_nvrtc
def test_the_command_takes_dims(cache, monkeypatch):
    arguments = ("--arch", "80", "--functions", "logsumexp", "--dtypes", "f64", "--lengths", "2", "--all-dims")
    count = len(native.kernels_to_warm("logsumexp", F64, F64, -1, 80, [2], "forward", True))
    result = call(*arguments)
    assert result.output == f"{count} kernels for compute capability 8.0, {count} of them compiled now\n"


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dtypes", "int8"), "unknown dtype 'int8'"),
        (("--dtypes", "f32:f16:f32"), "input:result"),
        (("--functions", "tanh"), "got 'tanh'"),
        (("--lengths", "8,many"), "--lengths takes whole numbers, got '8,many'"),
        (("--lengths", "-3"), "got -3"),
        (("--arch", "sm_90"), "'sm_90' is not a valid integer"),
        (("--arch", "70"), "got 70"),
        (("--arch", "90", "--device", "cuda"), "got both"),
    ],
)
def test_wrong_options_are_reported_in_one_line(arguments, words, cache):
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("onepass: ")
    assert words in result.stderr
    assert not cache.exists()


@needs_nvrtc
def test_the_command_says_how_many(cache):
    arguments = ("--arch", "90", "--functions", "softmax", "--dtypes", "bf16:f32,f32", "--lengths", "64,65")
    first, second = call(*arguments), call(*arguments)
    assert first.exit_code == second.exit_code == 0
    said = re.fullmatch(r"(\d+) kernels for compute capability 9\.0, (\d+) of them compiled now\n", first.output)
    assert said
    assert said[1] == said[2] == str(len(list(cache.iterdir())))
    assert second.output == f"{said[1]} kernels for compute capability 9.0, 0 of them compiled now\n"


# With a GPU


@pytest.mark.gpu
def test_no_contiguous_call_compiles_after_it(cache):
    """In a process of its own, since kernels stay loaded: 300 calls of any length, alignment, number of rows."""
    code = """
import random, torch, onepass
from onepass import native
steps = []
count = onepass.warmup(dtypes=[torch.bfloat16], functions=["softmax"], progress=lambda *step: steps.append(step))
assert steps[0][0] == 0 and steps[-1][0] == steps[-1][1] >= count, steps[-1]
before = native.counts()
rng = random.Random(0)
for _ in range(300):
    n = int(2 ** rng.uniform(0, 22))
    rows = max(1, min(int(2 ** rng.uniform(0, 14)), 2**24 // n))
    offset = rng.choice([0, 0, 1, 2, 3, 4, 7])
    x = torch.randn(rows * n + offset, device="cuda").bfloat16()[offset:].view(rows, n)
    onepass.softmax(x, -1, out=x) if rng.random() < 0.3 else onepass.softmax(x)
torch.cuda.synchronize()
assert native.counts() == before, (native.counts(), before)
print(count)
"""
    assert int(python_output(code)) > 10


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


@pytest.mark.gpu
def test_no_gradient_of_contiguous_rows_compiles_after_it(cache, monkeypatch):
    """In a process of its own, since kernels stay loaded: any length, number of rows and view, of the sum too."""
    code = """
import random, torch, onepass
from onepass import native
types = [torch.bfloat16, (torch.bfloat16, torch.float32)]
onepass.warmup(dtypes=types, functions=["softmax", "logsumexp"], backward=True)
before = native.counts()
rng = random.Random(0)
for _ in range(300):
    n = int(2 ** rng.uniform(0, 22))
    rows = max(1, min(int(2 ** rng.uniform(0, 14)), 2**24 // n))
    offset = rng.choice([0, 0, 1, 2, 3, 4, 7])
    x = torch.randn(rows * n + offset, device="cuda").bfloat16()[offset:].view(rows, n).requires_grad_()
    if rng.random() < 0.3:
        onepass.logsumexp(x, -1).sum().backward()
        continue
    y = onepass.softmax(x, -1, dtype=rng.choice([None, torch.float32]))
    if rng.random() < 0.3:
        y.sum().backward()
    else:
        y.backward(torch.randn(rows * n + offset, device="cuda").to(y.dtype)[offset:].view(rows, n))
torch.cuda.synchronize()
assert native.counts() == before, (native.counts(), before)
"""
    python_output(code)


@pytest.mark.gpu
def test_no_call_over_other_dims_compiles_after_it(cache, monkeypatch):
    """In a process of its own, since kernels stay loaded: any sizes and view, forward and backward."""
    code = """
import random, torch, onepass
from onepass import native
lengths = [21, 1000, 30000]
onepass.warmup(dtypes=[torch.bfloat16], functions=["softmax"], lengths=lengths, backward=True, all_dims=True)
before = native.counts()
rng = random.Random(0)
for _ in range(200):
    n = rng.choice(lengths)
    inner = max(2, min(int(2 ** rng.uniform(0, 12)), 2**24 // n))
    outer = max(1, min(int(2 ** rng.uniform(0, 6)), 2**24 // n // inner))
    count, first = outer * n * inner, rng.choice([0, 0, 1, 2, 3, 4])
    x = torch.randn(count + first, device="cuda").bfloat16()[first:].view(outer, n, inner).requires_grad_()
    y = onepass.softmax(x, 1)
    y.sum().backward() if rng.random() < 0.3 else y.backward(torch.randn_like(y))
torch.cuda.synchronize()
assert native.counts() == before, (native.counts(), before)
"""
    python_output(code)
