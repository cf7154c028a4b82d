"""Right before fast: every call that is timed is first compared with the float64 definition.

All of a small tensor is compared. Of a large one whole rows are: the first, the last and others drawn at random, so
that a reference of 2 million elements (0.1 s on two cores) is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from onepass import reference
from onepass.tools.bench.cases import Case
from onepass.tools.bench.work import Work

WHOLE = 2 << 20  # elements up to which all is compared, and the elements of the drawn rows above that
# Largest error by the dtype of the result, relative to the output (to the sum of its terms for the backward, to at
# least 1 for logarithms). Half types: 2 ulp of 2**-10 and 2**-7, one for the rounding of the result and one for what
# comes before. float32: torch stays below 1e-6 on these shapes; a kernel that drops one element of 50000 is over 1e-5.
TOLERANCE = {"float64": 1e-11, "float32": 1e-5, "float16": 2 * 2.0**-10, "bfloat16": 2 * 2.0**-7}


def reference_bytes(case: Case) -> int:
    """Memory that a check takes at most: the reference of the compared rows and what is made on the way, in float64.

    It is 128 MiB, more only where single rows are longer than 2 million elements.
    """
    elements = prod(case.shape)
    if elements > WHOLE:
        elements = (max(2, WHOLE // case.row()) + 2) * case.row() if case.rows() > 1 else case.row()
    return 8 * 8 * min(elements, prod(case.shape))


@dataclass
class Verdict:
    """`error` is the largest error in units of what is compared with `tolerance`; NaN where the result has a NaN."""

    ok: bool
    error: float
    tolerance: float
    where: str
    form: str = ""  # what is wrong before any number is compared

    def __str__(self) -> str:
        return self.form or f"error {self.error:.1e} at {self.where}, allowed {self.tolerance:.1e}"


class Checker:
    """Holds the reference of one case; made once, compared with every provider."""

    def __init__(self, work: Work, seed: int):
        self.work = work
        case = work.case
        self.dims = case.dims()
        self.tolerance = TOLERANCE[case.result_dtype(work.dtype)]
        self.rows = _draw(case.rows(), case.row(), seed)
        x = self._take(work.x)
        if case.out_dtype:  # torch's rule: the input is rounded to dtype first
            x = x.to(getattr(torch, case.out_dtype))
        forward: Callable[..., Tensor] = getattr(reference, case.function)
        if work.grad is None:
            self.expected = forward(x, -1)
            # relative to the value; a subnormal has fewer digits, so that its last place is the least to ask
            self.scale = self.expected.abs()
            if case.function in ("log_softmax", "logsumexp"):
                self.scale = self.scale.clamp(min=1.0)
            return
        # The formulas, of what a forward saves: the result in its own dtype.
        grad = self._take(work.grad).double()
        saved = forward(x, -1).to(work.grad.dtype).double()
        # Both terms of a difference like y * (grad - dot) can be far larger than it, and each is rounded. The y that a
        # provider saved may be the next number; where it is a logarithm, exp() of it is then off by |y| times as much.
        if case.function == "logsumexp":
            self.expected = grad.unsqueeze(-1) * (x.double() - saved.unsqueeze(-1)).exp()
            self.scale = self.expected.abs() * (1 + saved.abs().unsqueeze(-1))
        elif case.function == "log_softmax":
            weights = saved.exp()
            self.expected = grad - weights * grad.sum(-1, keepdim=True)
            self.scale = grad.abs() + weights * (1 + saved.abs()) * grad.abs().sum(-1, keepdim=True)
        else:
            sign = -1 if case.function == "softmin" else 1
            self.expected = sign * saved * (grad - (saved * grad).sum(-1, keepdim=True))
            result = torch.finfo(work.grad.dtype)
            least = saved.clamp(min=result.smallest_normal * result.eps / self.tolerance)
            self.scale = least * (1 + grad.abs() + (saved * grad).abs().sum(-1, keepdim=True))

    def poison(self) -> None:
        """Fills the output with NaN: an element that a call does not write is then found."""
        if self.work.out is not None:
            self.work.out.fill_(float("nan"))

    def check(self, result: Tensor) -> Verdict:
        """Compares a call's result. A wrong shape or dtype is wrong, and so is any NaN."""
        case = self.work.case
        shape = case.shape if case.direction == "backward" else case.out_shape()
        dtype = getattr(torch, case.result_dtype(self.work.dtype))
        if tuple(result.shape) != shape or result.dtype != dtype:
            what = f"shape {tuple(result.shape)}, {result.dtype}; it should be {shape}, {dtype}"
            return Verdict(False, float("nan"), self.tolerance, "", what)
        got = self._take(result).double()
        floor = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / self.tolerance
        error = (got - self.expected).abs() / self.scale.clamp(min=floor)
        error = torch.where(error.isnan(), float("inf"), error)  # so that the worst is the NaN
        at = int(error.argmax())
        worst = float(error.reshape(-1)[at])
        row, column = (at, 0) if error.dim() == 1 else divmod(at, error.shape[-1])
        row = row if self.rows is None else int(self.rows[row])
        where = f"row {row}" if error.dim() == 1 else f"row {row}, element {column}"
        value = float("nan") if bool(got.reshape(-1)[at].isnan()) else worst
        return Verdict(worst <= self.tolerance, value, self.tolerance, where)

    def _take(self, tensor: Tensor) -> Tensor:
        """(rows, N) of what is compared; (rows,) of a tensor that has no `dim`."""
        keeps = [d for d in range(len(self.work.case.shape)) if d not in self.dims]
        if tensor.dim() == len(keeps):
            flat = tensor.reshape(-1)
            return flat if self.rows is None else flat[self.rows.to(flat.device)]
        outer = [tensor.shape[d] for d in keeps]
        view = tensor.permute(*keeps, *self.dims)
        if self.rows is None:
            return view.reshape(-1, self.work.case.row())
        rest, at = self.rows, list[Tensor]()
        for size in reversed(outer):  # the row's number as an index of each outer dim: no copy of the whole tensor
            at.insert(0, (rest % size).to(tensor.device))
            rest = rest // size
        return view[tuple(at)].reshape(len(self.rows), -1)


def _draw(rows: int, row: int, seed: int) -> Tensor | None:
    """Numbers of the rows to compare, sorted; None for all."""
    if rows * row <= WHOLE:
        return None
    count = min(rows, max(2, WHOLE // row))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(rows, (count,), generator=generator)
    return torch.cat([drawn, torch.tensor([0, rows - 1])]).unique()
