"""Softmax of rows that are split over GPUs. The kernel itself exchanges the states, through symmetric memory.

Symmetric memory can be read and written by all GPUs of a process group. The first call of a process group allocates one
piece of it on a device. Calls use it one after another: a call on another stream waits for earlier ones. The kernel
counts the calls itself, so that CUDA graphs may contain it.
"""

import math
from typing import Any

import torch
from torch import Tensor

from . import native
from .native import library

__all__ = ["Links", "rows_over_ranks"]

# The result or, with `grad`, the gradient of rows. The last `dims` dims are reduced. Without grad x is the input, with
# grad it is the forward's result.
library.define("rows_over_ranks(Tensor x, Tensor? grad, str function, int dims, ScalarType dtype, str group) -> Tensor")
rows_over_ranks = torch.ops.onepass.rows_over_ranks.default
_VECTOR = 8  # the most elements of a vector load
_FAULTS = {
    1: "did not answer within {seconds:g} s",
    2: "made another call: function, dtypes and the number of rows are the same on every rank",
}


class Links:
    """The symmetric memory of a process group on a device. All ranks must create it together."""

    def __init__(self, group: Any, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.seconds = group._get_backend(device).options._timeout.total_seconds()
        self.memory = symmetric.empty(native.rank_memory(self.size), dtype=torch.uint8, device=device)
        self.memory.zero_()
        torch.cuda.synchronize(device)  # the memory is zero before any rank goes on
        self.handle = symmetric.rendezvous(self.memory, group.group_name)
        offset = self.memory.data_ptr() - self.handle.buffer_ptrs[self.rank]
        addresses = [address + offset for address in self.handle.buffer_ptrs]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.fault = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self.stream: torch.cuda.Stream | None = None

    def check(self) -> None:
        """Raises an error if an earlier kernel failed. The results of that kernel are NaN."""
        fault, rank = self.fault.tolist()
        if fault:
            raise RuntimeError(
                f"onepass.distributed: in an earlier call with exchange='kernel' rank {rank} of {self.size} "
                f"{_FAULTS[fault].format(seconds=self.seconds)}. The results of this rank are NaN since then, and the "
                "process group exchanges states no more within kernels"
            )

    def take_turn(self, stream: torch.cuda.Stream) -> None:
        """Makes the stream wait for earlier calls on another stream."""
        if torch.cuda.is_current_stream_capturing():
            return
        if self.stream is not None and self.stream != stream:
            stream.wait_stream(self.stream)
        self.stream = stream


_links: dict[tuple[str, torch.device], Links] = {}


def _links_of(name: str, device: torch.device) -> Links:
    c10d: Any = torch._C._distributed_c10d
    group = c10d._resolve_process_group(name)
    links = _links.get((name, device))
    if links is None or links.group is not group:  # a name may be reused after its group is destroyed
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "onepass.distributed: the first call with exchange='kernel' of a process group allocates memory and "
                "waits for all ranks; make one before the graph is captured"
            )
        links = _links[name, device] = Links(group, device)
    return links


def _phase(t: Tensor) -> int:
    """The offset of the tensor's first element from a multiple of a vector, in elements."""
    return t.data_ptr() // t.element_size() % _VECTOR


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor with the same `_phase` as `like`, so that vector loads of both are aligned alike."""
    phase = _phase(like)
    if not phase:
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    return torch.empty(phase + like.numel(), dtype=dtype, device=like.device)[phase:].view(like.shape)


def _laid_out(t: Tensor, like: Tensor) -> Tensor:
    if t.is_contiguous() and _phase(t) == _phase(like):
        return t
    return _empty(like, t.dtype).copy_(t)


def _launch(x: Tensor, grad: Tensor | None, function: str, dims: int, dtype: torch.dtype, group: str) -> Tensor:
    x = x.contiguous()
    result, first = _empty(x, dtype), x.dim() - dims
    rows, n = math.prod(x.shape[:first]), math.prod(x.shape[first:])
    if not rows:
        return result
    tensors = [x, result] if grad is None else [result, x, _laid_out(grad.to(x.dtype), x)]
    links = _links_of(group, x.device)
    links.check()
    stream = torch.cuda.current_stream(x.device)
    links.take_turn(stream)
    call = function, grad is not None, x.dtype, dtype, rows, n, tensors
    with torch.cuda.device(x.device):
        patience = int(links.seconds * 1e9)
        native.over_ranks(*call, stream.cuda_stream, links.addresses, links.fault, patience, links.size, links.rank)
    return result


torch.library.register_fake(
    "onepass::rows_over_ranks",
    lambda x, grad, function, dims, dtype, group: torch.empty(x.shape, dtype=dtype, device=x.device),
    lib=library,
)
library.impl("rows_over_ranks", torch._disable_dynamo(_launch), "CUDA")
