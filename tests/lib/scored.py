"""Calls with scores: options of every kind, and the definition that results are compared with."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.support import DTYPES, accumulator, maker
from onepass import reference

F32, F64, F16, BF16 = DTYPES
INF, NAN = torch.inf, torch.nan
Options = dict[str, Any]
FLOAT_TENSORS = ("scale", "bias", "alibi", "sink")  # these have gradients


def defined(function: str, x: Tensor, dim: Any, options: Mapping[str, Any], keepdim: bool = False) -> Tensor:
    """The definition, for an input that is already rounded to the call's dtype."""
    named: Options = {"keepdim": keepdim} if function == "logsumexp" else {}
    return getattr(reference, function)(x, dim, **named, **options)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, size: float, note: Any = "") -> None:
    """Allows one rounding to `dtype`, and a few of the accumulator for numbers of the magnitude `size`."""
    want = torch.where(want.abs() > torch.finfo(dtype).max, want.sign() * INF, want)
    allowed = torch.finfo(dtype).eps + (24 + 4 * size) * torch.finfo(accumulator(dtype)).eps
    torch.testing.assert_close(
        got.double(), want, rtol=allowed, atol=allowed, equal_nan=True, msg=lambda text: f"{note}: {text}"
    )


def assert_scored(
    function: str, got: Tensor, x: Tensor, dim: Any, options: Mapping[str, Any], keepdim: bool = False
) -> None:
    want = defined(function, x, dim, options, keepdim)
    assert got.shape == want.shape
    numbers = {name: value for name, value in options.items() if name not in ("sink", "empty")}
    scores = reference.score(function, x.double(), **numbers).detach()
    size = float(scores.masked_fill(~scores.isfinite(), 0).abs().amax()) if scores.numel() else 0.0
    call = f"{function} over {dim} of {tuple(x.shape)} {x.dtype} with {sorted(options)}"
    assert_close(got.detach(), want.detach(), got.dtype, size + x.numel() ** 0.5, call)


def positive(t: Tensor) -> Tensor:
    return t.abs() + 0.5


def half_true(make: Callable[..., Tensor], *shape: int) -> Tensor:
    return make(*shape) > -1


# Each function makes the options of a call on an input of the shape (2, 3, 5, 7), whose last dim is reduced.
SHAPE = (2, 3, 5, 7)
CASES: dict[str, Callable[[Callable[..., Tensor]], Options]] = {
    "scale": lambda r: {"scale": 0.3},
    "negative scale": lambda r: {"scale": -0.3},
    "no scale": lambda r: {"scale": 0.0},
    "scale of each head": lambda r: {"scale": positive(r(3, 1, 1))},
    "scale of all": lambda r: {"scale": positive(r())},
    "bias": lambda r: {"bias": r(*SHAPE)},
    "bias of each key": lambda r: {"bias": r(7)},
    "bias of each query": lambda r: {"bias": r(2, 1, 5, 1)},
    "mask": lambda r: {"mask": half_true(r, *SHAPE)},
    "mask of padding": lambda r: {"mask": (torch.arange(7) < torch.tensor([[5], [7]]))[:, None, None]},
    "causal": lambda r: {"causal": True},
    "causal with an offset": lambda r: {"causal": True, "offset": 0},
    "causal, nothing for some": lambda r: {"causal": True, "offset": -2},
    "window": lambda r: {"window": (2, 1)},
    "window to the left": lambda r: {"window": (1, None), "offset": 1},
    "window to the right": lambda r: {"window": (None, 0)},
    "window without bounds": lambda r: {"window": (None, None)},
    "causal window": lambda r: {"window": (2, 3), "causal": True},
    "alibi": lambda r: {"alibi": positive(r(3))},
    "alibi of each batch": lambda r: {"alibi": positive(r(2, 1)), "offset": 1},
    "softcap": lambda r: {"softcap": 1.5},
    "sink": lambda r: {"sink": 0.0},
    "no sink": lambda r: {"sink": -INF},
    "sink of all": lambda r: {"sink": r()},
    "empty": lambda r: (
        {"mask": half_true(r, *SHAPE) & torch.tensor([True, False, True, True, True])[:, None]} | {"empty": "zero"}
    ),
    "all": lambda r: {
        "scale": 0.4,
        "bias": r(3, 1, 7),
        "mask": half_true(r, 2, 1, 1, 7),
        "causal": True,
        "window": (3, None),
        "offset": 1,
        "alibi": positive(r(3)),
        "softcap": 2.0,
        "sink": r(1, 3, 1, 1),
        "empty": "zero",
    },
}
every_case = pytest.mark.parametrize("case", CASES)


def options_of(case: str, dtype: torch.dtype = F64, device: str = "cpu") -> Options:
    made = CASES[case](maker(F64, seed=3, scale=1.0))
    return {
        name: value.to(device=device, dtype=None if value.dtype is torch.bool else dtype)
        if isinstance(value, Tensor)
        else value
        for name, value in made.items()
    }


def tensors_of(options: Options) -> dict[str, Tensor]:
    return {name: options[name] for name in FLOAT_TENSORS if isinstance(options.get(name), Tensor)}


# torch.autograd's batched checks warn of operators without a batching rule.
unbatched = pytest.mark.filterwarnings("ignore::UserWarning")
