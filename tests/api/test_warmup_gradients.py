"""Warming up for gradients: which kernels that takes, that they are then on disk, that no backward waits for one."""

import random
import subprocess
import sys

import pytest

import onepass
from lib.warmup import BF16, F32, F64, FAMILY, TYPES, call, column_kernel, needs_nvrtc, plan_of
from onepass import native
from onepass.validation import reduces_to

MOST = 250  # kernels of the gradient of one function for a pair of types
BACKWARD = native.PASSES[1:]


# Which kernels (that every length is covered: test_warmup.py)


@pytest.mark.parametrize("compute", [80, 90, 100, 120])
@pytest.mark.parametrize(("x_type", "y_type"), TYPES, ids=lambda t: str(t)[6:])
def test_the_number_of_kernels_is_bounded(x_type, y_type, compute):
    for function in FAMILY:
        counts = [len(native.kernels_to_warm(function, y_type, x_type, -1, compute, (), which)) for which in BACKWARD]
        assert 10 < counts[1] < counts[0]
        assert sum(counts) < MOST
    if reduces_to("logsumexp", x_type, y_type):
        assert 10 < len(native.kernels_to_warm("logsumexp", y_type, x_type, -1, compute, (), "backward")) < MOST // 3
        assert not native.kernels_to_warm("logsumexp", y_type, x_type, -1, compute, (), "backward_broadcast")


@pytest.mark.parametrize(
    ("n", "most"),
    [(1, (8, 0)), (2, (2, 1)), (33, (4, 1)), (128, (4, 1)), (4096, (4, 1)), (50257, (12, 4)), (2**22, (4, 2))],
)
def test_lengths_narrow_it_down(n, most):
    """Rows of one element have no even gradient, being contiguous, and are columns side by side."""
    for which, bound in zip(BACKWARD, most, strict=True):
        some = native.kernels_to_warm("softmax", BF16, BF16, -1, 90, [n], which)
        assert min(bound, 1) <= len(some) == len(set(some)) <= bound


def compiled_in(plan: dict) -> tuple:
    """What a kernel has compiled into it of the plan of a gradient."""
    if plan["tier"].startswith("columns"):
        return column_kernel(plan)
    numbers = native.Plan(*plan["plan"])
    threads = numbers.threads_per_row if plan["tier"] == "warp" else 0
    blocks = numbers.blocks_per_row if plan["tier"] == "cluster" else 1
    return numbers._replace(threads_per_row=threads, blocks_per_row=blocks, smem_vecs=0)


@pytest.mark.parametrize("compute", [80, 90, 100])
@pytest.mark.parametrize(("x_type", "dx_type"), [(F32, F32), (BF16, BF16), (F32, BF16), (F64, F64)])
@pytest.mark.parametrize(
    ("function", "which"), [("softmax", which) for which in BACKWARD] + [("logsumexp", "backward")]
)
def test_any_rows_and_views_are_covered(x_type, dx_type, function, which, compute):
    rng = random.Random(0)
    known = native.kernels_to_warm(function, x_type, dx_type, -1, compute, (), which)
    kernels = {compiled_in(plan_of(kernel)) for kernel in known}
    assert len(kernels) == len(known)
    for _ in range(2000):
        n, rows = int(2 ** rng.uniform(1, 28)) if rng.random() < 0.9 else 1, int(2 ** rng.uniform(0, 20))
        if n == 1 and which == "backward_broadcast":  # it is contiguous
            continue
        lse = function == "logsumexp"
        at = rng.randrange(8) * (dx_type if lse else x_type).itemsize
        addresses = (0, at, 0, 0) if lse else (0, 0, at, 0)
        options = {"addresses": addresses, "grad_is_broadcast": which == "backward_broadcast", "arch": compute}
        plan = native.backward_plan(function, rows, n, x_type, dx_type, **options)
        assert compiled_in(plan) in kernels, (rows, n, at, plan)


# The cache


@needs_nvrtc
def test_warmup_fills_the_cache_with_those_of_gradients_too(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    functions, lengths = ["softmax", "logsumexp", "state"], [100]
    options = {"functions": functions, "dtypes": [F32, (BF16, F32)], "lengths": lengths, "arch": 90}
    forward = onepass.warmup(**options)
    count = onepass.warmup(**options, backward=True)
    assert len(list(tmp_path.iterdir())) == count

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


@needs_nvrtc
def test_many_kernels_are_compiled_by_several_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    compiled = native.counts()[0]
    lengths = [3, 50257, 100003]
    count = onepass.warmup(functions=["softmax"], dtypes=[BF16], lengths=lengths, backward=True, arch=80)
    assert count > 12, "or one process does"
    assert len(list(tmp_path.iterdir())) == count
    assert native.counts()[0] == compiled, "none of them here"


@needs_nvrtc
def test_the_command_says_how_many(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    arguments = ("--arch", "90", "--functions", "log_softmax", "--dtypes", "bf16:f32", "--lengths", "64")
    forward = int(call(*arguments).output.split()[0])
    result = call(*arguments, "--backward")
    count = len(list(tmp_path.iterdir()))
    assert count > forward
    said = f"{count} kernels for compute capability 9.0, {count - forward} of them compiled now\n"
    assert result.output == said


# With a GPU


@pytest.mark.gpu
def test_no_gradient_of_contiguous_rows_compiles_after_it(tmp_path, monkeypatch):
    """In a process of its own, since kernels stay loaded: any length, number of rows and view, of the sum too."""
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
