"""As accurate as torch: error against the exact result at most 1.25 times torch's on the same input, or 2 ulp.

Errors are relative; those of log_softmax and logsumexp are relative to max(1, |result|). Both the largest and the mean
count. The judge is the float64 reference, and for float64 results NumPy's 80-bit floats, or else the judge's own error
would decide.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lib.support import DTYPES, SOFTMAXES, TORCH, every_dtype, every_engine, every_function, ours
from onepass import reference

LENGTHS = [1, 2, 5, 16, 31, 197, 781, 1024, 2047, 5003, 70_000]
ROWS, ELEMENTS = 3, 20_000  # of each length, at least
EXTENDED = np.finfo(np.longdouble).eps < np.finfo(np.float64).eps / 100


def _normal(rows: int, n: int, g: torch.Generator) -> Tensor:
    return torch.randn(rows, n, generator=g, dtype=torch.float64)


def _one_hot(rows: int, n: int, g: torch.Generator) -> Tensor:
    x = torch.zeros(rows, n, dtype=torch.float64)
    x[torch.arange(rows), torch.randint(n, (rows,), generator=g)] = 9 + _normal(rows, 1, g)[:, 0]
    return x


INPUTS = {  # every row is another one, or the largest of a few errors would be chance
    "normal": _normal,
    "offset": lambda rows, n, g: _normal(rows, n, g) + 1234.567,
    "huge offset": lambda rows, n, g: _normal(rows, n, g) * 4 - 3.0e4,
    "integers": lambda rows, n, g: torch.randint(-9, 10, (rows, n), generator=g).double(),
    "large integers": lambda rows, n, g: torch.randint(0, 12, (rows, n), generator=g).double() + 1000,
    "constant": lambda rows, n, g: _normal(rows, 1, g).expand(rows, n),
    "one-hot": _one_hot,
    "wide": lambda rows, n, g: _normal(rows, n, g) * 25,
    "half -inf": lambda rows, n, g: _normal(rows, n, g).masked_fill(torch.arange(n) % 2 == 1, -torch.inf),
    "rising": lambda rows, n, g: torch.linspace(-20, 0, n, dtype=torch.float64) * (1 + 0.1 * _normal(rows, 1, g)),
}


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


@every_engine
@pytest.mark.parametrize("kind", INPUTS)
@every_dtype
@every_function
def test_rows(function, dtype, kind, engine, device):
    generator = torch.Generator().manual_seed(len(kind))
    misses = []
    for n in LENGTHS if dtype in DTYPES[:2] else LENGTHS[::2]:
        x = INPUTS[kind](max(ROWS, ELEMENTS // n), n, generator)
        if dtype is torch.float16:
            x = x.clamp(-6e4, 6e4)
        misses += _misses(function, x.to(dtype).to(device), engine)
    assert not misses, "\n".join(misses)


@every_engine
@pytest.mark.parametrize("kind", ["normal", "offset", "integers", "wide"])
@pytest.mark.parametrize("given", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_with_another_dtype(given, kind, engine, device):
    generator = torch.Generator().manual_seed(1)
    x = INPUTS[kind](24, 1999, generator).to(given).to(device)
    misses = [m for function in SOFTMAXES for out in DTYPES for m in _misses(function, x, engine, out)]
    assert not misses, "\n".join(misses)


@every_engine
@pytest.mark.parametrize("kind", ["normal", "offset", "integers", "constant", "wide"])
@every_dtype
@every_function
def test_columns(function, dtype, kind, engine, device):
    """Strided rows: the reduced dim is not the last in memory."""
    generator = torch.Generator().manual_seed(2)
    misses = []
    on_a_gpu = [(80, 256), (64, 1030), (32, 2048)] if device == "cuda" else []  # in tiles of whole vectors
    for rows, n in ((2000, 19), (150, 257), (16, 4097), *on_a_gpu):
        x = INPUTS[kind](rows, n, generator).to(dtype).to(device)
        misses += _misses(function, x.t().contiguous().t(), engine)
    assert not misses, "\n".join(misses)


@every_dtype
@every_function
def test_the_judge_can_fail(function, dtype):
    x = torch.randn(16, 300, dtype=torch.float64).to(dtype)
    y = TORCH[function](x, -1, True) if function == "logsumexp" else TORCH[function](x, -1)
    assert not _compare(function, x, y, y)
    worse = y * (1 + 6 * torch.finfo(dtype).eps) + (6 * torch.finfo(dtype).eps if "log" in function else 0)
    assert len(_compare(function, x, worse, y)) == 2
