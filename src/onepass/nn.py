"""The functions as modules, in the place of torch.nn's: no state, picklable, with the functions' own arguments."""

from typing import Any

import torch
from torch import Tensor

from . import functional

__all__ = ["LogSoftmax", "LogSumExp", "Softmax", "Softmin"]


class _Module(torch.nn.Module):
    """A call of a function whose arguments are attributes, those that are not the default ones in the repr."""

    def extra_repr(self) -> str:
        given = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "training"}
        default = {"dtype": None, "engine": "auto", "keepdim": False}
        return ", ".join(f"{name}={value}" for name, value in given.items() if value != default.get(name, ...))


class _Family(_Module):
    _function: Any

    def __init__(self, dim: functional.Dim = -1, *, dtype: torch.dtype | None = None, engine: str = "auto") -> None:
        super().__init__()
        self.dim, self.dtype, self.engine = dim, dtype, engine

    def forward(self, input: Tensor) -> Tensor:
        return self._function(input, self.dim, self.dtype, engine=self.engine)


class Softmax(_Family):
    """`onepass.softmax` over `dim` as a module, in the place of `torch.nn.Softmax`.

    Args:
        dim, dtype, engine: as `onepass.softmax` takes them. Without a dim it is the last one; torch.nn.Softmax guesses
            one, with a warning.

    A call takes a tensor of any shape and gives one of its shape, of its dtype or `dtype`. Errors are those of
    `onepass.softmax`, at the call.

    >>> import torch, onepass
    >>> onepass.nn.Softmax(dim=1)(torch.zeros(2, 4))[0]
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    >>> torch.nn.Sequential(torch.nn.Linear(8, 4), onepass.nn.Softmax(dtype=torch.float32))
    Sequential(
      (0): Linear(in_features=8, out_features=4, bias=True)
      (1): Softmax(dim=-1, dtype=torch.float32)
    )
    """

    _function = staticmethod(functional.softmax)


class LogSoftmax(_Family):
    """`onepass.log_softmax` over `dim` as a module, in the place of `torch.nn.LogSoftmax`. As `Softmax` in all else.

    >>> import torch, onepass
    >>> onepass.nn.LogSoftmax(dim=0)(torch.zeros(3, 4))[0]
    tensor([-1.0986, -1.0986, -1.0986, -1.0986])
    """

    _function = staticmethod(functional.log_softmax)


class Softmin(_Family):
    """`onepass.softmin` over `dim` as a module, in the place of `torch.nn.Softmin`. As `Softmax` in all else.

    >>> import torch, onepass
    >>> onepass.nn.Softmin()(torch.tensor([0.0, 0.0, torch.inf]))
    tensor([0.5000, 0.5000, 0.0000])
    """

    _function = staticmethod(functional.softmin)


class LogSumExp(_Module):
    """`onepass.logsumexp` over `dim` as a module; torch.nn has none.

    Args:
        dim, keepdim, engine: as `onepass.logsumexp` takes them.

    A call takes a tensor of any shape and gives one of its dtype, without the reduced dims or with size 1 there. Errors
    are those of `onepass.logsumexp`, at the call.

    >>> import torch, onepass
    >>> onepass.nn.LogSumExp(dim=1)(torch.zeros(2, 10))
    tensor([2.3026, 2.3026])
    """

    def __init__(self, dim: functional.Dim, keepdim: bool = False, *, engine: str = "auto") -> None:
        super().__init__()
        self.dim, self.keepdim, self.engine = dim, keepdim, engine

    def forward(self, input: Tensor) -> Tensor:
        return functional.logsumexp(input, self.dim, self.keepdim, engine=self.engine)
