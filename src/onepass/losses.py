"""Losses and log-probabilities of classes, computed without a softmax in memory."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction

from ._engines import resolve
from .divergence_ops import divergence_terms
from .loss_arithmetic import DivergenceSpec, LossSpec, ordered_sum
from .loss_ops import cross_entropy as call_cross_entropy
from .loss_ops import loss_terms
from .scored import _accumulator
from .settings import autocast_to_float32
from .validation import FLOATS, TAKES, check_input, wrap_dims

__all__ = ["cross_entropy", "entropy", "kl_div", "log_prob"]

_CLASS_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    return_lse: bool = False,
    inplace_backward: bool = False,
    check: bool = False,
    empty: str = "nan",
    size_average: bool | None = None,
    reduce: bool | None = None,
    engine: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The cross-entropy of logits and classes, as `torch.nn.functional.cross_entropy`.

    The forward reads the logits once. The backward reads them once more and writes the gradient. Nothing else of their
    size is allocated. Half types are computed in float32.

    Args:
        input: logits, float64, float32, float16 or bfloat16, any strides: (C), (N, C) or (N, C, d1, d2, ...) for C
            classes.
        target: a class per row, of an integer dtype, () or (N) or (N, d1, d2, ...); or class probabilities, of the
            shape of the input and a floating dtype.
        weight: a floating weight per class, (C). It gets no gradient.
        ignore_index: rows with this target class are ignored.
        reduction: "mean" (over the weights of the rows' classes), "sum" or "none".
        label_smoothing: from 0 to 1: the share of the target probability that is spread evenly over all classes.
        z_loss: adds z_loss * logsumexp(row)^2 to the loss of each row that is not ignored.
        softcap: c, for logits c * tanh(input / c).
        return_lse: whether to return (loss, logsumexp of each row). The logsumexp has the dtype of the computation and
            the shape of the target. It has a gradient too, but passes none to an ignored row.
        inplace_backward: whether the backward may overwrite the logits with their gradient. Then nothing else may need
            the logits, and they may not be a leaf. A compiled or transformed call allocates the gradient anyway.
        check: on a GPU, whether to look for classes that do not exist before the launch, which waits for the GPU. If it
            is False, such a class stops the program, as in torch (with the Triton engine its loss is NaN). On a CPU
            classes are always checked.
        empty: the mean if all rows are ignored: "nan" as in torch, or "zero".
        size_average, reduce: the older spelling of `reduction`.
        engine: as `onepass.softmax` takes it.

    Returns:
        The loss, of the input's dtype (float32 under autocast). Its shape is (), or the target's with "none".

    Raises:
        IndexError: a class that does not exist. ValueError: shapes that do not match, an unknown reduction.
        RuntimeError: dtypes or devices that do not match, a weight of another shape than (C), smoothing outside of
        [0, 1]. NotImplementedError: a weight that requires a gradient.

    Sources: fused losses of large vocabularies compute the gradient p - onehot from the saved logsumexp of each row
    (Wijmans et al., arXiv:2411.09009; Hsu et al., arXiv:2410.10989). The z-loss is from Chowdhery et al.,
    arXiv:2204.02311.

    >>> import torch, onepass
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0]], requires_grad=True)
    >>> loss = onepass.cross_entropy(logits, torch.tensor([0, 2]))
    >>> loss
    tensor(1.6672, grad_fn=<CrossFunctionBackward>)
    >>> loss.backward()
    >>> logits.grad
    tensor([[-0.1065,  0.0533,  0.0533],
            [ 0.0226,  0.4547, -0.4774]])
    """
    name = "cross_entropy"
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    _check_logits(name, input)
    dim = 0 if input.dim() == 1 else 1
    if not isinstance(target, Tensor):
        raise TypeError(f"onepass.{name}(): target must be a Tensor, got {type(target).__name__}")
    _check_options(name, reduction, label_smoothing)
    if empty not in ("nan", "zero"):
        raise ValueError(f"onepass.{name}(): empty must be 'nan' or 'zero', got {empty!r}")
    if target.device != input.device:
        raise RuntimeError(f"onepass.{name}(): target must be on {input.device}, as the input is, got {target.device}")
    cap = _check_softcap(name, softcap)
    classes = input.shape[dim]
    if weight is not None:
        _check_weight(name, weight, input, classes)
    if inplace_backward and input.requires_grad and input.is_leaf:
        raise ValueError(f"onepass.{name}(): inplace_backward would overwrite a leaf tensor with its own gradient")
    spec = LossSpec(
        dim,
        softcap=cap,
        spread=label_smoothing > 0,
        is_cross=True,
        ignore_index=ignore_index,
        smoothing=label_smoothing,
        z_loss=z_loss,
        wide=autocast_to_float32(input),
        engine=resolve(engine, input.device),
    )
    rows = [size for d, size in enumerate(input.shape) if d != dim]
    if target.is_floating_point():
        return _of_probabilities(input, target, weight, reduction, spec, return_lse)
    _check_classes(name, target, rows, input)
    if target.dtype is not torch.int64:
        target = target.long()
    if (check or not classes) and target.numel() and not torch.compiler.is_compiling():
        outside = (target != ignore_index) & ((target < 0) | (target >= classes))
        if outside.any():
            raise IndexError(f"onepass.{name}(): class {int(target[outside][0])} is out of range for {classes} classes")
    index = target if target.dim() == 1 and target.is_contiguous() else target.reshape(-1).contiguous()
    is_zero = empty == "zero" and reduction == "mean"
    alone = not (return_lse or is_zero)
    loss, *others = call_cross_entropy(input, index, weight, reduction, inplace_backward, alone, spec)
    if reduction == "none":
        loss = loss if len(rows) == 1 else loss.reshape(rows)
    elif is_zero:
        loss = torch.where(others[1] == 0, torch.zeros_like(loss), loss)
    return (loss, (others[0][0] + others[0][1]).reshape(rows)) if return_lse else loss


def _of_probabilities(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, spec: LossSpec, return_lse: bool
) -> Any:
    """The cross-entropy of a target of class probabilities, which are read once, as the logits are."""
    name = "cross_entropy"
    if target.shape != input.shape:
        raise ValueError(
            f"onepass.{name}(): target has probabilities of the input's shape {list(input.shape)}, or classes of an "
            f"integer dtype, got {target.dtype} of shape {list(target.shape)}"
        )
    if spec.ignore_index >= 0:
        raise RuntimeError(f"onepass.{name}(): ignore_index goes with classes, got probabilities")
    both = torch.promote_types(input.dtype, target.dtype)
    of_both = DivergenceSpec(spec.dim, False, 1.0, spec.softcap, spec.smoothing, spec.engine)
    m, log_l, losses, _ = divergence_terms(input.to(both), target.to(both), weight, of_both)
    losses = losses + spec.z_loss * (m + log_l).square() if spec.z_loss else losses
    if reduction == "mean" and not input.shape[spec.dim]:
        losses = losses / 0  # as torch, which divides by the number of elements over the number of classes
    rows = [size for d, size in enumerate(input.shape) if d != spec.dim]
    loss = _reduced(losses.reshape(rows), reduction).to(_accumulator(both, both) if spec.wide else input.dtype)
    return (loss, (m + log_l).reshape(rows)) if return_lse else loss


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    total = ordered_sum(losses, torch.float64)
    return total / losses.numel() if reduction == "mean" else total


def log_prob(
    input: Tensor,
    index: Tensor,
    dim: int = -1,
    *,
    temperature: float | Tensor | None = None,
    return_entropy: bool = False,
    dtype: torch.dtype | None = None,
    engine: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """log_softmax(input / temperature).gather(dim, index), the log-probabilities of some classes, in one read.

    The backward reads the logits once and writes their gradient. Nothing else of their size is allocated: policy
    gradients and distillation need no log_softmax in memory.

    Args:
        input: logits of any shape and strides, float64, float32, float16 or bfloat16.
        index: classes, of an integer dtype. One class per row if it has the input's shape without `dim`; K classes per
            row if it has the input's shape with any size K in `dim`.
        dim: the dim of the classes.
        temperature: the divisor of the logits: a number, or a tensor that broadcasts to the input's shape with size 1
            in `dim`. It gets no gradient.
        return_entropy: whether to return (log-probabilities, entropy). The entropy has the input's shape without `dim`.
        dtype: the dtype of the results, by default the input's. Half types are computed in float32, so float32 results
            cost no extra pass.
        engine: as `onepass.softmax` takes it.

    Returns:
        A tensor of the shape of `index`.

    Raises:
        IndexError: a class that does not exist (on a GPU it stops the program; with the Triton engine it gives NaN), or
        no such dim. ValueError: shapes that do not match. TypeError: unsupported dtypes. NotImplementedError: a
        temperature that requires a gradient.

    >>> import torch, onepass
    >>> logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    >>> onepass.log_prob(logits, torch.tensor([1, 0]), return_entropy=True)
    (tensor([-1.3863e+00, -3.7016e-04]), tensor([1.3863, 0.0037]))
    >>> onepass.log_prob(logits, torch.tensor([[0, 1], [0, 1]]))
    tensor([[-1.3863e+00, -1.3863e+00],
            [-3.7016e-04, -9.0004e+00]])
    """
    name = "log_prob"
    _check_logits(name, input)
    input = input if input.dim() else input.unsqueeze(0)
    (dim,) = wrap_dims(name, input, [dim])
    rows = [size for d, size in enumerate(input.shape) if d != dim]
    if not isinstance(index, Tensor):
        raise TypeError(f"onepass.{name}(): index must be a Tensor, got {type(index).__name__}")
    is_one = index.dim() == input.dim() - 1
    each = index.unsqueeze(dim) if is_one else index
    if each.dim() != input.dim() or [size for d, size in enumerate(each.shape) if d != dim] != rows:
        raise ValueError(
            f"onepass.{name}(): index has the input's shape {list(input.shape)} without dim {dim}, or any size there, "
            f"got {list(index.shape)}"
        )
    if index.dtype not in _CLASS_DTYPES:
        raise TypeError(f"onepass.{name}(): index takes integers, got {index.dtype}")
    if index.device != input.device:
        raise RuntimeError(f"onepass.{name}(): index must be on {input.device}, as the input is, got {index.device}")
    picks = each.shape[dim]
    flat = each.movedim(dim, -1).reshape(-1, picks).long().contiguous() if picks else None
    if flat is not None and flat.numel() and not input.shape[dim]:
        raise IndexError(f"onepass.{name}(): class {int(flat[0, 0])} is out of range for 0 classes")
    terms = _terms(name, input, flat, dim, temperature, return_entropy, engine)
    to = _result_dtype(name, input, dtype)
    picked = -terms[2 + return_entropy :] if picks else input.new_empty((0, terms.shape[1]))
    result = picked.reshape(picks, *rows).movedim(0, dim).to(to)
    result = result.squeeze(dim) if is_one else result
    return (result, terms[2].reshape(rows).to(to)) if return_entropy else result


def entropy(
    input: Tensor,
    dim: int = -1,
    *,
    temperature: float | Tensor | None = None,
    dtype: torch.dtype | None = None,
    engine: str = "auto",
) -> Tensor:
    """The entropy -sum(p log p) of softmax(input / temperature) over `dim`, in one read. The gradient takes one more.

    Arguments and errors are as in `log_prob`.

    Returns:
        A tensor of the input's shape without `dim`. A class of probability 0 adds 0.

    >>> import torch, onepass
    >>> onepass.entropy(torch.zeros(2, 8))
    tensor([2.0794, 2.0794])
    """
    name = "entropy"
    _check_logits(name, input)
    input = input if input.dim() else input.unsqueeze(0)
    (dim,) = wrap_dims(name, input, [dim])
    terms = _terms(name, input, None, dim, temperature, True, engine)
    rows = [size for d, size in enumerate(input.shape) if d != dim]
    return terms[2].reshape(rows).to(_result_dtype(name, input, dtype))


def _terms(
    name: str, input: Tensor, index: Tensor | None, dim: int, temperature: Any, has_entropy: bool, engine: str
) -> Tensor:
    factor, scale = 1.0, None
    if isinstance(temperature, Tensor):
        if temperature.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"onepass.{name}(): temperature gets no gradient, but requires one")
        shape = [1 if d == dim else size for d, size in enumerate(input.shape)]
        try:
            own = temperature.expand(shape)
        except RuntimeError:
            got = list(temperature.shape)
            raise ValueError(f"onepass.{name}(): temperature broadcasts to {shape}, got shape {got}") from None
        scale = own.to(_accumulator(input.dtype, input.dtype)).reciprocal().reshape(-1).contiguous()
    elif temperature is not None:
        factor = 1 / _checked_temperature(name, temperature, "a number or a Tensor")
    spec = LossSpec(dim, factor, entropy=has_entropy, engine=resolve(engine, input.device))
    return loss_terms(input, index, None, scale, spec)


def kl_div(
    p_logits: Tensor,
    q_logits: Tensor,
    dim: int = -1,
    *,
    temperature: float | None = None,
    reduction: str = "none",
    dtype: torch.dtype | None = None,
    engine: str = "auto",
) -> Tensor:
    """The Kullback-Leibler divergence sum(p (log p - log q)) over `dim`, from the logits of p and q.

    p is softmax(p_logits / temperature) and q is softmax(q_logits / temperature). The forward reads both tensors once.
    The backward reads both once and writes only the gradients that are needed, for example the student's in a
    distillation. Nothing else of their size is allocated. It differs from `torch.nn.functional.kl_div`, which takes
    log-probabilities, the second distribution first.

    Args:
        p_logits, q_logits: logits of one shape, any strides, float64, float32, float16 or bfloat16. If their dtypes
            differ, both are cast to the dtype that torch promotes to.
        dim: the dim of the classes.
        temperature: a number that both logits are divided by. The result is not multiplied by its square.
        reduction: "none", or "sum" or "mean" over rows (torch's "batchmean" if the rows are the batch).
        dtype: the dtype of the result, by default the inputs' (float32 under autocast). Half types are computed in
            float32.
        engine: as `onepass.softmax` takes it.

    Returns:
        A tensor of the inputs' shape without `dim`, or of shape () with a reduction. A class with p = 0 adds 0. A class
        with q = 0 and p > 0 makes the result infinite.

    Raises:
        ValueError: shapes that differ, a temperature that is not positive, an unknown reduction. IndexError: no such
        dim. TypeError, NotImplementedError: no tensors, or unsupported dtypes. RuntimeError: two devices.

    >>> import torch, onepass
    >>> teacher, student = torch.tensor([[2.0, 0.0, 1.0]]), torch.zeros(1, 3, requires_grad=True)
    >>> loss = onepass.kl_div(teacher, student, reduction="mean")
    >>> loss
    tensor(0.2662, grad_fn=<ToCopyBackward0>)
    >>> loss.backward()
    >>> student.grad
    tensor([[-0.3319,  0.2433,  0.0886]])
    """
    name = "kl_div"
    for logits in (p_logits, q_logits):
        _check_logits(name, logits)
    if p_logits.shape != q_logits.shape:
        raise ValueError(
            f"onepass.{name}(): p_logits and q_logits have one shape, got {list(p_logits.shape)} and "
            f"{list(q_logits.shape)}"
        )
    if p_logits.device != q_logits.device:
        raise RuntimeError(
            f"onepass.{name}(): p_logits and q_logits must be on one device, got {p_logits.device} and "
            f"{q_logits.device}"
        )
    _check_options(name, reduction, 0.0)
    both = torch.promote_types(p_logits.dtype, q_logits.dtype)
    p_logits, q_logits = p_logits.to(both), q_logits.to(both)
    to = _result_dtype(name, p_logits, dtype)
    if not p_logits.dim():
        p_logits, q_logits = p_logits.unsqueeze(0), q_logits.unsqueeze(0)
    (dim,) = wrap_dims(name, p_logits, [dim])
    factor = 1.0 if temperature is None else 1 / _checked_temperature(name, temperature, "a number")
    spec = DivergenceSpec(dim, True, factor, engine=resolve(engine, p_logits.device))
    rows = [size for d, size in enumerate(p_logits.shape) if d != dim]
    return _reduced(divergence_terms(p_logits, q_logits, None, spec)[2].reshape(rows), reduction).to(to)


# Checks ---------------------------------------------------------------------------------------------------------------


def _checked_temperature(name: str, temperature: Any, takes: str) -> float:
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"onepass.{name}(): temperature must be {takes}, got {temperature!r}")
    if not temperature > 0:
        raise ValueError(f"onepass.{name}(): temperature must be positive, got {temperature}")
    return float(temperature)


def _check_logits(name: str, input: Any) -> None:
    check_input(name, input)
    if input.dtype not in FLOATS:
        raise NotImplementedError(f"onepass.{name}(): takes {TAKES}, got {input.dtype}")
    if name == "cross_entropy" and not input.dim():
        raise ValueError(f"onepass.{name}(): input has classes in dim 0 or 1, got a tensor without dims")


def _check_options(name: str, reduction: Any, smoothing: float) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"onepass.{name}(): reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0 <= smoothing <= 1:
        raise RuntimeError(f"onepass.{name}(): label_smoothing must be between 0.0 and 1.0, got {smoothing}")


def _check_softcap(name: str, softcap: Any) -> float:
    if softcap is None:
        return 0.0
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(f"onepass.{name}(): softcap must be a number, got {softcap!r}")
    if not 0 < softcap < math.inf:
        raise ValueError(f"onepass.{name}(): softcap must be a positive finite number, got {softcap}")
    return float(softcap)


def _check_weight(name: str, weight: Any, input: Tensor, classes: int) -> None:
    if not isinstance(weight, Tensor):
        raise TypeError(f"onepass.{name}(): weight must be a Tensor, got {type(weight).__name__}")
    if weight.dtype not in FLOATS:
        raise RuntimeError(f"onepass.{name}(): weight takes {TAKES}, got {weight.dtype}")
    if weight.shape != (classes,):
        raise RuntimeError(f"onepass.{name}(): weight has the shape [{classes}], got {list(weight.shape)}")
    if weight.device != input.device:
        raise RuntimeError(f"onepass.{name}(): weight must be on {input.device}, as the input is, got {weight.device}")
    if weight.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"onepass.{name}(): weight gets no gradient, but requires one")


def _check_classes(name: str, target: Tensor, rows: list[int], input: Tensor) -> None:
    if target.dtype not in _CLASS_DTYPES:
        raise RuntimeError(f"onepass.{name}(): target takes integers or floats, got {target.dtype}")
    if list(target.shape) != rows:
        hint = ""
        if target.shape == input.shape:
            hint = "; probabilities of classes are of a floating dtype"
        raise ValueError(
            f"onepass.{name}(): target has the shape {rows} for an input of shape {list(input.shape)}, "
            f"got {list(target.shape)}{hint}"
        )


def _result_dtype(name: str, input: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return torch.float32 if autocast_to_float32(input) else input.dtype
    if dtype not in FLOATS:
        raise NotImplementedError(f"onepass.{name}(): dtype must be one of {TAKES}, got {dtype}")
    return dtype
