"""The providers from other packages, where those are installed: Liger-Kernel and QuACK."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from onepass.tools.bench.cases import ITEMSIZE, Case
from onepass.tools.bench.collect_env import version as version_of
from onepass.tools.bench.providers import Provider

__all__ = ["Liger", "Quack"]


class Liger(Provider):
    """Liger-Kernel's Triton softmax."""

    name = "liger"
    label = "Liger"
    MAX_ROW = 65536  # up to 0.8.5 a longer row raises, although a kernel for it exists

    def unavailable(self, device: torch.device) -> str | None:
        if device.type == "cpu":
            return "does not support cpu tensors"
        return None if self.version() else "liger-kernel is not installed"

    def unsupported(self, case: Case, dtype: str) -> str | None:
        if case.function != "softmax" or case.out_dtype:
            return "Liger has only softmax without a dtype"
        if case.dims() != (len(case.shape) - 1,):
            return "Liger takes only the last dim"
        version = [int(number) for number in re.findall(r"\d+", self.version() or "")[:3]]
        limited = case.row() > self.MAX_ROW and version <= [0, 8, 5]
        return f"Liger takes rows of at most {self.MAX_ROW} elements" if limited else None

    def version(self) -> str | None:
        return version_of("liger-kernel")

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        apply: Callable[..., Tensor] = import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply
        return apply


class Quack(Provider):
    """QuACK's softmax in the CuTe DSL, from quack-kernels. It compiles a kernel for each row length and dtype in its
    first call, which takes about a second and is the checked call."""

    name = "quack"
    label = "QuACK"
    DTYPES = ("float32", "bfloat16", "float16")
    VECTOR_BYTES = 16  # a row must be a multiple of one load
    MAX_ROW_BYTES = 16 * 232448  # a row must fit into the shared memory of 16 blocks

    def unavailable(self, device: torch.device) -> str | None:
        if device.type == "cpu":
            return "does not support cpu tensors"
        if torch.version.hip:
            return "needs an NVIDIA GPU"
        return None if self.version() else "quack-kernels is not installed"

    def unsupported(self, case: Case, dtype: str) -> str | None:
        if case.function != "softmax" or case.out_dtype:
            return "QuACK has only softmax without a dtype"
        if len(case.shape) != 2 or case.dims() != (1,) or case.layout:
            return "QuACK takes the last dim of a matrix"
        if dtype not in self.DTYPES:
            return f"QuACK takes {', '.join(self.DTYPES)}"
        row_bytes = case.row() * ITEMSIZE[dtype]
        if row_bytes % self.VECTOR_BYTES:
            return f"QuACK takes rows of a multiple of {self.VECTOR_BYTES} bytes"
        if row_bytes > self.MAX_ROW_BYTES:  # its loops are unrolled, and the compilation would not end
            return f"QuACK takes rows of at most {self.MAX_ROW_BYTES} bytes, the shared memory of 16 blocks"
        return None

    def version(self) -> str | None:
        return version_of("quack-kernels")

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        softmax: Callable[..., Tensor] = import_module("quack.softmax").softmax  # attribute `quack.softmax` hides it
        return softmax
