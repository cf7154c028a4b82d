"""The softmax family for rows that are split over the ranks of a process group, and losses of a sharded vocabulary.

In each call the ranks exchange one small state per row with torch.distributed. docs/distributed.md has the conventions.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import functional
from ._engines import resolve
from .distributed_ops import Ranks, gather, ranks_of, rows, terms
from .loss_arithmetic import LossSpec
from .losses import _CLASS_DTYPES, _check_classes, _check_logits, _check_options, _result_dtype
from .losses import cross_entropy as cross_entropy_of_whole_rows
from .losses import log_prob as log_prob_of_whole_rows
from .scored import _accumulator, _is_transformed
from .settings import autocast_to_float32, is_batch_invariant
from .validation import (
    FLOATS,
    HALF_DTYPES,
    Spec,
    check_dtype,
    check_input,
    normalize_dims,
    refuse_dtensors,
    wrap_dims,
)

__all__ = ["cross_entropy", "log_prob", "log_softmax", "logsumexp", "softmax", "softmin"]

Dim = int | Sequence[int]
_MOST_RANKS = 32  # the most ranks that exchange states within a kernel


def _rows(
    function: str, x: Any, dim: Any, group: Any, dtype: Any, check: bool, engine: str, exchange: str = "collective"
) -> Any:
    """(result of a call, reduced dims). A logsumexp keeps the reduced dims with size 1."""
    name, lse = f"distributed.{function}", function == "logsumexp"
    check_input(name, x)
    refuse_dtensors(name, x)
    ranks = ranks_of(name, group)
    if check:
        _check_alike(name, x, dim, ranks, group, exchange=exchange)
    dims = normalize_dims(name, x, dim)
    if exchange not in ("collective", "kernel"):
        raise ValueError(f"onepass.{name}(): exchange is 'collective' or 'kernel', got {exchange!r}")
    if not lse:
        check_dtype(name, x, dtype)
    if ranks.size == 1:
        return functional._check_and_call(function, x, dim, True if lse else dtype, None, engine), dims
    if dtype is None and x.dtype in HALF_DTYPES and autocast_to_float32(x):
        dtype = torch.float32
    to = dtype or (x.dtype if x.dtype in FLOATS else torch.get_default_dtype())
    if to is not torch.float32 or x.dtype not in HALF_DTYPES:  # half types stay, and kernels convert them to float32
        x = x.to(to)
    if function == "softmin":
        x, function = -x, "softmax"
    spec = Spec(function, dims, None if to is x.dtype else to, lse, resolve(engine, x.device))
    if exchange == "kernel":
        _check_kernel(name, x, dims, spec.engine, ranks)
        ranks = ranks._replace(in_kernel=True)
    if not x.dim():
        return rows(x.unsqueeze(0), spec, (ranks,)).squeeze(0).to(to), dims
    return rows(x, spec, (ranks,)).to(to), dims


def softmax(
    local: Tensor,
    dim: Dim = -1,
    *,
    group: Any = None,
    dtype: torch.dtype | None = None,
    check: bool = False,
    engine: str = "auto",
    exchange: str = "collective",
) -> Tensor:
    """`onepass.softmax` of rows that are split over the ranks of a process group. Each rank passes and gets its part.

    Each rank reads its part once. Then all ranks exchange the state of each row, the pair (maximum, sum of
    exponentials). Then each rank reads its part once more and writes the result. The backward exchanges one number per
    row. All ranks of the group must make the same calls, forward and backward, in the same order.

    Args:
        local: this rank's part: a strided tensor, float64, float32, float16 or bfloat16, or integers with `dtype`. The
            dim that is split may have a different size on each rank, also 0. All else is the same on every rank.
        dim: the dim along which the whole result sums to 1, or a tuple of dims. One of them is split.
        group: a `torch.distributed.ProcessGroup`; without one, the default group.
        dtype: the result's dtype, as `onepass.softmax` takes it.
        check: whether to compare the calls of all ranks first, which waits for every rank. Without it, calls that
            differ raise an error of the backend, hang until its timeout, or give meaningless results.
        engine: "auto", or "cpu", "cuda", "triton" to force one.
        exchange: "collective", or "kernel" on NVIDIA GPUs that can access each other's memory. With "kernel" one kernel
            exchanges the states itself, in the forward and in the backward, and reads the part once. It needs a
            contiguous tensor whose last dims are reduced. It occupies all multiprocessors until every rank has made
            the call (docs/distributed.md).

    Returns:
        This rank's part of the result, of the shape of `local`. Special values are as in `onepass.softmax`. The
        gradient is this rank's part of the gradient of the sum of all ranks' losses.

    Raises:
        RuntimeError: no process group, or a rank that is no member of it; a rank that does not answer (the backend's
        error, after its timeout; with exchange="kernel" the results are NaN and the next call raises). ValueError:
        calls that differ, with `check` (raised on every rank); a call that exchange="kernel" does not support. Also
        the errors of `onepass.softmax`.

    Source: the merge of states is from Milakov & Gimelshein, "Online normalizer calculation for softmax"
    (arXiv:1805.02867).

    >>> import torch, onepass
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> onepass.distributed.softmax(torch.tensor([0.0, 0.0, -torch.inf]))
    tensor([0.5000, 0.5000, 0.0000])
    >>> dist.destroy_process_group()
    """
    return _rows("softmax", local, dim, group, dtype, check, engine, exchange)[0]


def log_softmax(
    local: Tensor,
    dim: Dim = -1,
    *,
    group: Any = None,
    dtype: torch.dtype | None = None,
    check: bool = False,
    engine: str = "auto",
    exchange: str = "collective",
) -> Tensor:
    """`onepass.log_softmax` of rows that are split over ranks. Arguments, result and errors are as in `softmax`.

    >>> import torch, onepass
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> onepass.distributed.log_softmax(torch.zeros(4))
    tensor([-1.3863, -1.3863, -1.3863, -1.3863])
    >>> dist.destroy_process_group()
    """
    return _rows("log_softmax", local, dim, group, dtype, check, engine, exchange)[0]


def softmin(
    local: Tensor,
    dim: Dim = -1,
    *,
    group: Any = None,
    dtype: torch.dtype | None = None,
    check: bool = False,
    engine: str = "auto",
    exchange: str = "collective",
) -> Tensor:
    """`onepass.softmin` of rows that are split over ranks. Arguments, result and errors are as in `softmax`.

    >>> import torch, onepass
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> onepass.distributed.softmin(torch.zeros(4))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    >>> dist.destroy_process_group()
    """
    return _rows("softmin", local, dim, group, dtype, check, engine, exchange)[0]


def logsumexp(
    local: Tensor, dim: Dim, keepdim: bool = False, *, group: Any = None, check: bool = False, engine: str = "auto"
) -> Tensor:
    """`onepass.logsumexp` of rows that are split over the ranks of a process group. Each rank gets the whole result.

    Args:
        local, group, check, engine: as `softmax` takes them. Integers are converted to the default dtype.
        dim: the dim to reduce, or a tuple of dims. One of them is split.
        keepdim: whether the result keeps the reduced dims, with size 1.

    Returns:
        A tensor of the dtype of `local`, with the same bits on every rank. All ranks must compute the same loss from
        it: the upstream gradient is then the same on every rank. The backward does not sum it over ranks, and exchanges
        nothing.

    Raises:
        As `softmax`, and TypeError for complex input.

    >>> import torch, onepass
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> onepass.distributed.logsumexp(torch.zeros(2, 10), 1)
    tensor([2.3026, 2.3026])
    >>> dist.destroy_process_group()
    """
    y, dims = _rows("logsumexp", local, dim, group, None, check, engine)
    return y if keepdim or not local.dim() else y.squeeze(dims)


def cross_entropy(
    local_logits: Tensor,
    target: Tensor,
    *,
    group: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    start: int | None = None,
    classes: int | None = None,
    check: bool = False,
    engine: str = "auto",
) -> Tensor:
    """The cross-entropy of logits whose classes are split over the ranks of a process group.

    It is `onepass.cross_entropy` of all logits together. Each rank reads its logits once. The backward reads them once
    more, writes their gradient and exchanges nothing. The forward exchanges three numbers per row and rank, five with
    label smoothing.

    Args:
        local_logits: this rank's classes: (C), (N, C) or (N, C, d1, d2, ...), float64, float32, float16 or bfloat16.
            The ranks of the group have the classes in order. Each rank has any number of them, also none.
        target: a class per row, numbered over all ranks, of an integer dtype; () or (N) or (N, d1, d2, ...). It is the
            same on every rank.
        group, check, engine: as `softmax` takes them. On a GPU `check` also looks for classes that do not exist, which
            waits for the GPU. On a CPU classes are always checked.
        ignore_index: rows with this target class are ignored.
        reduction: "mean" (over the rows that are not ignored), "sum" or "none".
        label_smoothing: from 0 to 1: the share of the target probability that is spread evenly over all classes.
        z_loss: adds z_loss * logsumexp(row)^2 to the loss of each row that is not ignored.
        start, classes: the first class of this rank, and the number of classes of all ranks. Without them the ranks
            exchange these numbers first, without waiting for their GPUs.

    Returns:
        The loss, the same on every rank, of the logits' dtype (float32 under autocast). All ranks must use it in the
        same way: as in Megatron-LM, each rank's gradient is that of this one loss, not of the sum over the ranks. On a
        GPU a class that does not exist has an infinite loss.

    Raises:
        IndexError: a class that does not exist, on every rank. ValueError: shapes that do not match, an unknown
        reduction, only one of `start` and `classes`, calls that differ (with `check`). RuntimeError: as `softmax`, and
        dtypes or devices that do not match, smoothing outside of [0, 1].

    Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), leave the logits on the ranks that computed them and
    exchange numbers per row. Megatron-LM exchanges maximum and sum one after the other; here the pair is one exchange.

    >>> import torch, onepass
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    >>> onepass.distributed.cross_entropy(logits, torch.tensor([0, 2]))
    tensor(1.6672)
    >>> dist.destroy_process_group()
    """
    name, x = "distributed.cross_entropy", local_logits
    _check_logits(name, x)
    refuse_dtensors(name, x, target)
    if not x.dim():
        raise ValueError(f"onepass.{name}(): logits have classes in dim 0 or 1, got a tensor without dims")
    dim = 0 if x.dim() == 1 else 1
    _check_tensor(name, "target", target, x)
    ranks = ranks_of(name, group)
    if check:
        _check_alike(name, x, dim, ranks, group, target)
    _check_options(name, reduction, label_smoothing)
    row_shape = [size for d, size in enumerate(x.shape) if d != dim]
    _check_classes(name, target, row_shape, x)
    _check_start(name, start, classes)
    if ranks.size == 1:
        options: dict[str, Any] = {"z_loss": z_loss, "check": check, "engine": engine}
        given = x, target, None, ignore_index, reduction, label_smoothing
        loss: Any = cross_entropy_of_whole_rows(*given, **options)
        return loss
    each = target.long().unsqueeze(dim)
    ignored = each == ignore_index
    index, own = _own_classes(name, x, each, ignored, dim, ranks, (start, classes), check)
    spec = LossSpec(dim, spread=label_smoothing > 0, engine=resolve(engine, x.device))
    m, log_l, *mean, nll = terms(x, index, own, spec, (ranks,)).unbind(0)
    losses = nll
    if label_smoothing:
        losses = (1 - label_smoothing) * nll + label_smoothing * mean[0]
    if z_loss:
        losses = losses + z_loss * (m.detach() + log_l).square()
    losses = losses.reshape(row_shape).masked_fill(ignored.squeeze(dim), 0)
    if reduction != "none":
        losses = losses.sum(dtype=torch.float64)
        if reduction == "mean":
            losses = losses / (~ignored).sum()
    return losses.to(_accumulator(x.dtype, x.dtype) if autocast_to_float32(x) else x.dtype)


def log_prob(
    local_logits: Tensor,
    index: Tensor,
    dim: int = -1,
    *,
    group: Any = None,
    dtype: torch.dtype | None = None,
    start: int | None = None,
    classes: int | None = None,
    check: bool = False,
    engine: str = "auto",
) -> Tensor:
    """The log-probabilities of some classes, from logits whose classes are split over the ranks of a process group.

    It is `onepass.log_prob` of all logits together. Each rank reads its logits once, and once more in the backward.

    Args:
        local_logits: a tensor of any shape with this rank's classes in `dim`, split as for `cross_entropy`.
        index: classes, numbered over all ranks, of an integer dtype. One class per row if it has the logits' shape
            without `dim`; K classes per row if it has any size K in `dim`. It is the same on every rank.
        dim: the dim of the classes.
        dtype: the dtype of the result, by default the logits'. Half types are computed in float32.
        group, start, classes, check, engine: as `cross_entropy` takes them.

    Returns:
        A tensor of the shape of `index`, the same on every rank. The rule for its gradient is that of `cross_entropy`.
        On a GPU it is -inf for a class that does not exist.

    Raises:
        As `cross_entropy`, and TypeError for an index that has no integers.

    >>> import torch, onepass
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> onepass.distributed.log_prob(torch.zeros(2, 4), torch.tensor([1, 3]))
    tensor([-1.3863, -1.3863])
    >>> dist.destroy_process_group()
    """
    name, x = "distributed.log_prob", local_logits
    _check_logits(name, x)
    refuse_dtensors(name, x, index)
    x = x if x.dim() else x.unsqueeze(0)
    _check_tensor(name, "index", index, x)
    ranks = ranks_of(name, group)
    if check:
        _check_alike(name, x, dim, ranks, group, index)
    (dim,) = wrap_dims(name, x, [dim])
    is_one = index.dim() == x.dim() - 1
    each = index.unsqueeze(dim) if is_one else index
    others = [size for d, size in enumerate(x.shape) if d != dim]
    if each.dim() != x.dim() or [size for d, size in enumerate(each.shape) if d != dim] != others:
        raise ValueError(
            f"onepass.{name}(): index has the shape of the logits, {list(x.shape)}, without dim {dim}, or any size "
            f"there, got {list(index.shape)}"
        )
    if index.dtype not in _CLASS_DTYPES:
        raise TypeError(f"onepass.{name}(): index takes integers, got {index.dtype}")
    to = _result_dtype(name, x, dtype)
    _check_start(name, start, classes)
    if ranks.size == 1:
        whole: Any = log_prob_of_whole_rows(x, index, dim, dtype=dtype, engine=engine)
        return whole
    each = each.long()
    picks = each.shape[dim]
    local, own = _own_classes(
        name, x, each, torch.zeros_like(each, dtype=torch.bool), dim, ranks, (start, classes), check
    )
    made = terms(x, local, own, LossSpec(dim, engine=resolve(engine, x.device)), (ranks,))
    y = -made[2:].reshape(picks, *others).movedim(0, dim).to(to)
    return y.squeeze(dim) if is_one else y


# Checks ---------------------------------------------------------------------------------------------------------------


def _check_tensor(name: str, what: str, given: Any, x: Tensor) -> None:
    if not isinstance(given, Tensor):
        raise TypeError(f"onepass.{name}(): {what} must be a Tensor, got {type(given).__name__}")
    if given.device != x.device:
        raise RuntimeError(f"onepass.{name}(): {what} must be on {x.device}, as the logits are, got {given.device}")


def _check_start(name: str, start: int | None, classes: int | None) -> None:
    if (start is None) is not (classes is None):
        raise ValueError(f"onepass.{name}(): start and classes go together, got {start} and {classes}")


def _check_kernel(name: str, x: Tensor, dims: list[int], engine: str, ranks: Ranks) -> None:
    """Raises an error if exchange="kernel" does not support the call."""
    got = ""
    if not x.is_cuda or engine != "cuda":
        got = f"a tensor on {x.device} and the engine {engine}"
    elif not x.is_contiguous() or dims != list(range(x.dim() - len(dims), x.dim())):
        got = f"strides {list(x.stride())} and dims {dims} of shape {list(x.shape)}"
    elif not torch.compiler.is_compiling() and is_batch_invariant():
        got = "a call under batch_invariant, whose bits may not depend on the number of rows"
    elif ranks.size > _MOST_RANKS:
        got = f"a group of {ranks.size} ranks"
    if got:
        raise ValueError(
            f"onepass.{name}(): exchange='kernel' takes a contiguous tensor on a CUDA GPU whose last dims are reduced, "
            f"and up to {_MOST_RANKS} ranks, got {got}; exchange='collective' takes all else"
        )


def _check_alike(
    name: str,
    x: Tensor,
    dim: Any,
    ranks: Ranks,
    group: Any,
    classes: Tensor | None = None,
    exchange: str = "collective",
) -> None:
    """Raises an error unless all ranks make the same call. The sizes of the dims that may be split may differ."""
    if torch.compiler.is_compiling() or ranks.size == 1:
        return
    try:
        dims = normalize_dims(name, x, dim)
        sizes = ["*" if d in dims else str(size) for d, size in enumerate(x.shape)]
    except (IndexError, RuntimeError, TypeError):  # raised after the exchange, in which this rank has to take part
        dims, sizes = dim, ["*"] * x.dim()
    mine = f"{name.rpartition('.')[2]} over dims {dims} of {x.dtype} [{', '.join(sizes)}]"
    if exchange != "collective":
        mine += f" with exchange={exchange!r}"
    if classes is not None:
        mine += f" and classes {list(classes.shape)}"
    calls: list[Any] = [None] * ranks.size
    dist.all_gather_object(calls, mine, group)
    if len(set(calls)) > 1:
        each = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
        raise ValueError(f"onepass.{name}(): the calls of the ranks differ: {each}")


def _own_classes(
    name: str,
    x: Tensor,
    each: Tensor,
    ignored: Tensor,
    dim: int,
    ranks: Ranks,
    given: tuple[int | None, int | None],
    check: bool,
) -> tuple[Tensor, Tensor]:
    """(classes numbered within this rank, or 0 for classes of other ranks; a mask of the classes of this rank)."""
    n = x.shape[dim]
    start: Any
    classes: Any
    start, classes = given
    if start is None:  # computed on the device, so that the CPU does not wait for it
        counts = gather(torch.full((), n, dtype=torch.int64, device=x.device), ranks)
        start, classes = counts[: ranks.rank].sum(), counts.sum()
    if (check or x.device.type == "cpu") and not torch.compiler.is_compiling() and not _is_transformed():
        outside = ~ignored & ((each < 0) | (each >= classes))
        if outside.any():
            raise IndexError(
                f"onepass.{name}(): class {int(each[outside][0])} is out of range for {int(classes)} classes"
            )
    local = each - start
    own = (local >= 0) & (local < n) & ~ignored
    return local.masked_fill(~own, 0), own
