"""The gallery's variants as providers, and a learner's kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import onepass
from onepass.tools.bench.cases import Case
from onepass.tools.bench.correctness import Inputs
from onepass.tools.bench.provider import INTERPRETED, Call, Provider
from onepass.tools.gallery import Variant
from onepass.tools.gallery.variants import DTYPES

if TYPE_CHECKING:
    from onepass.tools.gallery.check import Candidate


def gallery_unsupported(variant: Variant, case: Case, dtype: str) -> str | None:
    """Why a variant does not support a case, or None. Only for a variant that can run here."""
    if case.function != "softmax":
        return "the gallery has only softmax"
    direction, dim = ("backward" if variant.computes == "gradient" else "forward"), int(variant.computes != "columns")
    if case.direction != direction:
        return f"the variant computes the {direction}"
    if case.out_dtype:
        return "the gallery's functions take no dtype"
    if len(case.shape) != 2 or case.dims() != (dim,) or case.layout:
        return f"the variant takes the {('first', 'last')[dim]} dim of a matrix"
    if dtype not in DTYPES:
        return f"the gallery takes float32, float16 and bfloat16, got {dtype}"
    return variant.refuses(case.shape[0], case.shape[1], getattr(torch, dtype))


class GalleryProvider(Provider):
    """A variant of the gallery. `launch` has launch parameters that replace the variant's own choice."""

    gallery = True

    def __init__(self, variant: Variant, **launch: int):
        self.variant, self.launch = variant, launch
        self.name = variant.name
        self.label = f"{variant.language}, {variant.file}"
        self.quick = variant.name != "naive-compile"  # compiles for seconds per shape, as torch-compile does

    def unavailable(self, device: torch.device) -> str | None:
        return self.variant.unavailable(device)

    def redundant(self, device: torch.device) -> str | None:
        return INTERPRETED if device.type == "cpu" and self.variant.language == "Triton" else None

    def unsupported(self, case: Case, dtype: str) -> str | None:
        return gallery_unsupported(self.variant, case, dtype)

    def writes_out(self, inputs: Inputs) -> bool:
        return self.variant.takes_out

    def _is_torch(self) -> bool:
        """Whether the kernels are those of torch and its compilers."""
        return self.variant.name.startswith("naive")

    def workspace(self, case: Case, dtype: str) -> int:
        four_temporaries = 4 * 4 * prod(case.shape) if self._is_torch() else 0  # of float32
        return max(super().workspace(case, dtype), four_temporaries)

    def version(self) -> str | None:
        return super().version() if self._is_torch() else onepass.__version__

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        launch: dict[str, Any] = self.launch
        return partial(self.variant, **launch) if launch else self.variant

    def prepare(self, inputs: Inputs) -> Call:
        if inputs.grad is None:
            return super().prepare(inputs)
        y = onepass.softmax(inputs.x, -1)  # the tensor that the forward saves
        f, out = self.forward(inputs.case, inputs.dtype), inputs.out
        return lambda: f(y, inputs.grad, out=out)


class Learned(Provider):
    """A learner's softmax that `onepass gallery check` has found right."""

    name = "yours"

    def __init__(self, candidate: Candidate):
        self.candidate = candidate
        self.label = f"{candidate.file.name}, {candidate.function}"

    def writes_out(self, inputs: Inputs) -> bool:
        return self.candidate.call is None

    def version(self) -> str | None:
        return None

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        if self.candidate.call is not None:
            return self.candidate.call

        def call(x: Tensor, out: Tensor | None = None) -> Tensor:
            out = torch.empty_like(x) if out is None else out
            self.candidate(x, out)
            return out

        return call
