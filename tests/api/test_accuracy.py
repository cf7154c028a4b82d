"""As accurate as torch: error against the exact result at most 1.25 times torch's on the same input, or 2 ulp.

Errors are relative; those of log_softmax and logsumexp are relative to max(1, |result|). Both the largest and the mean
count. The judge is the float64 reference, and for float64 results NumPy's 80-bit floats, or else the judge's own error
would decide.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from lib.samples import ROWS
from lib.support import DTYPES, SOFTMAXES, TORCH, ours, slow
from onepass import reference

LENGTHS = [1, 2, 5, 16, 31, 197, 781, 1024, 2047, 5003, 70_000]
LEAST, ELEMENTS = 3, 20_000  # of each length, at least
EXTENDED = np.finfo(np.longdouble).eps < np.finfo(np.float64).eps / 100


def _exact(function: str, x: Tensor) -> np.ndarray:
    """The function over the last dim of x, in 80-bit floats where x is float64."""
    if x.dtype is not torch.float64 or not EXTENDED:
        f = getattr(reference, function)
        return (f(x, -1, True) if function == "logsumexp" else f(x, -1)).cpu().numpy()
    v = x.cpu().numpy().astype(np.longdouble)
    v = -v if function == "softmin" else v
    with np.errstate(all="ignore"):
        m = v.max(-1, keepdims=True)
        e = np.exp(v - m)
        total = e.sum(-1, keepdims=True)
        if function == "logsumexp":
            return m + np.log(total)
        return v - m - np.log(total) if function == "log_softmax" else e / total


def _errors(function: str, got: Tensor, exact: np.ndarray) -> tuple[float, float]:
    """(largest, mean) relative error of the normal results."""
    y = got.cpu().double().numpy().astype(exact.dtype)
    scale = np.abs(exact)
    if function in ("log_softmax", "logsumexp"):
        scale = np.maximum(scale, 1)
    with np.errstate(all="ignore"):
        counts = scale >= torch.finfo(got.dtype).smallest_normal * 2
        counts &= np.isfinite(exact) & (scale <= torch.finfo(got.dtype).max)
        error = (np.abs(y - exact) / scale)[counts]
    return (float(error.max()), float(error.mean())) if error.size else (0.0, 0.0)


def _misses(function: str, x: Tensor, engine: str, out: torch.dtype | None = None) -> list[str]:
    """Where the call is less accurate than the rule has it, in words."""
    f, theirs = ours(function), TORCH[function]
    if function == "logsumexp":
        mine, torchs = f(x, -1, True, engine=engine), theirs(x, -1, True)
    else:
        mine, torchs = f(x, -1, dtype=out, engine=engine), theirs(x, -1, dtype=out)
    return _compare(function, x if out is None else x.to(out), mine, torchs)


def _compare(function: str, x: Tensor, mine: Tensor, torchs: Tensor) -> list[str]:
    exact = _exact(function, x)
    eps = torch.finfo(mine.dtype).eps
    theirs = [
        e if np.isfinite(e) else 0.0 for e in _errors(function, torchs, exact)
    ]  # torch's sums of float16 overflow
    pairs = zip(("largest", "mean"), _errors(function, mine, exact), theirs, strict=True)
    return [
        f"{function} {tuple(x.shape)} strides {x.stride()} -> {mine.dtype}: {what} error {got / eps:.2f} ulp, "
        f"torch has {limit / eps:.2f}"
        for what, got, limit in pairs
        if not got <= max(1.25 * limit, 2 * eps)
    ]


SOME = ("normal", "wide", "rising")  # for those dtypes that take long to judge, or do as another
every_kind = [(d, k) if d in DTYPES[::3] or k in SOME else slow(d, k) for d in DTYPES for k in ROWS]


@pytest.mark.parametrize(("dtype", "kind"), every_kind, ids=lambda v: str(v).removeprefix("torch."))
def test_rows(function, dtype, kind, engine, device):
    generator = torch.Generator().manual_seed(len(kind))
    misses = []
    for n in LENGTHS if dtype in DTYPES[:2] else LENGTHS[::2]:
        x = ROWS[kind](max(LEAST, ELEMENTS // n), n, generator)
        if dtype is torch.float16:
            x = x.clamp(-6e4, 6e4)
        misses += _misses(function, x.to(dtype).to(device), engine)
    assert not misses, "\n".join(misses)


@pytest.mark.parametrize("kind", ["normal", "offset", "integers", "wide"])
@pytest.mark.parametrize("given", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_with_another_dtype(given, kind, engine, device):
    generator = torch.Generator().manual_seed(1)
    x = ROWS[kind](24, 1999, generator).to(given).to(device)
    misses = [m for function in SOFTMAXES for out in DTYPES for m in _misses(function, x, engine, out)]
    assert not misses, "\n".join(misses)


@pytest.mark.parametrize("kind", ["normal", "offset", "integers", "constant", "wide"])
def test_columns(function, dtype, kind, engine, device):
    """Strided rows: the reduced dim is not the last in memory."""
    generator = torch.Generator().manual_seed(2)
    misses = []
    on_a_gpu = [(80, 256), (64, 1030), (32, 2048)] if device == "cuda" else []  # in tiles of whole vectors
    for rows, n in ((2000, 19), (150, 257), (16, 4097), *on_a_gpu):
        x = ROWS[kind](rows, n, generator).to(dtype).to(device)
        misses += _misses(function, x.t().contiguous().t(), engine)
    assert not misses, "\n".join(misses)


def test_the_judge_can_fail(function, dtype):
    x = torch.randn(16, 300, dtype=torch.float64).to(dtype)
    y = TORCH[function](x, -1, True) if function == "logsumexp" else TORCH[function](x, -1)
    assert not _compare(function, x, y, y)
    worse = y * (1 + 6 * torch.finfo(dtype).eps) + (6 * torch.finfo(dtype).eps if "log" in function else 0)
    assert len(_compare(function, x, worse, y)) == 2
