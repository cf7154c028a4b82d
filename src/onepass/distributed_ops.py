"""The exchanges of rows that are split over the ranks of process groups, and the calls and derivatives that use them.

Each rank computes the state of its part of a row. The states of all ranks are gathered and merged in the order of the
ranks, by the same operations on every rank. Then each rank finishes its part (state_ops.py). A gradient sums one number
per row over the ranks in the same way.

Functions take a tuple of groups and exchange within one group after another: one exchange for each dim of a mesh.

Two functions make derivatives of a higher order possible across ranks. `reduce` sums the parts of all ranks to one
result, which every rank has. `copy` marks the place from which each rank uses such a result for its own part. Each is
the derivative of the other.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .autograd import backward as fused_backward
from .autograd import needs_no_autograd
from .loss_arithmetic import LossSpec
from .loss_ops import _is_eager, loss_terms
from .ops import call
from .rank_exchange import rows_over_ranks
from .scored import _accumulator, _is_transformed
from .settings import is_batch_invariant
from .state_ops import finish_planes, gradient_finish, gradient_sum, merge_states
from .validation import Spec

__all__ = ["Ranks", "copy", "gather", "merge_over", "rank_sum", "ranks_of", "reduce", "rows", "terms"]

_is_compiling = torch.compiler.is_compiling
_terms_backward_operator = torch.ops.onepass.loss_terms_backward.default
_BLOCKS, _ROWS_OF_BLOCKS = 2, 1 << 18  # how many blocks a softmax on a GPU is cut into, from how many rows on


class Ranks(NamedTuple):
    """The facts about a process group that an exchange needs."""

    name: str
    size: int
    rank: int
    in_kernel: bool = False  # whether kernels exchange states of softmax themselves (rank_exchange.py)


Groups = tuple[Ranks, ...]


def ranks_of(function: str, group: Any) -> Ranks:
    """The Ranks of a group, or of the default group. Raises an error if there is none."""
    name = f"onepass.{function}()"
    if not dist.is_available():
        raise RuntimeError(f"{name}: this build of torch has no torch.distributed")
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(
                f"{name}: there is no process group; call torch.distributed.init_process_group() first, or give group="
            )
        group = dist.group.WORLD
    elif not isinstance(group, dist.ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise RuntimeError(f"{name}: this rank is no member of the group")
        raise TypeError(f"{name}: group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
    return Ranks(group.group_name, dist.get_world_size(group), dist.get_rank(group))


# Exchanges ------------------------------------------------------------------------------------------------------------


def gather(t: Tensor, ranks: Ranks) -> Tensor:
    """The tensors of all ranks, (ranks, ...), each of the shape of `t`."""
    return wait(start_gather(t, ranks, False))


def start_gather(t: Tensor, ranks: Ranks, overlaps: bool = True) -> tuple[Tensor, Any]:
    """Starts a `gather`. Returns its result, and the object that `wait` has to wait for before the result is read.
    `overlaps`: on a GPU, whether kernels that are launched afterwards may run at the same time."""
    if ranks.size == 1 or not t.numel():
        return t.expand(ranks.size, *t.shape), None
    t = t.contiguous()
    if _is_compiling() or not _is_eager(t):  # a graph can hold only operators
        operator = torch.ops._c10d_functional.all_gather_into_tensor.default
        return operator(t.unsqueeze(0), ranks.size, ranks.name), torch.ops._c10d_functional.wait_tensor.default
    # The call that torch.distributed's function makes, at half the cost of that function.
    c10d: Any = torch._C._distributed_c10d
    options = c10d.AllgatherOptions()
    options.asyncOp = overlaps
    gathered = t.new_empty((ranks.size, *t.shape))
    group = c10d._resolve_process_group(ranks.name)
    return gathered, group._allgather_base(gathered.view(-1), t.view(-1), options)


def wait(started: tuple[Tensor, Any]) -> Tensor:
    gathered, work = started
    if work is None:
        return gathered
    if callable(work):
        done: Tensor = work(gathered)
        return done
    work.wait()
    return gathered


def _ordered_sum(parts: Tensor) -> Tensor:
    """The sum over dim 0, with the same bits on every rank."""
    if _is_compiling() or is_batch_invariant():  # the bits of torch's sum may depend on the number of rows
        return functools.reduce(torch.add, parts.unbind(0))
    return parts.sum(0)


def merge_over(planes: Tensor, groups: Groups, engine: str) -> Tensor:
    """The planes of whole rows (state_ops.py), from the state (2, ...) of this rank's part. It has no derivative."""
    for ranks in groups[:-1]:
        planes = merge_states(gather(planes, ranks), engine)[::3]
    return merge_states(gather(planes, groups[-1]), engine)


def _plain_sum(t: Tensor, groups: Groups) -> Tensor:
    for ranks in groups:
        t = _ordered_sum(gather(t, ranks))
    return t


class ReduceFunction(torch.autograd.Function):
    """`reduce` with derivatives."""

    @staticmethod
    def forward(t: Tensor, groups: Groups) -> Tensor:
        return _plain_sum(t, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.groups = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return copy(grad, ctx.groups), None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, _: None) -> Tensor:
        return reduce(t, ctx.groups)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], t: Tensor, groups: Groups) -> tuple[Tensor, int]:
        return reduce(t, groups), in_dims[0]


class CopyFunction(torch.autograd.Function):
    """`copy` with derivatives."""

    @staticmethod
    def forward(t: Tensor, groups: Groups) -> Tensor:
        return t.clone()

    setup_context = staticmethod(ReduceFunction.setup_context)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce(grad, ctx.groups), None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, _: None) -> Tensor:
        return copy(t, ctx.groups)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], t: Tensor, groups: Groups) -> tuple[Tensor, int]:
        return copy(t, groups), in_dims[0]


class MaxFunction(torch.autograd.Function):
    """The maximum over the ranks, without a derivative."""

    @staticmethod
    def forward(t: Tensor, groups: Groups) -> Tensor:
        for ranks in groups:
            t = gather(t, ranks).amax(0)
        return t

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], t: Tensor, groups: Groups) -> tuple[Tensor, int]:
        return MaxFunction.apply(t, groups), in_dims[0]


def _is_plain(t: Tensor) -> bool:
    return _is_compiling() or needs_no_autograd(t)


def reduce(t: Tensor, groups: Groups) -> Tensor:
    """The sum over the ranks, the same on all of them. Its gradient has to be the same on all ranks too."""
    return _plain_sum(t, groups) if _is_plain(t) else ReduceFunction.apply(t, groups)


def copy(t: Tensor, groups: Groups) -> Tensor:
    """The identity, for a tensor that is the same on all ranks and that each rank uses for its own part. Its gradient
    is summed over the ranks."""
    return t if _is_plain(t) else CopyFunction.apply(t, groups)


def rank_sum(t: Tensor, groups: Groups) -> Tensor:
    """The sum over the ranks, which each rank uses for its own part."""
    return copy(reduce(t, groups), groups)


# Rows -----------------------------------------------------------------------------------------------------------------


def rows(x: Tensor, spec: Spec, groups: Groups) -> Tensor:
    """The result of a checked call: softmax or log_softmax of this rank's part, or logsumexp. A logsumexp keeps its
    dims and has the accumulator's dtype."""
    if not _is_compiling() and _is_transformed():
        return _arithmetic(x, spec, groups)
    if x.requires_grad and torch.is_grad_enabled():
        y: Tensor = RowsFunction.apply(x, spec, groups)
        return y
    return forward(x, spec, groups)


def forward(x: Tensor, spec: Spec, groups: Groups) -> Tensor:
    """`rows` without derivatives."""
    if groups[0].in_kernel:
        y: Tensor = rows_over_ranks(x, None, spec.function, len(spec.dims), spec.dtype or x.dtype, groups[0].name)
        return y
    if spec.function == "softmax" and spec.dtype is None and len(groups) == 1 and spec.engine != "triton":
        blocks = 1 if _is_compiling() else _blocks(x, spec)
        if blocks > 1 and _is_eager(x):
            return _softmax_in_blocks(x, spec, groups[0], blocks)
    planes = call(x, Spec("state", spec.dims, None, True, spec.engine))
    planes = merge_over(planes, groups, spec.engine)
    if spec.function == "logsumexp":
        return planes[0] + planes[3].log()
    return finish_planes(x, planes, spec.dims, spec.function, spec.dtype, spec.engine)


def _blocks(x: Tensor, spec: Spec) -> int:
    """The number of blocks of rows that a softmax is cut into. It has to be the same on all ranks, so it depends only
    on facts that are the same on all of them."""
    count = math.prod(size for d, size in enumerate(x.shape) if d not in spec.dims)
    return _BLOCKS if x.is_cuda and count >= _ROWS_OF_BLOCKS else 1


def _softmax_in_blocks(x: Tensor, spec: Spec, ranks: Ranks, blocks: int) -> Tensor:
    """Softmax block by block: the states of a block are exchanged while the rows of the previous block are finished."""
    along = max((d for d in range(x.dim()) if d not in spec.dims), key=lambda d: x.shape[d])
    y = torch.empty_like(x)

    def finish(part: Tensor, out: Tensor, started: tuple[Tensor, Any]) -> None:
        planes = merge_states(wait(started), spec.engine)
        finish_planes(part, planes, spec.dims, spec.function, None, spec.engine, out)

    before: tuple[Tensor, Tensor, tuple[Tensor, Any]] | None = None
    for part, out in zip(x.tensor_split(blocks, along), y.tensor_split(blocks, along), strict=True):
        planes = call(part, Spec("state", spec.dims, None, True, spec.engine))
        started = start_gather(planes, ranks)
        if before is not None:
            finish(*before)
        before = part, out, started
    if before is not None:
        finish(*before)
    return y


def backward(grad: Tensor, saved: tuple[Tensor, ...], spec: Spec, groups: Groups, dtype: torch.dtype) -> Tensor:
    """The gradient of this rank's part of the input, of `dtype`.

    `saved` is (result), or (input, result) for logsumexp, whose upstream gradient is the same on every rank. `grad` and
    `saved` have derivatives.
    """
    if groups[0].in_kernel and (_is_compiling() or needs_no_autograd(grad, *saved)):
        dx: Tensor = rows_over_ranks(saved[0], grad, spec.function, len(spec.dims), dtype, groups[0].name)
        return dx
    if spec.function != "logsumexp":
        (y,) = saved
        total = rank_sum(gradient_sum(grad, y, spec.dims, spec.function, spec.engine), groups)
        return gradient_finish(grad, y, total, spec.dims, spec.function, dtype, spec.engine)
    x, lse = saved
    if not _is_compiling() and needs_no_autograd(grad, x, lse):  # in a graph the compiler fuses the arithmetic below
        return fused_backward(spec._replace(keepdim=True), grad, (x, lse), dtype)
    grad, lse = copy(torch.stack((grad, lse)), groups).unbind(0)
    return (grad * (x.to(lse.dtype) - lse).exp()).to(dtype)


class RowsFunction(torch.autograd.Function):
    """A call with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: Spec, groups: Groups) -> Tensor:
        y = forward(x, spec, groups)
        ctx.spec, ctx.groups, ctx.dtype = spec, groups, x.dtype
        ctx.save_for_backward(*((x, y) if spec.function == "logsumexp" else (y,)))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return backward(grad, ctx.saved_tensors, ctx.spec, ctx.groups, ctx.dtype), None, None


def largest(x: Tensor, dims: list[int], groups: Groups) -> Tensor:
    """The maximum of whole rows, with size 1 in `dims`. It has no derivative."""
    x = x.detach()
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
    m = x.amax(dims, keepdim=True) if x.numel() else x.new_full(shape, -math.inf)
    return MaxFunction.apply(m, groups)


def _arithmetic(x: Tensor, spec: Spec, groups: Groups) -> Tensor:
    """`rows` in operations that have derivatives of every order."""
    to = spec.dtype or x.dtype
    x = x.to(_accumulator(x.dtype, to))
    m = largest(x, spec.dims, groups)
    base = m.masked_fill(m.isinf(), 0)
    apart = x - base
    l = reduce(apart.exp().sum(spec.dims, keepdim=True), groups)
    if spec.function == "logsumexp":
        return base + l.log()
    l = copy(l, groups).masked_fill(m.isinf(), math.nan)
    return (apart.exp() / l if spec.function == "softmax" else apart - l.log()).to(to)


# Losses ---------------------------------------------------------------------------------------------------------------
#
# A rank has some of the classes of each row. `index` has the picked classes as this rank numbers them, in place of the
# dim of the classes. `own` is True for picks whose class this rank has; `index` is 0 for the other picks. Terms are
# those of loss_ops.py for whole rows, the same on every rank: planes m, log l, with smoothing the mean of the negative
# log-probabilities, and the negative log-probabilities of the picks. Their gradients are the same on every rank too.
# The gradient of m is not read.


def terms(x: Tensor, index: Tensor, own: Tensor, spec: LossSpec, groups: Groups) -> Tensor:
    """The terms of a checked call, (planes, rows)."""
    if not _is_compiling() and _is_transformed():
        return _terms_arithmetic(x, index, own, spec, groups)
    if x.requires_grad and torch.is_grad_enabled():
        made: Tensor = TermsFunction.apply(x, index, own, spec, groups)[0]
        return made
    return _terms(x, index, own, spec, groups)[0]


def _in_planes(t: Tensor, dim: int) -> Tensor:
    return t.movedim(dim, 0).unsqueeze(-1).flatten(1)


def _terms(x: Tensor, index: Tensor, own: Tensor, spec: LossSpec, groups: Groups) -> tuple[Tensor, Tensor]:
    """The terms, and with smoothing the number of classes of each row."""
    wide, n, picks = _accumulator(x.dtype, x.dtype), x.shape[spec.dim], index.shape[spec.dim]
    inner = _in_planes(own, spec.dim)
    # The planes to exchange: the logits of picks, m, l, and with smoothing the sum of m - x and the number of classes.
    if not n:
        planes = x.new_zeros((picks + 2 + 2 * spec.spread, inner.shape[1]), dtype=wide)
        planes[: picks + 1] = -math.inf
    else:
        parts = [_in_planes(x.gather(spec.dim, index), spec.dim).to(wide).masked_fill(~inner, -math.inf)]
        if spec.spread:  # if this part is all -inf the sum is NaN, and so is the loss
            m, log_l, spread = loss_terms(x, None, None, None, spec).unbind(0)
            parts.append(torch.stack((m, log_l.exp(), spread - n * log_l, torch.full_like(m, n))))
        else:
            parts.append(call(x, Spec("state", [spec.dim], None, False, spec.engine)).reshape(2, -1))
        planes = torch.cat(parts)
    for ranks in groups:
        planes = _merged_planes(gather(planes, ranks), picks)
    m, l = planes[picks : picks + 2]
    log_l = l.log().masked_fill(m.isinf(), math.nan)
    made, count = [m.unsqueeze(0), log_l.unsqueeze(0)], m
    if spec.spread:
        count = planes[-1]
        made.append((planes[-2] / count + log_l).unsqueeze(0))
    return torch.cat((*made, m - planes[:picks] + log_l)), count


def _merged_planes(parts: Tensor, picks: int) -> Tensor:
    """Merges the planes of all ranks, (ranks, planes, rows). The logit of a pick is -inf on all ranks but its own."""
    tops = parts[:, : picks + 1].amax(0)
    m = parts[:, picks]
    base = tops[picks].masked_fill(tops[picks].isinf(), 0)
    sums = [parts[:, picks + 1] * (m - base).exp()]
    if parts.shape[1] > picks + 2:
        apart, count = parts[:, picks + 2], parts[:, picks + 3]
        sums += [apart + (count * (base - m)).masked_fill(count == 0, 0), count]
    return torch.cat((tops, _ordered_sum(torch.stack(sums, 1))))


class TermsFunction(torch.autograd.Function):
    """Terms with a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, own: Tensor, spec: LossSpec, groups: Groups
    ) -> tuple[Tensor, Tensor]:
        made, count = _terms(x, index, own, spec, groups)
        ctx.spec, ctx.groups = spec, groups
        ctx.mark_non_differentiable(count)
        ctx.save_for_backward(x, index, own, made, count)
        return made, count

    @staticmethod
    def backward(ctx: Any, grads: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, index, own, made, count = ctx.saved_tensors
        if _is_compiling() or needs_no_autograd(grads, x, made):
            dx = _terms_backward(grads, x, index, own, made, count, ctx.spec)
        else:
            dx = _terms_backward_arithmetic(grads, x, index, own, made, count, ctx.spec, ctx.groups)
        return dx, None, None, None, None


def _terms_backward(
    grads: Tensor, x: Tensor, index: Tensor, own: Tensor, made: Tensor, count: Tensor, spec: LossSpec
) -> Tensor:
    first = 2 + spec.spread
    of_picks = grads[first:].masked_fill(~_in_planes(own, spec.dim), 0)
    of_lse = (grads[1] + (grads[first:] - of_picks).sum(0)).unsqueeze(0)
    given = [of_lse, of_lse, of_picks]
    if spec.spread:  # the kernel counts only this rank's classes, so the rest is added here
        of_class = (grads[2] / count).unsqueeze(0)
        of_lse = of_lse + of_class * (count - x.shape[spec.dim])
        given = [of_lse, of_lse, of_class, of_picks]
    flat = _in_planes(index, spec.dim).t().contiguous() if index.shape[spec.dim] else None
    # Detached so that no derivative is recorded, not even in a graph: it would be that of this rank's part alone.
    tensors = torch.cat(given).detach(), made.detach(), x.detach(), flat, None, None
    dx: Tensor = _terms_backward_operator(*tensors, *spec)
    return dx


def _terms_backward_arithmetic(
    grads: Tensor,
    x: Tensor,
    index: Tensor,
    own: Tensor,
    made: Tensor,
    count: Tensor,
    spec: LossSpec,
    groups: Groups,
) -> Tensor:
    shape = [1 if d == spec.dim else size for d, size in enumerate(x.shape)]
    log_l, *given = copy(torch.cat((made[1:2], grads[1:])), groups).unbind(0)
    of_lse = torch.stack(given).sum(0).reshape(shape)  # all terms but m contain log l
    ds = (x.to(made.dtype) - made[0].detach().reshape(shape) - log_l.reshape(shape)).exp() * of_lse
    if spec.spread:
        ds = ds - (given[1] / count).reshape(shape)
    if x.numel():
        picks = torch.cat([t.reshape(shape) for t in given[1 + spec.spread :]], spec.dim)
        ds = ds.scatter_add(spec.dim, index, -picks.masked_fill(~own, 0))
    return ds.to(x.dtype)


def _terms_arithmetic(x: Tensor, index: Tensor, own: Tensor, spec: LossSpec, groups: Groups) -> Tensor:
    """`terms` in operations that have derivatives of every order."""
    dim, n, picks = spec.dim, x.shape[spec.dim], index.shape[spec.dim]
    x = x.to(_accumulator(x.dtype, x.dtype))
    m = largest(x, [dim], groups)
    apart = x - m
    picked = apart.gather(dim, index).masked_fill(~own, 0) if n else own.to(x.dtype)
    sums = [picked, own.to(x.dtype), apart.exp().sum(dim, keepdim=True)]
    if spec.spread:
        sums += [-apart.sum(dim, keepdim=True), torch.full_like(m, n)]
    picked, found, l, *spread = reduce(torch.cat(sums, dim), groups).split([picks, picks] + [1] * (len(sums) - 2), dim)
    log_l = l.log().masked_fill(m.isinf(), math.nan)
    mean = [spread[0] / spread[1] + log_l] if spec.spread else []
    picked = picked.masked_fill(found == 0, -math.inf)
    return _in_planes(torch.cat((m, log_l, *mean, log_l - picked), dim), dim)
