"""The cross-entropy of a linear layer, without all of its logits in memory."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._engines import resolve
from .loss_arithmetic import LossSpec
from .loss_ops import _launch_cross, _launch_cross_backward
from .losses import _check_classes, _check_options, _check_softcap
from .scored import _accumulator
from .validation import FLOATS, TAKES, is_dtensor, refuse_dtensors

__all__ = ["linear_cross_entropy"]

_PARTS, _LEAST = 11, 64 << 20  # the number of chunks of rows, and the fewest bytes of the logits of a chunk
_TILE = 128  # rows of a tile of a matrix product: a chunk is a multiple of them
_LINE = 128  # bytes of a cache line


@torch._disable_dynamo
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk: int | None = None,
    engine: str = "auto",
) -> Tensor:
    """cross_entropy(hidden @ weight.T + bias, target), with the logits of only some rows in memory at a time.

    The matrix products are torch's. The loss and its gradient, which overwrites the logits, are onepass's. With "mean"
    and "sum" the forward computes the gradients too, so that logits are computed once. With "none", and if a graph is
    retained for another backward, the backward computes the logits again.

    Args:
        hidden: (..., E), float32, float64, float16 or bfloat16.
        weight: (C, E), of the dtype of hidden, or both are cast under torch.autocast. Its gradient is summed over
            chunks in its own dtype. A DTensor is gathered. Its gradient has its placements and is the mean of the
            gradients of all ranks, as in FSDP.
        target: a class per row, of an integer dtype, of the shape of `hidden` without its last dim.
        bias: (C), or None. A DTensor is treated as that of weight is.
        ignore_index, label_smoothing, z_loss, softcap, engine: as `onepass.cross_entropy` takes them.
        reduction: "mean", "sum" or "none".
        chunk: the number of rows whose logits are in memory at a time. By default an eleventh of the rows, or as many
            rows as have 64 MB of logits if that is more.

    Returns:
        The loss, of the dtype of the logits. Its shape is (), or the target's if reduction is "none".

    Raises:
        ValueError: shapes that do not match, an unknown reduction, a chunk below 1. TypeError: dtypes that differ or
        are not supported. IndexError: a class that does not exist (on a GPU it stops the program). RuntimeError: a
        gradient of the gradient, which is not supported; smoothing outside of [0, 1].

    Source: Hsu et al., arXiv:2410.10989, compute logits in chunks of rows, with the gradients in the forward.

    >>> import torch, onepass
    >>> hidden, weight = torch.ones(4, 8, requires_grad=True), torch.zeros(10, 8, requires_grad=True)
    >>> loss = onepass.linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2, -100]))
    >>> loss
    tensor(2.3026, grad_fn=<ViewBackward0>)
    >>> loss.backward()
    >>> weight.grad[:4, 0]
    tensor([-0.2333, -0.2333, -0.2333,  0.1000])
    """
    name = "linear_cross_entropy"
    _check_options(name, reduction, label_smoothing)
    if chunk is not None and chunk < 1:
        raise ValueError(f"onepass.{name}(): chunk must be at least 1, got {chunk}")
    refuse_dtensors(name, hidden, target)
    weight, bias = _gathered(weight), None if bias is None else _gathered(bias)
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"onepass.{name}(): takes hidden (..., E) and weight (C, E), got {list(hidden.shape)} and "
            f"{list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"onepass.{name}(): bias has the shape [{weight.shape[0]}], got {list(bias.shape)}")
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        to = torch.get_autocast_dtype(kind)
        hidden, weight, bias = hidden.to(to), weight.to(to), None if bias is None else bias.to(to)
    if hidden.dtype not in FLOATS or any(t is not None and t.dtype is not hidden.dtype for t in (weight, bias)):
        got = [t.dtype for t in (hidden, weight, bias) if t is not None]
        raise TypeError(f"onepass.{name}(): takes tensors of one dtype, {TAKES}, got {got}")
    _check_classes(name, target, list(hidden.shape[:-1]), hidden)
    spec = LossSpec(
        1,
        softcap=_check_softcap(name, softcap),
        spread=label_smoothing > 0,
        is_cross=True,
        ignore_index=ignore_index,
        smoothing=label_smoothing,
        z_loss=z_loss,
        wide=True,
        engine=resolve(engine, hidden.device),
    )
    rows, classes = hidden.reshape(-1, hidden.shape[-1]), weight.shape[0]
    index = target.reshape(-1).long().contiguous()
    if chunk is None:
        chunk = max(-(-rows.shape[0] // _PARTS), _LEAST // max(1, classes * rows.element_size()))
        chunk = -(-chunk // _TILE) * _TILE
    loss = LinearCrossEntropy.apply(rows, weight, bias, index, reduction, chunk, spec)
    return loss.to(hidden.dtype).reshape(target.shape if reduction == "none" else ())


def _gathered(t: Any) -> Tensor:
    """The full tensor of a DTensor; any other tensor as it is."""
    if not is_dtensor(t):
        return t
    from torch.distributed.tensor import Partial

    mesh = t.device_mesh
    return _WithShare.apply(t.full_tensor(grad_placements=[Partial()] * mesh.ndim), mesh.size())


class _WithShare(torch.autograd.Function):
    """The identity. It divides the gradient by `ranks`, before the gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g / ctx.ranks, None


class LinearCrossEntropy(torch.autograd.Function):
    """The loss, in the dtype of the computation."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        index: Tensor,
        reduction: str,
        chunk: int,
        spec: LossSpec,
    ) -> Tensor:
        ctx.call, ctx.needed = _Call(reduction, chunk, spec), ctx.needs_input_grad[:3]
        ctx.save_for_backward(rows, weight, bias, index)
        one = torch.ones((), dtype=_accumulator(rows.dtype, rows.dtype), device=rows.device)
        needs_grads = any(ctx.needed) and reduction != "none"
        loss, ctx.grads = ctx.call.run(rows, weight, bias, index, one if needs_grads else None, ctx.needed)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # of create_graph=True
            raise RuntimeError(
                "onepass.linear_cross_entropy(): its gradient has no gradient; take cross_entropy of all logits"
            )
        # The gradients of the forward are returned and not kept: another backward computes them again.
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            grads = ctx.call.run(*ctx.saved_tensors, g, ctx.needed)[1]
        else:
            grads = [None if t is None else t.mul_(g.to(t.dtype)) for t in grads]
        return *grads, None, None, None, None


class _Call(NamedTuple):
    reduction: str
    chunk: int
    spec: LossSpec

    def run(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, g: Tensor | None, needed: Any
    ) -> tuple[Tensor, Any]:
        """The loss. If g, the gradient of the loss, is given, also the gradients of rows, weight and bias."""
        reduction, chunk, spec = self
        wide = _accumulator(rows.dtype, rows.dtype)
        total = (index != spec.ignore_index).sum().to(wide)
        sums = None if g is None else _Gradients(rows, weight, bias, needed)
        logits_of, losses = _Logits(rows, weight, bias, chunk), []
        for first in range(0, rows.shape[0], chunk):
            part = slice(first, first + chunk)
            logits, of_part = logits_of(part), index[part].contiguous()
            loss, terms, _ = _launch_cross(logits, of_part, None, "none" if reduction == "none" else "sum", spec)
            losses.append(loss if reduction == "none" else loss.unsqueeze(0))
            if sums is not None and g is not None:
                own = g[part] if reduction == "none" else g
                call = terms, total, logits, of_part, None, reduction, spec, True
                sums.add(part, _launch_cross_backward(own, None, *call))
        result = torch.cat(losses) if losses else rows.new_empty(0, dtype=wide)
        if reduction != "none":
            result = result.sum(dtype=torch.float64).to(wide)
            result = result / total if reduction == "mean" else result
        return result, None if sums is None else sums.made()


class _Logits:
    """The logits of one chunk of rows at a time, always in the same memory. The row stride is a multiple of a cache
    line, because products with unaligned rows take several times as long on a GPU."""

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> None:
        self.rows, self.weight, self.bias = rows, weight.t(), bias
        line, classes = _LINE // rows.element_size(), weight.shape[0]
        self.memory = rows.new_empty(min(chunk, rows.shape[0]), -(-classes // line) * line)[:, :classes]

    def __call__(self, part: slice) -> Tensor:
        rows = self.rows[part]
        logits = self.memory[: rows.shape[0]]
        if self.bias is None:
            return torch.mm(rows, self.weight, out=logits)
        return torch.addmm(self.bias, rows, self.weight, out=logits)


class _Gradients:
    """The gradients of rows, weight and bias, computed from the gradients of the logits chunk by chunk."""

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, needed: Any) -> None:
        self.rows, self.weight = rows, weight
        self.of_rows = torch.empty_like(rows) if needed[0] else None
        self.of_weight = (torch.empty_like if len(rows) else torch.zeros_like)(weight) if needed[1] else None
        wide = _accumulator(rows.dtype, rows.dtype)
        self.of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None
        self.bias_dtype = None if bias is None else bias.dtype

    def add(self, part: slice, of_logits: Tensor) -> None:
        if self.of_rows is not None:
            torch.mm(of_logits, self.weight, out=self.of_rows[part])
        if self.of_weight is not None:
            torch.addmm(self.of_weight, of_logits.t(), self.rows[part], beta=int(part.start > 0), out=self.of_weight)
        if self.of_bias is not None:
            self.of_bias += of_logits.sum(0, dtype=self.of_bias.dtype)

    def made(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        of_bias = None if self.of_bias is None else self.of_bias.to(self.bias_dtype)
        return self.of_rows, self.of_weight, of_bias
