"""What the tests of the fast path share: the outcome of a call with it and without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lib.support import maker, same
from onepass import functional


def rows() -> Tensor:
    return maker(torch.float32)(3, 4)


class Watch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


def outcome(call: Any) -> Any:
    """What a call does: its result with all that can be told of it, or the error's type and words."""
    try:
        y = call()
    except Exception as error:
        return type(error), (str(error), type(error.__context__))  # no trace of the first attempt
    return y, (y.dtype, y.shape, y.stride(), y.device, y.layout, y.requires_grad, y.is_inference(), y.is_neg())


def assert_same_both_ways(monkeypatch: Any, call: Any) -> Any:
    quick = outcome(call)
    with monkeypatch.context() as patch:
        patch.setattr(functional, "call_boxed", lambda *_: None)
        slow = outcome(call)
    assert quick[1] == slow[1]
    if isinstance(slow[0], type):
        assert quick[0] is slow[0]
    elif slow[0].device.type != "meta":
        assert same(quick[0].flatten(), slow[0].flatten())  # of any number of dims
    return quick[0]
