"""Calls the C++ variants, which are part of the native library: one thread, one row after the other."""

from __future__ import annotations

import ctypes

from torch import Tensor

from onepass import native
from onepass.tools.gallery.variants import DTYPES

__all__ = ["online", "threepass"]


def _call(name: str, x: Tensor, out: Tensor) -> Tensor:
    numbers = (x.shape[0], x.shape[1], x.stride(0), out.stride(0))
    pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
    dtype = DTYPES.index(str(x.dtype).removeprefix("torch."))
    native.call(f"onepass_gallery_{name}", dtype, *pointers, *map(ctypes.c_int64, numbers))
    return out


def threepass(x: Tensor, out: Tensor) -> Tensor:
    """cpu_threepass.cpp."""
    return _call("cpu_threepass", x, out)


def online(x: Tensor, out: Tensor) -> Tensor:
    """cpu_online.cpp."""
    return _call("cpu_online", x, out)
