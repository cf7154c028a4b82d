"""Warming up for calls over other dims than the last: which kernels that takes, and that no call waits for one."""

import math
import random
import subprocess
import sys

import pytest

import onepass
from onepass import native
from onepass.checks import reduces_to
from warmup_support import BF16, F64, TYPES, call, column_kernel, names, needs_nvrtc, plan_of

MOST = {"forward": 1300, "backward": 700, "backward_even": 1300}  # kernels of columns of a function and a pair of types


def of_columns(kernels: list[str]) -> set[tuple]:
    return {column_kernel(plan) for plan in map(plan_of, kernels) if plan["tier"].startswith("columns")}


def random_call(rng: random.Random) -> tuple[list[int], list[int]]:
    """Sizes of a contiguous tensor, and dims that a call is over."""
    outer, inner = (int(2 ** rng.uniform(0, bits)) for bits in (8, rng.choice([4, 10, 14])))
    n = int(2 ** rng.uniform(1, rng.choice([8, 12, 16, 24])))
    if rng.random() < 0.2:  # nothing of a column lies side by side
        more = rng.choice([2, 3, 8, 64])
        return ([outer, max(n // 8, 2), inner, 8], [1, 3]) if rng.random() < 0.5 else ([n, inner, more, outer], [0, 2])
    inner = inner // 8 * 8 if rng.random() < 0.4 and inner >= 8 else inner
    return [outer, n, inner], [1]


def random_plan(rng: random.Random, function: str, which: str, types: tuple, compute: int) -> dict | None:
    """Of a call whose tensors begin at any element; None where it is over rows."""
    sizes, dims = random_call(rng)
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    kept = [1 if i in dims else size for i, size in enumerate(sizes)]
    one_a_row = [0 if i in dims else math.prod(kept[i + 1 :]) for i in range(len(sizes))]
    first = rng.choice([0, 0, 1, 2, 3, 4, 6])
    lse, gpu = function == "logsumexp", {"compute": compute}
    if which == "forward":
        x_type, y_type = types
        at = first * x_type.itemsize, rng.choice([0, first * y_type.itemsize])  # fresh, or in place
        plan = native.plan(function, True, sizes, strides, one_a_row if lse else strides, dims, *types, *at, **gpu)
    else:
        even = which == "backward_even"
        grad = [0] * len(sizes) if even else one_a_row if lse or rng.random() < 0.2 else strides
        addresses = (0, first * types[1].itemsize, 0, 0) if lse else (0, 0, first * types[0].itemsize, 0)
        each = strides, strides, grad, one_a_row if lse else [0] * len(sizes)
        plan = native.gradient_plan(function, sizes, each, dims, *types, addresses, **gpu)
    return {**plan, "sizes": sizes, "dims": dims, "first": first} if plan["tier"].startswith("columns") else None


@pytest.mark.parametrize(
    ("x_type", "y_type", "compute"),
    [(*types, 90) for types in TYPES] + [(BF16, BF16, compute) for compute in (80, 100)],
    ids=lambda t: str(t).removeprefix("torch."),
)
@pytest.mark.parametrize("which", native.PASSES)
def test_any_call_over_other_dims_is_covered(which, x_type, y_type, compute):
    rng = random.Random(0)
    given, result = (x_type, y_type) if which == "forward" else (y_type, x_type)
    for function in ("softmax", "logsumexp") if reduces_to("logsumexp", given, result) else ("softmax",):
        if function == "logsumexp" and which == "backward_even":
            continue
        known = native.kernels_to_warm(function, x_type, y_type, -1, compute, (), which, True)
        assert len(names(known)) == len(known)
        kernels, seen = of_columns(known), set()
        assert 10 < len(kernels) <= MOST[which]
        for _ in range(2000):
            plan = random_plan(rng, function, which, (x_type, y_type), compute)
            if plan is not None:
                assert column_kernel(plan) in kernels, plan
                seen.add(column_kernel(plan))
        assert len(seen) > len(kernels) // 6, "so many of them are asked for"


@pytest.mark.parametrize("which", native.PASSES)
def test_rows_are_there_beside_them(which):
    kinds = ("softmax", BF16, BF16, -1, 90, [2, 1000])
    rows, both = ({*native.kernels_to_warm(*kinds, which, dims)} for dims in (False, True))
    assert rows < both
    assert not of_columns([*rows])


@pytest.mark.parametrize("n", [1, 21, 197, 1000, 4096, 131072])
def test_lengths_narrow_it_down(n):
    every = of_columns(native.kernels_to_warm("softmax", BF16, BF16, -1, 90, (), "forward", True))
    some = of_columns(native.kernels_to_warm("softmax", BF16, BF16, -1, 90, [n], "forward", True))
    assert 8 <= len(some) <= 360
    assert some <= every


@needs_nvrtc
def test_warmup_fills_the_cache_with_them(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    options = {"functions": ["logsumexp"], "dtypes": [F64], "lengths": [4], "compute": 90}
    rows = onepass.warmup(**options, gradients=True)
    count = onepass.warmup(**options, gradients=True, dims=True)
    assert len(list(tmp_path.iterdir())) == count
    kinds = [
        (which, native.kernels_to_warm("logsumexp", F64, F64, -1, 90, [4], which, True)) for which in native.PASSES
    ]
    assert sum(len(of_columns(kernels)) for _, kernels in kinds) == count - rows > 8
    compiled, from_disk = native.counts()
    for which, kernels in kinds:
        for kernel in kernels:
            native.warm_kernel("logsumexp", F64, F64, -1, 90, kernel, which)
    assert native.counts() == (compiled, from_disk + count)


@needs_nvrtc
def test_the_command_takes_dims(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    arguments = ("--compute", "80", "--functions", "logsumexp", "--dtypes", "f64", "--lengths", "2", "--dims")
    count = len(native.kernels_to_warm("logsumexp", F64, F64, -1, 80, [2], "forward", True))
    result = call(*arguments)
    assert result.output == f"{count} kernels for compute capability 8.0, {count} of them compiled now\n"


# With a GPU


@pytest.mark.gpu
def test_no_call_over_other_dims_compiles_after_it(tmp_path, monkeypatch):
    """In a process of its own, since kernels stay loaded: any sizes and view, forward and backward."""
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    code = """
import random, torch, onepass
from onepass import native
lengths = [21, 1000, 30000]
onepass.warmup(dtypes=[torch.bfloat16], functions=["softmax"], lengths=lengths, gradients=True, dims=True)
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
