"""The tensors of a case: normally distributed data, the output, and for the backward the output's gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from zlib import crc32

import torch
from torch import Tensor

from onepass.tools.bench.cases import ITEMSIZE, Case

_ALIGN = 512  # bytes, the alignment of torch's allocators


@dataclass
class Inputs:
    """The tensors of one case at one dtype on one device.

    `out` receives the result (for a backward the input's gradient); if it is None, the call allocates its result.
    """

    case: Case
    dtype: str
    x: Tensor
    out: Tensor | None = None
    grad: Tensor | None = None

    def without_out(self) -> Inputs:
        """The same inputs for a call that allocates its result, as a user's call does."""
        return replace(self, out=None)


def required_bytes(case: Case, dtype: str) -> int:
    """The memory of a case: its tensors, one more output, and for logsumexp the targets of the two copies.

    What a provider allocates itself is not included.
    """
    out = prod(case.shape) * ITEMSIZE[case.result_dtype(dtype)]
    if case.function == "logsumexp" and case.direction == "forward":
        out += out // 2
    return case.bytes(dtype) + out


def make_inputs(case: Case, dtype: str, device: torch.device, seed: int) -> Inputs:
    """Random normal data, which depends only on the seed, the suite and the case's name."""
    generator = torch.Generator(device).manual_seed(crc32(f"{seed}/{case.suite}/{case.name}".encode()))
    x = _empty(case, case.shape, dtype, device).normal_(generator=generator)
    y = _empty(case, case.out_shape(), case.out_dtype or dtype, device)
    if case.direction == "backward":
        return Inputs(case, dtype, x, torch.empty_like(x), y.normal_(generator=generator))
    return Inputs(case, dtype, x, out=y)


def _empty(case: Case, shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    """A tensor in the case's layout, or a contiguous one if its shape is not the case's."""
    layout = case.layout if shape == case.shape else ""
    if layout == "transposed":
        return torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=getattr(torch, dtype), device=device).mT
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device, memory_format=memory_format)


def replicate(inputs: Inputs, count: int) -> list[Inputs]:
    """`count` copies of the inputs, each tensor aligned as an allocation of its own would be."""

    def repeat(like: Tensor | None) -> list[Tensor | None]:
        if like is None:
            return [None] * count
        step = -(-like.numel() * like.element_size() // _ALIGN) * _ALIGN // like.element_size()
        storage = torch.empty(count * max(step, 1), dtype=like.dtype, device=like.device)
        return [storage.as_strided(like.shape, like.stride(), i * step).copy_(like) for i in range(count)]

    columns = zip(repeat(inputs.x), repeat(inputs.out), repeat(inputs.grad), strict=True)
    return [replace(inputs, x=x, out=out, grad=grad) for x, out, grad in columns if x is not None]
