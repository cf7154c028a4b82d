"""Calls and gradients on the emulator."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepass.native import FUNCTIONS
from onepass.tools.emulator.build import CORE, HERE, UNCHECKED, build, folder, translated
from onepass.tools.emulator.run import reach

LOSS = ("x", "dx", "index", "weight", "weight_sum", "scale", "terms", "result", "grads", "total", "grad_lse")
LOSS += ("loss", "weights")
DIVERGENCE = ("x", "y", "dx", "dy", "weight", "terms", "grads")
KINDS = ("cross_entropy", "kl", "product")  # of two tensors
SEGMENTS = ("x", "bias", "y", "grad", "dx")
SCORED = ("input", "result", "grad", "scale", "bias", "alibi", "sink", "mask", "lse", "of_cap")
_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


@functools.cache
def host() -> Path:
    """The engine's side of calls and the machine, built."""
    here = Path(__file__).parent
    sources = (
        here / "emulated.cpp",
        CORE / "cuda/host/loss.cpp",
        CORE / "cuda/host/divergence.cpp",
        CORE / "cuda/host/segments.cpp",
    )
    options = "-O0", UNCHECKED, "-pthread", f"-I{CORE}", f"-I{HERE}", "-shared"
    read = [path.read_bytes() for path in [*sorted(CORE.rglob("*")), *sorted(here.iterdir())] if path.is_file()]
    name = f"emulated-{hashlib.sha256(b''.join(read)).hexdigest()[:16]}.so"
    return build(folder() / name, *options, *sources, "-ldl")


class Emulator:
    """Serves calls and gradients as the CUDA engine does, on tensors of the CPU: by a plan, as the
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
        self.kernels_run: list[tuple[str, tuple[str, ...]]] = []  # sources and defines
        self.files: list[ctypes.Array[ctypes.c_char]] = []  # lest they are gone
        for function in (
            getattr(self.host, name)
            for name in (
                *("solve", "solve_scored", "solve_loss", "solve_divergence", "solve_segments"),
                *("solve_over_ranks", "find_offsets", "move_items", "run_kernel"),
            )
        ):
            function.restype = ctypes.c_char_p

    def _translate(self, words: bytes) -> int | None:
        source, compute, *defines = words.decode().split()
        self.kernels_run.append((source, tuple(defines)))
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
                self.host.add_range(ctypes.c_void_p(tensor.data_ptr()), reach(tensor), tensor is written)

    @contextlib.contextmanager
    def batch_invariant(self) -> Iterator[None]:
        self.host.set_batch_invariant(True)
        try:
            yield
        finally:
            self.host.set_batch_invariant(False)

    def done(self, wrong: bytes) -> None:
        if wrong:
            raise RuntimeError(wrong.decode() + self.failure)

    def call(self, function: str, x: Tensor, dims: Sequence[int], y: Tensor, plan: Sequence[int] | None = None) -> None:
        y_strides = y.stride()[1:] if function == "state" else y.stride()
        if function in ("logsumexp", "state"):
            y_strides = _spread(y_strides, x.dim(), dims)
        self._solve(False, function, [x, y], [x.stride(), y_strides], x.dtype, dims, plan)

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
        strides = [dx.stride(), saved.stride(), g.stride(), [0] * dx.dim()]
        if lse is not None:
            strides[2:] = [_spread(tensor.stride(), dx.dim(), dims) for tensor in (g, lse)]
        self._solve(True, function, [dx, saved, g, lse], strides, g.dtype, dims, plan)

    def _solve(
        self,
        backward: bool,
        function: str,
        tensors: list[Tensor | None],
        strides: list[Sequence[int]],
        dtype: torch.dtype,
        dims: Sequence[int],
        plan: Sequence[int] | None,
    ) -> None:
        shape, out = tensors[0].shape, tensors[not backward]
        types = FUNCTIONS.index(function), _TYPES[dtype], _TYPES[out.dtype]
        layout = (
            len(shape),
            _array(ctypes.c_int64, shape),
            _array(ctypes.c_int64, [stride for each in strides for stride in each]),
            _array(ctypes.c_bool, [dim in dims for dim in range(len(shape))]),
        )
        addresses = _array(ctypes.c_void_p, [None if tensor is None else tensor.data_ptr() for tensor in tensors])
        self.begin([tensor for tensor in tensors if tensor is not out], out)
        numbers = None if plan is None else _array(ctypes.c_int, plan)
        self.done(self.host.solve(backward, *types, addresses, *layout, numbers))

    def scored(
        self,
        function: str,
        tensors: dict[str, Tensor],
        dims: Sequence[int],
        numbers: Sequence[float] = (1.0, 0.0, -math.inf),
        window: Sequence[int] = (-(2**63), 2**63 - 1, 0),
        empty_is_zero: bool = False,
        plan: Sequence[int] | None = None,
        of_scores: bool = False,
        bias_parts: int = 0,
    ) -> None:
        """A scored call, or its gradient where there is a `grad`. `tensors` are by the names of SCORED and broadcast
        to the sizes of the input; `numbers`: factor, softcap, sink; `window`: least and most distance, offset.
        `of_scores`: of logsumexp, the gradient of the scores. `bias_parts`: the bias is the gradient of the bias,
        the first of so many parts."""
        given = [tensors.get(name) for name in SCORED]
        x, out = tensors["input"], tensors["result"]
        bias = tensors.get("bias", torch.zeros(0))
        backward = "grad" in tensors
        makes_bias_grad = bias_parts > 0
        written = [out, tensors.get("lse"), tensors.get("bias") if makes_bias_grad else None]
        others = [t for t in given if t is not None and all(t is not each for each in written)]
        self.begin(others, out)
        for name in ("bias", "mask", "of_cap"):  # the aligned words that hold them are read
            if name in tensors:
                begin, end = _storage(tensors[name])
                is_written = name == "bias" and makes_bias_grad
                self.host.add_range(ctypes.c_void_p(begin), ctypes.c_int64(end - begin), is_written)
        if (lse := tensors.get("lse")) is not None:
            self.host.add_range(ctypes.c_void_p(lse.data_ptr()), ctypes.c_int64(lse.numel() * lse.element_size()), True)
        steps = [
            None
            if t is None
            else _array(ctypes.c_int64, [0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)])
            if t is out
            else _array(ctypes.c_int64, t.expand(x.shape).stride())
            for t in given
        ]
        pointers = _array(ctypes.c_void_p, [None if each is None else ctypes.addressof(each) for each in steps])
        self.done(
            self.host.solve_scored(
                backward,
                FUNCTIONS.index(function),
                _array(ctypes.c_int, [_TYPES[t.dtype] for t in (x, out, bias)]),
                _array(ctypes.c_void_p, [None if t is None else t.data_ptr() for t in given]),
                _array(ctypes.c_void_p, [None if t is None else _storage(t)[1] for t in given]),
                x.dim(),
                _array(ctypes.c_int64, x.shape),
                pointers,
                _array(ctypes.c_bool, [dim in dims for dim in range(x.dim())]),
                _array(ctypes.c_double, numbers),
                _array(ctypes.c_int64, window),
                empty_is_zero,
                of_scores,
                bias_parts,
                None if plan is None else _array(ctypes.c_int, plan),
            )
        )

    def loss(
        self,
        tensors: dict[str, Tensor | None],
        dim: int,
        numbers: Sequence[float] = (1.0, 0.0, 0.0, 0.0),
        flags: Sequence[bool] = (False, False, False, True, False),
        ignore_index: int = -100,
        device: int = 0,
    ) -> None:
        """Terms of rows, or a loss, or their gradient where there is a `dx`. `tensors` are by the names of LOSS, but
        for x without gaps; `numbers` and `flags`: see emulated.cpp; `device`: fake_driver.h."""
        index, x = tensors.get("index"), tensors["x"]
        picks = 0 if index is None else index.numel() // (x.numel() // x.shape[dim])
        more = ctypes.c_int64(picks), ctypes.c_int64(ignore_index)
        more += _array(ctypes.c_double, numbers), _array(ctypes.c_bool, flags), device
        self._lossy(self.host.solve_loss, tensors, LOSS, 2, dim, more)

    def divergence(
        self,
        tensors: dict[str, Tensor | None],
        dim: int,
        kind: str,
        numbers: Sequence[float] = (1.0, 0.0, 0.0),
        device: int = 0,
    ) -> None:
        """The terms of two tensors, or their gradients where there are `dx` or `dy`. `tensors` are by the names of
        DIVERGENCE; `numbers`: factor, softcap, smoothing."""
        more = KINDS.index(kind), _array(ctypes.c_double, numbers), device
        self._lossy(self.host.solve_divergence, tensors, DIVERGENCE, 4, dim, more)

    def _lossy(
        self,
        solve: Any,
        tensors: dict[str, Tensor | None],
        names: Sequence[str],
        strided: int,
        dim: int,
        more: tuple[Any, ...],
    ) -> None:
        """Of `names`, the tensors of the first `strided` have strides."""
        given, x, backward = [tensors.get(name) for name in names], tensors["x"], "dx" in tensors
        self.begin([x], x.new_empty(0))
        for name, tensor in tensors.items():
            if tensor is not None and name != "x":
                begin, end = _storage(tensor)
                written = name in (("dx", "dy") if backward else ("terms", "result", "loss", "weights"))
                self.host.add_range(ctypes.c_void_p(begin), ctypes.c_int64(end - begin), written)
        steps = [None if t is None else _array(ctypes.c_int64, t.stride()) for t in given[:strided]]
        pointers = _array(ctypes.c_void_p, [None if each is None else ctypes.addressof(each) for each in steps])
        addresses = _array(ctypes.c_void_p, [None if t is None else t.data_ptr() for t in given])
        sizes = _array(ctypes.c_int64, x.shape)
        self.done(solve(backward, _TYPES[x.dtype], addresses, x.dim(), sizes, pointers, dim, *more))

    def segments(
        self,
        function: str,
        tensors: dict[str, Tensor],
        offsets: Tensor,
        dim: int = 0,
        order: Tensor | None = None,
        factor: float = 1.0,
        device: int = 0,
    ) -> None:
        """A function of segments, or its gradient where there is a `dx`. `tensors` are by the names of SEGMENTS."""
        backward = "dx" in tensors
        given, out = [tensors.get(name) for name in SEGMENTS], tensors["dx" if backward else "y"]
        self.begin([offsets, order, *(t for t in given if t is not out)], out)
        like = out if backward else tensors["x"]
        steps = [None if t is None else _array(ctypes.c_int64, t.stride()) for t in given]
        self.done(
            self.host.solve_segments(
                backward,
                FUNCTIONS.index(function),
                _array(ctypes.c_int, [0 if t is None else _TYPES[t.dtype] for t in given]),
                _array(ctypes.c_void_p, [None if t is None else t.data_ptr() for t in given]),
                like.dim(),
                _array(ctypes.c_int64, like.shape),
                _array(ctypes.c_void_p, [None if each is None else ctypes.addressof(each) for each in steps]),
                dim,
                ctypes.c_int64(offsets.numel() - 1),
                ctypes.c_void_p(offsets.data_ptr()),
                ctypes.c_void_p(None if order is None else order.data_ptr()),
                offsets.dtype is torch.int64,
                ctypes.c_double(factor),
                device,
            )
        )

    def offsets(self, index: Tensor, offsets: Tensor, device: int = 0) -> None:
        """Where the segments of a sorted index begin."""
        self.begin([index], offsets)
        wide = (t.dtype is torch.int64 for t in (index, offsets))
        sizes = ctypes.c_int64(index.numel()), ctypes.c_int64(offsets.numel() - 1)
        pointers = ctypes.c_void_p(index.data_ptr()), ctypes.c_void_p(offsets.data_ptr())
        self.done(self.host.find_offsets(*pointers, *sizes, *wide, device))

    def moves(
        self, source: Tensor, to: Tensor, local: Tensor, places: Tensor | None, is_into_order: bool, device: int = 0
    ) -> None:
        """A pass of items that move to an order, or back."""
        self.begin([source, local, places], to)
        pointers = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in (source, to, local, places)]
        items, item_bytes = ctypes.c_int64(len(source)), source[0].nbytes
        self.done(self.host.move_items(*pointers, items, item_bytes, is_into_order, device))

    def over_ranks(
        self,
        function: str,
        tensors: Sequence[Tensor],
        memory: Sequence[Tensor],
        fault: Tensor,
        rank: int,
        seconds: float = 60,
    ) -> None:
        """This rank's part of contiguous rows: x and y, or dx, y and its gradient. `memory`: of each rank."""
        backward = len(tensors) == 3
        read, out = (tensors[1:], tensors[0]) if backward else (tensors[:1], tensors[1])
        self.begin(read, out)
        addresses = _array(ctypes.c_int64, [t.data_ptr() for t in memory])
        for begin, end in (
            *map(_storage, (*memory, fault)),
            (ctypes.addressof(addresses), ctypes.addressof(addresses) + 8 * len(memory)),
        ):
            self.host.add_range(ctypes.c_void_p(begin), ctypes.c_int64(end - begin), True)
        kind = backward, FUNCTIONS.index(function), _TYPES[read[0].dtype], _TYPES[out.dtype]
        rows, n = map(ctypes.c_int64, out.shape)
        places = addresses, ctypes.c_void_p(fault.data_ptr()), ctypes.c_int64(int(seconds * 1e9))
        pointers = _array(ctypes.c_void_p, [t.data_ptr() for t in tensors])
        self.done(self.host.solve_over_ranks(*kind, pointers, rows, n, *places, len(memory), rank))

    def run(self, source: str, launch: Sequence[int], read: Sequence[Tensor], written: Tensor) -> None:
        """A kernel `onepass_kernel(read..., written)` of the sources. `launch`: blocks, threads of a block, blocks of a
        cluster or 0, bytes of shared memory, whether it is cooperative."""
        self.begin(read, written)
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*read, written)]
        arguments = _array(ctypes.c_void_p, [ctypes.addressof(address) for address in addresses])
        try:
            library = translated(self.kernels / source, "90", ())
        except Exception as error:
            raise RuntimeError(str(error)) from error
        self.done(self.host.run_kernel(str(library).encode(), _array(ctypes.c_int, launch), arguments))


def _storage(t: Tensor) -> tuple[int, int]:
    """Where the memory that holds a tensor begins and ends."""
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _array(kind: type, values: Sequence[Any]) -> Any:
    return (kind * len(values))(*values)


def _spread(strides: Sequence[int], rank: int, dims: Sequence[int]) -> list[int]:
    """Strides of a result without reduced dims over all dims."""
    rest = iter(strides)
    return [0 if dim in dims else next(rest) for dim in range(rank)]
