"""The operators for a DTensor, a tensor that is spread over a mesh of ranks.

DTensor dispatches an operator to a handler, if there is one, before its own sharding rules. The handlers of this file
compute with the local tensor of each rank. If a dim of the mesh splits a softmax dim, the ranks along that mesh dim
exchange the states of their rows (distributed_ops.py). No other placement needs an exchange. While a `patch` is on,
torch's operators have these handlers too. All other operators of onepass raise an error for a DTensor.

This file imports torch.distributed.tensor, which takes a second. So it is imported only after something else has
imported that.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed.tensor
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides, make_contiguous_strides_for
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from . import autograd, distributed_ops, native, ops, patching
from ._when_imported import when_imported
from .distributed_ops import Groups, Ranks
from .native import REDUCTIONS
from .ops import reduced_shape
from .validation import HALF_DTYPES, Spec, wrap_dims

__all__ = ["switch"]

_handlers = DTensor._op_dispatcher._custom_op_handlers


# Placements -----------------------------------------------------------------------------------------------------------


def _splits(placement: Any, dims: Sequence[int]) -> bool:
    """Whether a mesh dim with this placement splits one of `dims`. A strided shard needs no special care, because the
    order of a row's elements does not matter."""
    return getattr(placement, "dim", None) in dims


def _groups(spec: DTensorSpec, dims: Sequence[int]) -> Groups:
    """The groups of ranks that have parts of the same rows."""
    mesh = spec.mesh
    return tuple(
        Ranks(mesh.get_group(d).group_name, mesh.size(d), mesh.get_local_rank(d))
        for d, placement in enumerate(spec.placements)
        if _splits(placement, dims) and mesh.size(d) > 1
    )


def _spec(like: DTensorSpec, placements: Iterable[Any]) -> DTensorSpec:
    """The spec of a tensor with these placements."""
    return DTensorSpec(like.mesh, tuple(placements), tensor_meta=like.tensor_meta)


def _summed(spec: DTensorSpec) -> DTensorSpec:
    """The spec of a tensor whose pending sums are reduced."""
    return _spec(spec, (Replicate() if p.is_partial() else p for p in spec.placements))


def _whole(spec: DTensorSpec, dims: Sequence[int]) -> DTensorSpec:
    """The spec of a tensor with `dims` replicated, so that no mesh dim splits them."""
    return _spec(spec, (Replicate() if _splits(p, dims) else p for p in spec.placements))


def _reduced(spec: DTensorSpec, rank: int, call: Spec) -> DTensorSpec:
    """The spec of the reduction of a tensor of `rank` dims with this spec."""
    planes = int(call.function == "state")
    kept = [d for d in range(rank) if call.keepdim or d not in call.dims]

    def renumbered(placement: Any) -> Any:
        if not hasattr(placement, "dim"):
            return placement
        factor = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
        return type(placement)(planes + kept.index(placement.dim), **factor)

    return _spec(spec, map(renumbered, _whole(spec, call.dims).placements))


def _local(x: Any, spec: DTensorSpec) -> Tensor:
    """The local tensor of `x` redistributed to the placements of `spec`, in torch's default order of mesh dims."""
    local: Tensor = x._local_tensor
    if spec.tensor_meta is not x._spec.tensor_meta:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=x._spec.tensor_meta)
    if spec != x._spec:
        local = redistribute_local_tensor(local, x._spec, spec)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _wrap(local: Tensor, spec: DTensorSpec, shape: Sequence[int], like: Any = None) -> Any:
    """A DTensor with the placements of `spec`: contiguous, or with the strides of torch.empty_like(like)."""
    if like is None or like.is_contiguous():
        stride = make_contiguous_strides_for(tuple(shape))
    else:
        stride = compute_elementwise_output_strides(like)
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    return DTensor(local, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)


def _check(*tensors: Any) -> None:
    if not all(isinstance(t, DTensor) for t in tensors):
        raise TypeError("onepass: a call takes DTensors or other tensors, got both; see DTensor.from_local()")


# Handlers -------------------------------------------------------------------------------------------------------------


def _forward(parse: Callable[..., Spec], counted: str, operator: Any, args: Any, kwargs: Any) -> Any:
    """The handler of a forward. For an operator of torch, `counted` is the name by which a patch counts the call."""
    x, *given = args
    _check(x)
    call, rank = parse(*given, **kwargs), x.dim()
    call = call._replace(dims=wrap_dims(call.function, x, call.dims) or list(range(max(rank, 1))))
    spec = _summed(x._spec)
    if counted and not patching.serves(x):
        spec = _whole(spec, call.dims)
    y = _local(x, spec)
    if spec.mesh.get_coordinate() is not None:  # otherwise this rank is not in the mesh and has an empty tensor
        groups = _groups(spec, call.dims)
        y = _rows(y, call, groups, counted) if groups else operator(y, *given, **kwargs)
    if call.function not in REDUCTIONS:
        return _wrap(y, spec, x.shape, None if counted else x)
    shape = reduced_shape(x.shape, call.dims if rank else [], call.keepdim)
    return _wrap(y, _reduced(spec, rank, call), [2, *shape] if call.function == "state" else shape)


def _rows(x: Tensor, call: Spec, groups: Groups, counted: str) -> Tensor:
    """The result of a rank's part of rows that are split over ranks."""
    function, dims, dtype, keepdim, _ = call
    if function == "state":
        return distributed_ops.merge_over(ops.call(x, call), groups, call.engine)[::3]
    to = dtype or x.dtype
    if to is not torch.float32 or x.dtype not in HALF_DTYPES:  # half types stay, and kernels convert them to float32
        x = x.to(to)
    if function == "softmin":
        x, call = -x, call._replace(function="softmax")
    y = distributed_ops.forward(x, call._replace(dtype=to if to is not x.dtype else None), groups).to(to)
    if function == "logsumexp" and not keepdim:
        y = y.squeeze(dims)
    return _count(y, counted)


def _count(result: Tensor, counted: str) -> Tensor:
    """Counts the result of an operator of torch and makes it contiguous."""
    if not counted:
        return result
    native.call("onepass_patch_count", patching.FUNCTIONS.index(counted))
    return result.contiguous()


def _backward(parse: Callable[..., autograd.Parsed], counted: str, operator: Any, args: Any, kwargs: Any) -> Any:
    """The handler of a backward. The backward of logsumexp needs no exchange."""
    grad: Any
    saved: Any
    (grad, saved, lse), call, to = parse(*args, **kwargs)
    tensors = [grad, saved] if lse is None else [grad, saved, lse]
    _check(*tensors)
    call = call._replace(dims=wrap_dims(call.function, saved, call.dims))
    spec = saved._spec
    if lse is None and spec.is_replicated():  # then to take the gradient's placements needs no exchange
        spec = _spec(spec, grad._spec.placements)
    spec = _summed(spec)
    if counted and not patching.serves(saved):
        spec = _whole(spec, call.dims)
    of_rows = spec if lse is None else _reduced(spec, saved.dim(), call)
    local = [_local(t, spec if t is saved else of_rows) for t in tensors]
    dx = local[1]
    if spec.mesh.get_coordinate() is not None:
        groups = _groups(spec, call.dims) if lse is None else ()
        if groups:
            g, y = local
            if call.function == "softmin":
                g, call = -g, call._replace(function="softmax")
            dx = _count(distributed_ops.backward(g, (y,), call, groups, to), counted)
        else:
            dx = operator(*local, *args[len(local) :], **kwargs)
    return _wrap(dx, spec, saved.shape, None if counted else saved)


def _refuse(operator: Any, args: Any, kwargs: Any) -> Any:
    raise NotImplementedError(
        f"onepass: this call takes no DTensor (its operator is {operator.name()}); give it local tensors, as "
        "DTensor.to_local() gives them. onepass.distributed serves rows that are split over ranks"
    )


# Registrations --------------------------------------------------------------------------------------------------------


def _of_onepass() -> dict[Any, Any]:
    """The handlers of all operators of onepass."""
    names = [name.removeprefix("onepass::") for name in torch._C._dispatch_get_all_op_names() if "onepass::" in name]
    found = {}
    for name, _, overload in (name.partition(".") for name in names):
        found[getattr(getattr(torch.ops.onepass, name), overload or "default")] = _refuse
    for name, operator in ops._REGISTERED.items():
        parse = functools.partial(ops._parse, name) if name != "triton" else functools.partial(Spec, engine="triton")
        found[operator] = functools.partial(_forward, parse, "")
    parsers: tuple[Any, ...] = autograd._parse_softmax, autograd._parse_logsumexp, autograd._parse_triton
    for operator, parse_saved in zip(autograd._REGISTERED, parsers, strict=True):
        found[operator] = functools.partial(_backward, parse_saved, "")
    return found


def _of_torch() -> dict[Any, Any]:
    """The handlers of torch's operators."""
    found = {torch.ops.aten.logsumexp.default: functools.partial(_forward, _parse_logsumexp, "logsumexp")}
    for name in ("softmax", "log_softmax"):
        forward, backward = (getattr(torch.ops.aten, f"_{name}{end}").default for end in ("", "_backward_data"))
        found[forward] = functools.partial(_forward, functools.partial(_parse_softmax, name), name)
        found[backward] = functools.partial(
            _backward, functools.partial(_parse_softmax_backward, name), f"{name} backward"
        )
    return found


def _parse_logsumexp(dim: list[int], keepdim: bool = False) -> Spec:
    return Spec("logsumexp", dim, None, keepdim)


def _parse_softmax(function: str, dim: int, half_to_float: bool) -> Spec:
    return Spec(function, [dim], torch.float32 if half_to_float else None)


def _parse_softmax_backward(function: str, grad: Any, y: Any, dim: int, dtype: torch.dtype) -> autograd.Parsed:
    return (grad, y, None), Spec(function, [dim], keepdim=True), dtype


_torchs = _of_torch()


def switch(on: bool) -> None:
    """Gives torch's operators the handlers, or removes them. Handlers from other code are not touched."""
    for operator, handler in _torchs.items():
        if on:
            _handlers.setdefault(operator, handler)
        elif _handlers.get(operator) is handler:
            del _handlers[operator]


def _wrap_loss_parallel(losses: Any) -> None:
    """Restores the handlers at the end of `loss_parallel`, which has its own for log_softmax and then removes them."""
    disable = losses._disable_custom_loss_ops

    def disable_and_switch() -> None:
        disable()
        switch(patching.is_on())

    losses._disable_custom_loss_ops = disable_and_switch


_handlers.update(_of_onepass())
patching.follow_switch(switch)
when_imported("torch.distributed.tensor.parallel.loss", _wrap_loss_parallel)
