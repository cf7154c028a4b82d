"""The tensors of a case: normally distributed data, the output, and for the backward the output's gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from zlib import crc32

import torch
from torch import Tensor

from onepass.tools.bench.cases import ITEMSIZE, Case

_ALIGN = 512  # bytes between rotating buffers, what torch's allocators give


@dataclass
class Work:
    """One case at one dtype on one device. `out` is the memory of the result (of a backward that of the input's
    gradient), None where the call allocates its own."""

    case: Case
    dtype: str
    x: Tensor
    out: Tensor | None = None
    grad: Tensor | None = None

    def fresh(self) -> Work:
        """The same call, as a user makes it: the output is allocated by the call."""
        return replace(self, out=None)

    @property
    def out_dtype(self) -> torch.dtype | None:
        """The `dtype=` to pass, or None."""
        return getattr(torch, self.case.out_dtype) if self.case.out_dtype else None


def needed_bytes(case: Case, dtype: str) -> int:
    """Memory that a case takes besides what the providers take for themselves: its tensors and one more output, or for
    logsumexp what the two copies that it is measured by are made into."""
    out = prod(case.shape) * ITEMSIZE[case.result_dtype(dtype)]
    if case.function == "logsumexp" and case.direction == "forward":
        out += out // 2
    return case.bytes(dtype) + out


def make(case: Case, dtype: str, device: torch.device, seed: int) -> Work:
    """Random normal data that depends on the seed and the case alone, not on what was run before it."""
    generator = torch.Generator(device).manual_seed(crc32(f"{seed}/{case.suite}/{case.name}".encode()))
    work = empty(case, dtype, device)
    work.x.normal_(generator=generator)
    if work.grad is not None:
        work.grad.normal_(generator=generator)
    return work


def empty(case: Case, dtype: str, device: torch.device) -> Work:
    """The tensors, unset."""
    of, result = getattr(torch, dtype), getattr(torch, case.out_dtype or dtype)
    x, y = _laid_out(case, of, device), case.out_shape()
    made = torch.empty(y, dtype=result, device=device) if y != case.shape else _laid_out(case, result, device)
    if case.direction == "backward":
        return Work(case, dtype, x, torch.empty_like(x), made)
    return Work(case, dtype, x, out=made)


def _laid_out(case: Case, dtype: torch.dtype, device: torch.device) -> Tensor:
    if case.layout == "channels_last":
        return torch.empty(case.shape, dtype=dtype, device=device, memory_format=torch.channels_last)
    if case.layout == "transposed":
        *outer, rows, columns = case.shape
        return torch.empty((*outer, columns, rows), dtype=dtype, device=device).mT
    return torch.empty(case.shape, dtype=dtype, device=device)


def copies(work: Work, count: int) -> list[Work]:
    """`count` works on tensors of their own, aligned as tensors of their own are, each with the data of `work`."""

    def several(like: Tensor | None) -> list[Tensor | None]:
        if like is None:
            return [None] * count
        step = -(-like.numel() * like.element_size() // _ALIGN) * _ALIGN // like.element_size()
        store = torch.empty(count * max(step, 1), dtype=like.dtype, device=like.device)
        parts = [store.as_strided(like.shape, like.stride(), i * step) for i in range(count)]
        return [part.copy_(like) for part in parts]

    xs, outs, grads = several(work.x), several(work.out), several(work.grad)
    return [replace(work, x=x, out=o, grad=g) for x, o, g in zip(xs, outs, grads, strict=True) if x is not None]
