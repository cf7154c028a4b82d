"""Warming up for calls over other dims than the last: which kernels that takes, and that no call waits for one."""

import math
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import onepass
from lib.warmup import BF16, F16, F32, F64, TYPES, call, column_kernel, names, needs_nvrtc, plan_of
from onepass import native
from onepass.validation import reduces_to

# kernels of columns of a function and a pair of types
MOST = {"forward": 1500, "backward": 900, "backward_broadcast": 1500}


def of_columns(kernels: list[str]) -> set[tuple]:
    return {column_kernel(plan) for plan in map(plan_of, kernels) if plan["tier"].startswith("columns")}


def random_call(rng: random.Random, n: int) -> tuple[list[int], list[int]]:
    """Sizes of a contiguous tensor, and dims that a call is over, `n` elements a column."""
    outer, inner = (int(2 ** rng.uniform(0, bits)) for bits in (8, rng.choice([4, 10, 14])))
    more = rng.choice([2, 3, 8])
    if rng.random() < 0.4 and n % more == 0 and n > more:  # nothing of a column lies side by side
        sizes = [n // more, inner, more, outer]
        return (sizes, [0, 2]) if rng.random() < 0.5 else ([outer, n // more, inner, more], [1, 3])
    inner = inner // 8 * 8 if rng.random() < 0.4 and inner >= 8 else inner
    return [outer, n, inner], [1]


def plan_for(
    function: str, which: str, types: tuple, compute: int, sizes: list[int], dims: list[int], first: int, kind: str
) -> dict:
    """Of a call on contiguous tensors. `first`: with which element of its memory the input, or the result's gradient,
    begins; `kind`: "fresh", "in place", or of a gradient "one a column"."""
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    kept = [1 if i in dims else size for i, size in enumerate(sizes)]
    one_a_row = [0 if i in dims else math.prod(kept[i + 1 :]) for i in range(len(sizes))]
    lse, gpu = function == "logsumexp", {"arch": compute}
    if which == "forward":
        x_type, y_type = types
        at = first * x_type.itemsize, first * y_type.itemsize if kind == "in place" else 0
        plan = native.plan(function, True, sizes, strides, one_a_row if lse else strides, dims, *types, *at, **gpu)
    else:
        even = which == "backward_broadcast"
        grad = [0] * len(sizes) if even else one_a_row if lse or kind == "one a column" else strides
        addresses = (0, first * types[1].itemsize, 0, 0) if lse else (0, 0, first * types[0].itemsize, 0)
        each = strides, strides, grad, one_a_row if lse else [0] * len(sizes)
        plan = native.gradient_plan(function, sizes, each, dims, *types, addresses, **gpu)
    return {**plan, "sizes": sizes, "dims": dims, "first": first}


def random_plans(count: int, n: int | None, function: str, which: str, types: tuple, compute: int) -> Iterator[dict]:
    """Of calls over other dims, whose columns have `n` elements, or any number; tensors begin at any element."""
    rng = random.Random(0)
    for _ in range(count):
        sizes, dims = random_call(rng, n or int(2 ** rng.uniform(1, rng.choice([8, 12, 16, 24]))))
        kind = rng.choice(["fresh", "fresh", "in place", "one a column"])
        plan = plan_for(function, which, types, compute, sizes, dims, rng.choice([0, 0, 1, 2, 3, 4, 6]), kind)
        if plan["tier"].startswith("columns"):
            yield plan


def functions_of(which: str, x_type: torch.dtype, y_type: torch.dtype) -> tuple[str, ...]:
    given, result = (x_type, y_type) if which == "forward" else (y_type, x_type)
    both = which != "backward_broadcast" and reduces_to("logsumexp", given, result)
    return ("softmax", "logsumexp") if both else ("softmax",)


CASES = [(*types, 90) for types in TYPES] + [(BF16, BF16, compute) for compute in (80, 100)]


def each_type(cases: list[tuple]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("x_type", "y_type", "compute"), cases, ids=lambda t: str(t).removeprefix("torch."))


@each_type([case for case in CASES if case[0] != F16])  # which goes as bfloat16 does, as the next test sees
@pytest.mark.parametrize("which", native.PASSES)
def test_any_call_over_other_dims_is_covered(which, x_type, y_type, compute):
    for function in functions_of(which, x_type, y_type):
        known = native.kernels_to_warm(function, x_type, y_type, -1, compute, (), which, True)
        assert len(names(known)) == len(known)
        kernels, seen = of_columns(known), set()
        assert 10 < len(kernels) <= MOST[which]
        for plan in random_plans(2000, None, function, which, (x_type, y_type), compute):
            assert column_kernel(plan) in kernels, plan
            seen.add(column_kernel(plan))
        assert len(seen) > len(kernels) // 6, "so many of them are asked for"


@each_type(CASES)
@pytest.mark.parametrize("which", native.PASSES)
def test_calls_over_named_lengths_are_covered(which, x_type, y_type, compute):
    """Other lengths do not make up for what the walk of one leaves out."""
    for function in functions_of(which, x_type, y_type):
        for n in (21, 1000, 30000):
            known = of_columns(native.kernels_to_warm(function, x_type, y_type, -1, compute, [n], which, True))
            for plan in random_plans(700, n, function, which, (x_type, y_type), compute):
                assert column_kernel(plan) in known, plan


@pytest.mark.parametrize("which", ["forward", "backward_broadcast"])
@pytest.mark.parametrize("n", [2049, 3000, 4096])
def test_wide_tiles_and_narrow_ones_are_covered(n, which):
    """Where there are many tiles, and few."""
    known = of_columns(native.kernels_to_warm("softmax", F32, F32, -1, 90, [n], which, True))
    for outer in (1, 40, 397):
        for inner in (*range(2, 80), 196, 1092, 1500):
            plan = plan_for("softmax", which, (F32, F32), 90, [outer, n, inner], [1], inner % 3, "fresh")
            assert column_kernel(plan) in known, plan


@pytest.mark.parametrize(
    ("function", "which", "types", "compute", "sizes", "dims"),
    [  # blocks of the chip share tiles, or there are tiles for all
        ("softmax", "forward", (BF16, BF16), 90, [3, 1500, 550], [1]),
        ("softmax", "backward_broadcast", (BF16, BF16), 90, [3, 1500, 550], [1]),
        ("softmax", "backward", (BF16, BF16), 90, [7, 1500, 345], [1]),
        ("softmax", "forward", (BF16, BF16), 90, [5, 30000, 16], [1]),
        ("softmax", "forward", (BF16, F32), 80, [58, 7, 3, 101], [0, 2]),
        ("logsumexp", "backward", (F32, F32), 90, [156, 20017, 248], [1]),
        ("logsumexp", "backward", (BF16, BF16), 90, [14, 5852, 79, 2], [1, 3]),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, list) else None,
)
def test_numbers_of_tiles_are_covered(function, which, types, compute, sizes, dims):
    n = math.prod(sizes[i] for i in dims)
    plan = plan_for(function, which, types, compute, sizes, dims, 0, "fresh")
    assert plan["tier"] in ("columns-grid", "columns-twopass")
    assert column_kernel(plan) in of_columns(native.kernels_to_warm(function, *types, -1, compute, [n], which, True))


@pytest.mark.parametrize("which", native.PASSES)
def test_rows_are_there_beside_them(which):
    kinds = ("softmax", BF16, BF16, -1, 90, [2, 1000])
    rows, both = ({*native.kernels_to_warm(*kinds, which, dims)} for dims in (False, True))
    assert rows < both
    assert not of_columns([*rows])


def test_lengths_narrow_it_down():
    every = of_columns(native.kernels_to_warm("softmax", BF16, BF16, -1, 90, (), "forward", True))
    for n in (1, 21, 197, 1000, 4096, 131072):
        some = of_columns(native.kernels_to_warm("softmax", BF16, BF16, -1, 90, [n], "forward", True))
        assert 8 <= len(some) <= 400
        assert some <= every


@needs_nvrtc
def test_warmup_fills_the_cache_with_them(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    options = {"functions": ["logsumexp"], "dtypes": [F64], "lengths": [4], "arch": 90}
    rows = onepass.warmup(**options, backward=True)
    count = onepass.warmup(**options, backward=True, all_dims=True)
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
    arguments = ("--arch", "80", "--functions", "logsumexp", "--dtypes", "f64", "--lengths", "2", "--all-dims")
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
