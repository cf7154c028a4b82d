"""What the tests of the Triton engine share: plans that force a tier, rows of special values, processes of their own.

Triton reads TRITON_INTERPRET when it is imported, and one process cannot both interpret and compile. So the kernels run
in two processes of their own, whatever the variable is in this one and whatever other tests have imported.
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass.triton as engine
from lib.support import assert_defined, maker, same
from onepass import reference
from onepass.triton import Plan

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF, NAN = math.inf, math.nan

# Plans that force a tier on rows of up to 64: tiles that no row count divides, chunks of 16 that no row length divides,
# and grids that need several launches.
TIERS = {
    "row": Plan("row", block=64, rows=1, depth=1, num_warps=1, num_stages=1, grid=1000),
    "rows of 4 a program": Plan("row", block=64, rows=4, depth=1, num_warps=1, num_stages=1, grid=1),
    "online": Plan("online", block=8, rows=1, depth=2, num_warps=1, num_stages=1, grid=1000),
    "online, split launch": Plan("online", block=32, rows=1, depth=1, num_warps=1, num_stages=1, grid=2),
}


def name_of(value: Any) -> str:
    return str(value).removeprefix("torch.")


def reduce_by_halves() -> None:
    """Has the interpreter combine halves of a block: one element after another, as it does, takes ten times as long."""
    try:
        import numpy
        from triton.runtime.interpreter import ReduceOps
    except ImportError:  # the tests say so
        return
    one_by_one = ReduceOps.generic_reduce

    def reduce(self: Any, values: Any) -> Any:
        parts, axis, types = [value.handle.data for value in values], self.axis, [value.dtype for value in values]
        if axis is None or parts[0].shape[axis].bit_count() != 1:
            return one_by_one(self, values)
        while parts[0].shape[axis] > 1:
            halves = zip(*(numpy.split(part, 2, axis) for part in parts), strict=True)
            first, second = (
                [self.to_tensor(part, kind) for part, kind in zip(half, types, strict=True)] for half in halves
            )
            made = self.combine_fn.fn(*first, *second)
            parts = [one.handle.data for one in (made if isinstance(made, tuple) else (made,))]
        whole = parts if self.keep_dims else [part.squeeze(axis) for part in parts]
        return [self.to_tensor(part, kind) for part, kind in zip(whole, types, strict=True)]

    ReduceOps.generic_reduce = reduce


def process(interpret: str) -> Iterator[Callable[..., Any]]:
    """Gives one thing: what calls a function in a process where TRITON_INTERPRET is that."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = interpret  # inherited by the child, which starts at the first call
    ready = reduce_by_halves if interpret == "1" else None
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=ready) as pool:
        try:
            pool.submit(os.getpid).result()
        finally:
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            else:
                os.environ["TRITON_INTERPRET"] = before
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def unavailable(device: str) -> str | None:
    return engine.unavailable(torch.device(device))


def poisoned(function: str, x: Tensor, dims: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A result that no answer looks like."""
    shape = [1 if function == "logsumexp" and d in dims else size for d, size in enumerate(x.shape)]
    return torch.full(shape, 777.0, dtype=dtype or x.dtype, device=x.device)


def special(dtype: torch.dtype, device: str = "cpu", n: int = 53) -> Tensor:
    """Rows whose special values fill whole chunks (of 16 or 32) at every place, with ordinary rows beside them."""
    chunk = 32 * n // 53
    rows: list[Callable[[Tensor], Any]] = [
        lambda r: r.fill_(-INF),
        lambda r: r[chunk:].fill_(-INF),
        lambda r: r[:chunk].fill_(-INF),
        lambda r: r[chunk // 2 : chunk].fill_(-INF),
        lambda r: r[1:].fill_(-INF),
        lambda r: r[:-1].fill_(-INF),
        lambda r: r[0].fill_(INF),
        lambda r: r[-1].fill_(INF),
        lambda r: r.fill_(INF),
        lambda r: (r.fill_(-INF), r[chunk + 1].fill_(INF)),
        lambda r: r[3].fill_(NAN),
        lambda r: (r.fill_(-INF), r[-1].fill_(NAN)),
        lambda r: (r[0].fill_(NAN), r[-1].fill_(INF)),
        lambda r: r.fill_(NAN),
        lambda r: r.fill_(-5000.0),
        lambda r: r.fill_(torch.finfo(dtype).max),
        lambda r: r.fill_(torch.finfo(dtype).min),
        lambda r: (r.fill_(-INF), r[chunk // 3].fill_(torch.finfo(dtype).min)),
        lambda r: (r.fill_(0.0), r[chunk + 2].fill_(1000.0)),
        lambda r: r.copy_(torch.arange(n, device=r.device) * 3.0),
        lambda r: r.copy_(torch.arange(n, device=r.device) * -3.0),
    ]
    x = maker(dtype, device)(len(rows) + 3, n)  # the ordinary rows: the first, the last but one and the last
    for k, spoil in enumerate(rows):
        spoil(x[k + 1])
    return x


def assert_special(function: str, got: Tensor, x: Tensor) -> None:
    want = reference.logsumexp(x, 1, True) if function == "logsumexp" else getattr(reference, function)(x, 1)
    assert same(got.isnan(), want.isnan())
    assert_defined(function, got, x, 1)
