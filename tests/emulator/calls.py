"""Calls, and gradients over columns, on the emulator."""

from __future__ import annotations

import ctypes
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from onepass.native import FUNCTIONS

from .build import CORE, folder, host, translated

_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


class Emulator:
    """Serves calls, and gradients over columns, as the CUDA engine does, on tensors of the CPU: by a plan, as the
    engine's private operators take it, or (None) by the one that an H200 has for it.

    `core`: the engine's sources. `order` of threads: 0 forwards, 1 backwards, 2 drawn; `lateness` of asynchronous
    copies and messages: 0 at once, 1 as late as can be, 2 drawn. By default both are drawn for each call.
    """

    device, most_cluster = "cpu", 16

    def __init__(self, core: Path = CORE, order: int | None = None, lateness: int | None = None) -> None:
        self.kernels, self.order, self.lateness = core / "cuda" / "kernels", order, lateness
        self.draw = random.Random(0)
        self.failure = ""
        own = tempfile.mkstemp(suffix=".so", dir=folder())[1]  # as it remembers the kernels of its sources
        self.host = ctypes.CDLL(shutil.copy(host(), own))
        self.translate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(self._translate)
        self.files: list[ctypes.Array[ctypes.c_char]] = []  # lest they are gone
        for function in (self.host.forward, self.host.backward, self.host.run_kernel):
            function.restype = ctypes.c_char_p

    def _translate(self, words: bytes) -> int | None:
        source, compute, *defines = words.decode().split()
        try:
            library = translated(self.kernels / source, compute, tuple(defines))
        except Exception as error:  # what a callback raises is lost
            self.failure = f": {error}"
            return None
        self.files.append(ctypes.create_string_buffer(str(library).encode()))
        return ctypes.addressof(self.files[-1])

    def begin(self, read: Sequence[Tensor | None], written: Tensor) -> None:
        self.host.translate_by(self.translate)
        order = self.draw.randrange(3) if self.order is None else self.order
        lateness = self.draw.randrange(3) if self.lateness is None else self.lateness
        self.host.set_way(self.draw.randrange(2**31), order, lateness)
        for tensor in (*read, written):
            if tensor is not None and tensor.numel():
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                reach = 1 + sum((size - 1) * stride for size, stride in steps)
                size = ctypes.c_int64(reach * tensor.element_size())
                self.host.add_range(_address(tensor), size, tensor is written)

    def done(self, wrong: bytes) -> None:
        if wrong:
            raise RuntimeError(wrong.decode() + self.failure)

    def call(self, function: str, x: Tensor, dims: Sequence[int], y: Tensor, plan: Sequence[int] | None = None) -> None:
        number, reduced = FUNCTIONS.index(function), [dim in dims for dim in range(x.dim())]
        y_strides = y.stride()[1:] if function == "state" else y.stride()
        if function in ("logsumexp", "state"):
            y_strides = _spread(y_strides, reduced)
        layout = x.dim(), _longs(x.shape), _longs(x.stride()), _longs(y_strides), _bools(reduced)
        self.begin([x], y)
        self.done(
            self.host.forward(number, _TYPES[x.dtype], _TYPES[y.dtype], _address(x), _address(y), *layout, _plan(plan))
        )

    def gradient(
        self,
        function: str,
        g: Tensor,
        saved: Tensor,
        lse: Tensor | None,
        dims: Sequence[int],
        dx: Tensor,
        plan: Sequence[int] | None = None,
    ) -> None:
        reduced = [dim in dims for dim in range(dx.dim())]
        strides = [dx.stride(), saved.stride(), g.stride(), [0] * dx.dim()]
        if lse is not None:
            strides[2:] = [_spread(tensor.stride(), reduced) for tensor in (g, lse)]
        each = [_address(tensor) for tensor in (dx, saved, g, lse)]
        types = FUNCTIONS.index(function), _TYPES[g.dtype], _TYPES[dx.dtype]
        layout = dx.dim(), _longs(dx.shape), _longs([s for of in strides for s in of]), _bools(reduced)
        self.begin([g, saved, lse], dx)
        self.done(self.host.backward(*types, *each, *layout, _plan(plan)))

    def run(self, source: str, launch: Sequence[int], read: Sequence[Tensor], written: Tensor) -> None:
        """A kernel `onepass_kernel(read..., written)` of the sources. `launch`: blocks, threads of a block, blocks of a
        cluster or 0, bytes of shared memory, whether it is cooperative."""
        self.begin(read, written)
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*read, written)]
        arguments = (ctypes.c_void_p * len(addresses))(*(ctypes.addressof(address) for address in addresses))
        self.done(self.host.run_kernel(f"{source} 90".encode(), (ctypes.c_int * 5)(*launch), arguments))


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _longs(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _bools(values: Sequence[bool]) -> ctypes.Array[ctypes.c_bool]:
    return (ctypes.c_bool * len(values))(*values)


def _plan(plan: Sequence[int] | None) -> ctypes.Array[ctypes.c_int] | None:
    return None if plan is None else (ctypes.c_int * len(plan))(*plan)


def _spread(strides: Sequence[int], reduced: Sequence[bool]) -> list[int]:
    """Strides of a result without reduced dims over all dims."""
    rest = iter(strides)
    return [0 if gone else next(rest) for gone in reduced]
