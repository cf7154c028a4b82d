"""The cross-entropy of a linear layer, without all of its logits in memory."""

from typing import Any

import torch
from torch import Tensor

from ._engines import resolve
from .loss_arithmetic import LossSpec
from .loss_ops import _launch_cross, _launch_cross_backward
from .losses import _check_classes, _check_options, _check_softcap
from .scored import _accumulator
from .validation import FLOATS, TAKES

__all__ = ["linear_cross_entropy"]

_PARTS, _LEAST = 16, 64 << 20  # chunks of rows, and the least bytes of the logits of a chunk


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
    """cross_entropy(hidden @ weight.T + bias, target), of which some rows of logits exist at a time.

    The products are torch's; the loss and its gradient, which takes the place of the logits, are onepass's. With "mean"
    and "sum" the forward computes the gradients too, so that logits are computed once; without a reduction the backward
    computes them again.

    Args:
        hidden: (..., E), float32, float64, float16 or bfloat16.
        weight: (C, E), of the same dtype, or both are cast as torch.autocast has it. Its gradient is added up over
            chunks in its own dtype. A DTensor is gathered, and its gradient is the mean of those of all ranks, as
            FSDP has it, where it lies.
        target: a class per row, of an integer dtype, of the shape of `hidden` without its last dim.
        bias: (C), or None; a DTensor likewise.
        ignore_index, label_smoothing, z_loss, softcap, engine: as `onepass.cross_entropy` takes them.
        reduction: "mean", "sum" or "none".
        chunk: rows whose logits exist at a time. By default a sixteenth of them, or as many as 64 MB of logits hold.

    Returns:
        A tensor of the dtype of the logits, of shape (), or that of the target without a reduction.

    Raises:
        ValueError: shapes that do not go together, an unknown reduction, a chunk below 1. TypeError: dtypes that differ
        or are not taken. IndexError: a class that does not exist (on a GPU it stops the program). RuntimeError: a
        gradient of the gradient, which it has not; smoothing outside of [0, 1].

    Source: logits in chunks of rows with gradients in the forward are those of Hsu et al., arXiv:2410.10989.

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
        chunk = max(1, -(-rows.shape[0] // _PARTS), _LEAST // max(1, classes * rows.element_size()))
    loss = LinearCrossEntropy.apply(rows, weight, bias, index, reduction, chunk, spec)
    return loss.to(hidden.dtype).reshape(target.shape if reduction == "none" else ())


def _gathered(t: Any) -> Tensor:
    """The whole of a DTensor."""
    if not hasattr(t, "full_tensor"):
        return t
    from torch.distributed.tensor import Partial

    mesh = t.device_mesh
    return _WithShare.apply(t.full_tensor(grad_placements=[Partial()] * mesh.ndim), mesh.size())


class _WithShare(torch.autograd.Function):
    """The same, whose gradient is divided by `ranks` before those of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g / ctx.ranks, None


class LinearCrossEntropy(torch.autograd.Function):
    """The loss of rows, in the dtype that they are computed in."""

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
        wide = _accumulator(rows.dtype, rows.dtype)
        total = (index != spec.ignore_index).sum().to(wide)
        needed = ctx.needs_input_grad[:3]
        grads = _Gradients(rows, weight, bias, needed) if any(needed) and reduction != "none" else None
        one = torch.ones((), dtype=wide, device=rows.device)
        losses = []
        for first in range(0, rows.shape[0], chunk):
            part = slice(first, first + chunk)
            logits = torch.nn.functional.linear(rows[part], weight, bias)
            of_part, own = index[part].contiguous(), "none" if reduction == "none" else "sum"
            loss, terms, _ = _launch_cross(logits, of_part, None, own, spec)
            losses.append(loss if reduction == "none" else loss.unsqueeze(0))
            if grads is not None:
                call = terms, total, logits, of_part, None, reduction, spec, True
                grads.add(part, _launch_cross_backward(one, None, *call))
        result = torch.cat(losses) if losses else rows.new_empty(0, dtype=wide)
        if reduction != "none":
            result = result.sum(dtype=torch.float64).to(wide)
            result = result / total if reduction == "mean" else result
        made = () if grads is None else grads.made()
        ctx.save_for_backward(*made) if grads is not None else ctx.save_for_backward(rows, weight, bias, index)
        ctx.call, ctx.needed = (reduction, chunk, spec), needed
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # of create_graph=True
            raise RuntimeError(
                "onepass.linear_cross_entropy(): its gradient has no gradient; take cross_entropy of all logits"
            )
        reduction, chunk, spec = ctx.call
        if reduction != "none":
            grads: list[Tensor | None] = [None if t is None else t * g.to(t.dtype) for t in ctx.saved_tensors]
            return *grads, None, None, None, None
        rows, weight, bias, index = ctx.saved_tensors
        sums = _Gradients(rows, weight, bias, ctx.needed)
        for first in range(0, rows.shape[0], chunk):
            part = slice(first, first + chunk)
            logits = torch.nn.functional.linear(rows[part], weight, bias)
            of_part = index[part].contiguous()
            _, terms, total = _launch_cross(logits, of_part, None, "none", spec)
            call = terms, total, logits, of_part, None, "none", spec, True
            sums.add(part, _launch_cross_backward(g[part], None, *call))
        return *sums.made(), None, None, None, None


class _Gradients:
    """The gradients of rows, weight and bias, from those of the logits of some rows after others."""

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, needed: Any) -> None:
        self.rows, self.weight = rows, weight
        self.of_rows = torch.empty_like(rows) if needed[0] else None
        self.of_weight = torch.zeros_like(weight) if needed[1] else None
        wide = _accumulator(rows.dtype, rows.dtype)
        self.of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None
        self.bias_dtype = None if bias is None else bias.dtype

    def add(self, part: slice, of_logits: Tensor) -> None:
        if self.of_rows is not None:
            torch.mm(of_logits, self.weight, out=self.of_rows[part])
        if self.of_weight is not None:
            self.of_weight.addmm_(of_logits.t(), self.rows[part])
        if self.of_bias is not None:
            self.of_bias += of_logits.sum(0, dtype=self.of_bias.dtype)

    def made(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        of_bias = None if self.of_bias is None else self.of_bias.to(self.bias_dtype)
        return self.of_rows, self.of_weight, of_bias
