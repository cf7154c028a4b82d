"""The providers from other packages, each where it is installed: Liger-Kernel and QuACK."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from onepass.tools.bench.cases import ITEMSIZE, Case
from onepass.tools.bench.environment import version as version_of
from onepass.tools.bench.providers import Provider, Refused

__all__ = ["Liger", "Quack"]


class Liger(Provider):
    """Liger-Kernel's Triton softmax, where it is installed."""

    name = "liger"
    label = "Liger"
    LONGEST = 65536  # elements of a row; up to 0.8.5 a longer one raises, though there is a kernel for it

    def unavailable(self, device: torch.device) -> str | None:
        if device.type == "cpu":
            return "serves no cpu tensors"
        return None if self.version() else "liger-kernel is not installed"

    def supports(self, case: Case, dtype: str) -> str | None:
        if case.function != "softmax" or case.out_dtype:
            return "Liger has softmax alone, without a dtype"
        return None if case.dims() == (len(case.shape) - 1,) else "Liger takes the last dim alone"

    def version(self) -> str | None:
        return version_of("liger-kernel")

    def function(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        apply: Callable[..., Tensor] = import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply
        if case.row() <= self.LONGEST:
            return apply

        def long(x: Tensor) -> Tensor:
            """Its error is its refusal; a version that takes such rows is timed."""
            try:
                return apply(x)
            except RuntimeError as error:
                if "exceeds the recommended" not in str(error):
                    raise
                raise Refused(f"Liger takes rows of at most {self.LONGEST} elements") from None

        return long


class Quack(Provider):
    """QuACK's softmax in the CuTe DSL, where quack-kernels is installed. It compiles a kernel for each row length and
    dtype in its first call, about a second, which is the check's."""

    name = "quack"
    label = "QuACK"
    DTYPES = ("float32", "bfloat16", "float16")
    VECTOR = 16  # bytes that it loads at once: a row is a whole number of them
    HOLDS = 16 * 232448  # bytes: a row lies in the shared memory of at most 16 blocks

    def unavailable(self, device: torch.device) -> str | None:
        if device.type == "cpu":
            return "serves no cpu tensors"
        if torch.version.hip:
            return "needs an NVIDIA GPU"
        return None if self.version() else "quack-kernels is not installed"

    def supports(self, case: Case, dtype: str) -> str | None:
        if case.function != "softmax" or case.out_dtype:
            return "QuACK has softmax alone, without a dtype"
        if len(case.shape) != 2 or case.dims() != (1,) or case.layout:
            return "QuACK takes the last dim of a matrix"
        if dtype not in self.DTYPES:
            return f"QuACK takes {', '.join(self.DTYPES)}"
        if case.row() * ITEMSIZE[dtype] % self.VECTOR:
            return f"QuACK takes rows of whole {self.VECTOR} bytes"
        if case.row() * ITEMSIZE[dtype] > self.HOLDS:  # its loops are unrolled: a compilation without end
            return f"QuACK takes rows of at most {self.HOLDS} bytes, the shared memory of 16 blocks"
        return None

    def version(self) -> str | None:
        return version_of("quack-kernels")

    def function(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        made: Callable[..., Tensor] = import_module("quack.softmax").softmax  # `quack.softmax` alone is the function
        return made
