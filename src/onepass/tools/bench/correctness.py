"""The tensors of a case (random input, output, and for a backward the upstream gradient), and the check of results.

Every call that is timed is first compared with the float64 definition. A small tensor is compared completely. Of a
large one, whole rows are compared: the first, the last and others drawn at random. A reference of 2 million elements is
then enough (0.1 s on two cores).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from onepass import reference
from onepass.tools.bench.cases import ITEMSIZE, Case

_ALIGN = 512  # bytes, the alignment of torch's allocators
SAMPLE = 2 << 20  # a tensor of more elements is compared at this many, in rows drawn at random
# The largest error by the dtype of the result, relative to the output (for the backward to the sum of its terms, for
# logarithms to at least 1). 16-bit types: 2 ulp of 2**-10 and 2**-7, one for the rounding of the result and one for
# what comes before. float32: torch stays below 1e-6 on these shapes; dropping one element of 50000 exceeds 1e-5.
TOLERANCE = {"float64": 1e-11, "float32": 1e-5, "float16": 2 * 2.0**-10, "bfloat16": 2 * 2.0**-7}


@dataclass
class Inputs:
    """`out` receives the result, for a backward the input's gradient; if it is None, the call allocates its result.

    `side` are the arguments of scores, as `onepass.softmax` takes them.
    """

    case: Case
    dtype: str
    x: Tensor
    out: Tensor | None = None
    grad: Tensor | None = None
    side: dict[str, Any] = field(default_factory=dict)


def required_bytes(case: Case, dtype: str) -> int:
    """The memory of a case: its tensors, one more output, and for logsumexp the targets of the two copies.

    A sliced case, and one with scores, is compared with a copy between two other tensors.
    """
    out = prod(case.shape) * ITEMSIZE[case.result_dtype(dtype)]
    if case.layout == "sliced" or case.scores:
        out += case.bytes(dtype)
    if case.function == "logsumexp" and case.direction == "forward":
        out += out // 2
    return case.bytes(dtype) + out


def make_inputs(case: Case, dtype: str, device: torch.device, seed: int) -> Inputs:
    """Random normal data, which depends only on the seed, the suite and the case's name."""
    generator = _generator(case, device, seed)
    x = _empty(case, case.shape, dtype, device).normal_(generator=generator)
    if case.in_place:
        return Inputs(case, dtype, x, out=x)
    y = _empty(case, case.out_shape(), case.out_dtype or dtype, device)
    grad = None
    if case.direction == "backward":
        y, grad = _empty(case, case.shape, dtype, device), y.normal_(generator=generator)
    return Inputs(case, dtype, x, y, grad, _make_side(case, x, generator))


def _make_side(case: Case, x: Tensor, generator: torch.Generator) -> dict[str, Any]:
    """The arguments of scores. A mask is True for three of four elements, and for the first of each row."""
    side: dict[str, Any] = dict(case.scores)
    for name, shape in case.side_shapes().items():
        made = torch.empty(shape, dtype=x.dtype, device=x.device)
        if name == "mask":
            side[name] = made.uniform_(generator=generator) < 0.75
            side[name].select(case.dims()[0] - len(case.shape), 0).fill_(True)
        elif name == "scale":
            side[name] = made.uniform_(0.5, 1.5, generator=generator)
        elif name == "alibi":  # the slopes of heads
            side[name] = made.uniform_(-8, 0, generator=generator).exp2_()
        else:
            side[name] = made.normal_(generator=generator).requires_grad_(name in case.grads)
    return side


def distances(case: Case, side: dict[str, Any], device: torch.device) -> Tensor:
    """The distance from each query's own key to each key."""
    queries, keys = case.shape[-2:]
    own = torch.arange(queries, device=device) + side.get("offset", keys - queries)
    return torch.arange(keys, device=device) - own[:, None]


def blocked(case: Case, side: dict[str, Any], device: torch.device) -> Tensor | None:
    """A bool tensor that broadcasts, True for masked-out elements; None if there are none."""
    left, right = side.get("window", (None, None))
    right = 0 if side.get("causal") else right
    parts = [~side["mask"]] if "mask" in side else []
    parts += [] if left is None else [distances(case, side, device) < -left]
    parts += [] if right is None else [distances(case, side, device) > right]
    return reduce(torch.logical_or, parts) if parts else None


def prepare_output(inputs: Inputs, seed: int) -> None:
    """Fills the output with NaN or, if it is the input too, restores the input."""
    if inputs.case.in_place:
        inputs.x.normal_(generator=_generator(inputs.case, inputs.x.device, seed))
    elif inputs.out is not None:
        inputs.out.fill_(float("nan"))


def _generator(case: Case, device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(crc32(f"{seed}/{case.suite}/{case.name}".encode()))


def _empty(case: Case, shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    """A tensor in the case's layout, or a contiguous one if its shape is not the case's."""
    layout, _, order = (case.layout if shape == case.shape else "").partition(" ")
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
    if layout == "transposed":
        return torch.empty((*shape[:-2], shape[-1], shape[-2]), **options).mT
    if layout == "permuted":
        dims = [int(d) for d in order.split(",")]
        return torch.empty([shape[d] for d in dims], **options).permute([dims.index(d) for d in range(len(dims))])
    if layout == "sliced":
        pitch = shape[-1] + 1 + shape[-1] % 2
        return torch.empty((*shape[:-1], pitch), **options)[..., : shape[-1]]
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    return torch.empty(shape, **options, memory_format=memory_format)


def replicate(inputs: Inputs, count: int) -> list[Inputs]:
    """`count` copies of the inputs, each tensor aligned as an allocation of its own would be."""

    def repeat(like: Tensor | None) -> list[Tensor | None]:
        if like is None:
            return [None] * count
        extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        step = -(-extent * like.element_size() // _ALIGN) * _ALIGN // like.element_size()
        storage = torch.empty(count * max(step, 1), dtype=like.dtype, device=like.device)
        return [storage.as_strided(like.shape, like.stride(), i * step).copy_(like) for i in range(count)]

    columns = zip(repeat(inputs.x), repeat(inputs.out), repeat(inputs.grad), strict=True)
    return [replace(inputs, x=x, out=out, grad=grad) for x, out, grad in columns if x is not None]


# The check


def reference_bytes(case: Case) -> int:
    """The most memory that a check takes: 128 MiB, or more if single rows are longer than 2 million elements. With
    scores it is twice that, and the check of a bias's gradient takes two float64 gradients of the input.
    """
    elements = prod(case.shape)
    if elements > SAMPLE:
        elements = (max(2, SAMPLE // case.row()) + 2) * case.row() if case.rows() > 1 else case.row()
    whole = 16 * prod(case.shape) if case.grads else 0
    return 8 * (16 if case.scores else 8) * min(elements, prod(case.shape)) + whole


class Checker:
    """The reference of one case, computed once and compared with every provider."""

    def __init__(self, inputs: Inputs, seed: int):
        self.inputs = inputs
        case = inputs.case
        self.dims = case.dims()
        self.tolerance = TOLERANCE[case.result_dtype(inputs.dtype)]
        self.rows = _draw_rows(case.rows(), case.row(), seed)
        x = self._select(inputs.x)
        if case.out_dtype:  # torch's rule: the input is rounded to dtype first
            x = x.to(getattr(torch, case.out_dtype))
        forward: Callable[..., Tensor] = getattr(reference, case.function)
        # The derivative of a score in the input, and the factor by which the error may be larger if each step to the
        # scores is rounded to the input's dtype.
        self.slope: Tensor | float = -1.0 if case.function == "softmin" else 1.0
        self.stepwise: Tensor | float = 1.0
        y = self._softmax_of_scores(x.double()) if inputs.side else forward(x, -1)
        if inputs.grad is None:
            self.expected = y
            # The error is relative to the value. A subnormal has fewer digits, so `check` asks for its last place.
            self.scale = y.abs()
            if case.function in ("log_softmax", "logsumexp"):
                self.scale = self.scale.clamp(min=1.0)
            return
        # The derivatives are computed from the tensor that a forward saves: the result in its own dtype. Both terms of
        # a difference such as y * (grad - dot) can be far larger than the difference, and each is rounded. A provider's
        # saved y may differ by one ulp; if y is a logarithm, the relative error of exp(y) is |y| times as large.
        grad, saved = self._select(inputs.grad).double(), y.to(inputs.grad.dtype).double()
        if case.function == "logsumexp":
            self.expected = grad.unsqueeze(-1) * (x.double() - saved.unsqueeze(-1)).exp()
            self.scale = self.expected.abs() * (1 + saved.abs().unsqueeze(-1))
        elif case.function == "log_softmax":
            weights = saved.exp()
            self.expected = grad - weights * grad.sum(-1, keepdim=True)
            self.scale = grad.abs() + weights * (1 + saved.abs()) * grad.abs().sum(-1, keepdim=True)
        else:
            self.expected = self.slope * saved * (grad - (saved * grad).sum(-1, keepdim=True))
            smallest = saved.clamp(min=smallest_number(inputs.grad.dtype) / self.tolerance)
            self.scale = smallest * (1 + grad.abs() + (saved * grad).abs().sum(-1, keepdim=True)) * abs(self.slope)

    def _softmax_of_scores(self, x: Tensor) -> Tensor:
        """The definition in float64 for the compared rows of the input. Sets `slope` and `stepwise`."""
        case, side = self.inputs.case, self.inputs.side

        def rows_of(value: Tensor) -> Tensor:
            return self._select(value.detach().expand(case.shape)).double()

        scale = side.get("scale", 1.0)
        self.slope = rows_of(scale) if isinstance(scale, Tensor) else scale
        s = x * self.slope
        magnitude = s.abs()  # the sum of the magnitudes of all values that are rounded on the way
        if cap := side.get("softcap"):
            t = (s / cap).tanh()
            s, self.slope = cap * t, self.slope * (1 - t * t)
            magnitude = magnitude + s.abs()
        added = [rows_of(side["bias"])] if "bias" in side else []
        if "alibi" in side:
            added.append(-rows_of(side["alibi"][..., None, None]) * rows_of(distances(case, side, x.device)).abs())
        for term in added:
            s = s + term
            magnitude = magnitude + term.abs() + s.abs()
        out = blocked(case, side, x.device)
        s = s if out is None else s.masked_fill(rows_of(out).bool(), -torch.inf)
        if "sink" in side:
            sink = torch.as_tensor(side["sink"], device=x.device)
            s = torch.cat([s, rows_of(sink)[:, :1]], -1)
        y = reference.softmax(s, -1)[:, : x.shape[-1]]
        self.stepwise = 1 + magnitude + (y * magnitude).sum(-1, keepdim=True)
        return y

    def check(self, result: Tensor | tuple[Tensor, ...], stepwise: bool = False) -> str | None:
        """What is wrong with a call's result, or None. A wrong shape, a wrong dtype and any NaN are errors.

        `stepwise`: whether each step to the scores was rounded to the input's dtype. If there are several results, the
        further ones are the gradients of the case's `grads`.
        """
        if isinstance(result, tuple):
            result, *others = result
            wrong = (self._check_sum(result, *each) for each in zip(self.inputs.case.grads, others, strict=True))
            return self.check(result, stepwise) or next(filter(None, wrong), None)
        case = self.inputs.case
        shape = case.shape if case.direction == "backward" else case.out_shape()
        dtype = getattr(torch, case.result_dtype(self.inputs.dtype))
        if tuple(result.shape) != shape or result.dtype != dtype:
            return f"shape {tuple(result.shape)}, {result.dtype}; it should be {shape}, {dtype}"
        got = self._select(result).double()
        # Scores have at most the precision of float32, and the absolute error of a score is a relative error of exp().
        score = self.stepwise * torch.finfo(torch.float32).eps / self.tolerance if self.inputs.side else 0.0
        scale = self.scale * (self.stepwise if stepwise else 1 + score)
        error = (got - self.expected).abs() / scale.clamp(min=smallest_number(dtype) / self.tolerance)
        error = torch.where(error.isnan(), float("inf"), error)  # so that argmax finds a NaN
        at = int(error.argmax())
        worst = float(error.reshape(-1)[at])
        if worst <= self.tolerance:
            return None
        row, column = (at, 0) if error.dim() == 1 else divmod(at, error.shape[-1])
        row = row if self.rows is None else int(self.rows[row])
        where = f"row {row}" if error.dim() == 1 else f"row {row}, element {column}"
        value = float("nan") if bool(got.reshape(-1)[at].isnan()) else worst
        return f"error {value:.1e} at {where}, allowed {self.tolerance:.1e}"

    def _check_sum(self, dx: Tensor, name: str, result: Tensor) -> str | None:
        """What is wrong with the gradient of a bias, or None. Without scale and softcap it is a sum of the gradient of
        the input."""
        if result.shape != self.inputs.side[name].shape or result.dtype != dx.dtype:
            return f"the gradient of {name} is of shape {tuple(result.shape)}, {result.dtype}"
        terms = dx.double()
        expected, scale = terms.sum_to_size(result.shape), terms.abs().sum_to_size(result.shape)
        worst = float(
            ((result.double() - expected).abs() / scale.clamp(min=smallest_number(dx.dtype) / self.tolerance)).max()
        )
        return None if worst <= self.tolerance else f"error {worst:.1e} of the gradient of {name}"

    def _select(self, tensor: Tensor) -> Tensor:
        """The compared rows as a matrix (rows, N), or as (rows,) for a tensor without `dim`."""
        outer = [d for d in range(len(self.inputs.case.shape)) if d not in self.dims]
        if tensor.dim() == len(outer):
            flat = tensor.reshape(-1)
            return flat if self.rows is None else flat[self.rows.to(flat.device)]
        view = tensor.permute(*outer, *self.dims)
        if self.rows is None:
            return view.reshape(-1, self.inputs.case.row())
        index = torch.unravel_index(self.rows.to(tensor.device), [tensor.shape[d] for d in outer])
        return view[index].reshape(len(self.rows), -1)  # copies the drawn rows only


def smallest_number(dtype: torch.dtype) -> float:
    """The smallest number that a result has to distinguish from 0: the smallest subnormal number, except for bfloat16.
    Its subnormal numbers are also subnormal in float32, and kernels for half types may flush those to 0."""
    limits = torch.finfo(dtype)
    return limits.smallest_normal * (1 if dtype is torch.bfloat16 else limits.eps)


def _draw_rows(rows: int, row: int, seed: int) -> Tensor | None:
    """The numbers of the rows to compare, sorted; None for all."""
    if rows * row <= SAMPLE:
        return None
    count = min(rows, max(2, SAMPLE // row))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(rows, (count,), generator=generator)
    return torch.cat([drawn, torch.tensor([0, rows - 1])]).unique()
