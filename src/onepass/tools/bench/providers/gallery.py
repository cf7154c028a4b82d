"""The variants of the gallery as providers. They run with `--gallery`, or one by its name."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from onepass.tools.bench.cases import Case
from onepass.tools.bench.providers import Provider
from onepass.tools.gallery import VARIANTS, Variant
from onepass.tools.gallery.variants import DTYPES

__all__ = ["INTERPRETED", "GalleryProvider", "providers", "unsupported"]

INTERPRETED = "interprets its kernels on the CPU, which takes minutes"


def unsupported(variant: Variant, case: Case, dtype: str) -> str | None:
    """Why a variant does not support a case, or None. Only for a variant that can run here."""
    if case.function != "softmax" or case.direction != "forward":
        return "the gallery has only the forward of softmax"
    if case.out_dtype:
        return "the gallery's functions take no dtype"
    if len(case.shape) != 2 or case.dims() != (1,) or case.layout:
        return "the gallery takes the last dim of a matrix"
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
        return unsupported(self.variant, case, dtype)

    def takes_out(self, case: Case) -> bool:
        return self.variant.takes_out

    def _is_torch(self) -> bool:
        """Whether the kernels are those of torch and its compilers."""
        return self.variant.name.startswith("naive")

    def workspace(self, case: Case, dtype: str) -> int:
        four_temporaries = 4 * 4 * prod(case.shape) if self._is_torch() else 0  # of float32
        return max(super().workspace(case, dtype), four_temporaries)

    def version(self) -> str | None:
        import onepass

        return super().version() if self._is_torch() else onepass.__version__

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        variant = self.variant
        if not self.launch:
            return variant
        options: dict[str, Any] = dict(self.launch)
        return lambda x, out=None: variant(x, out=out, **options)


def providers() -> list[GalleryProvider]:
    """A provider per variant but `naive`, which the provider of that name runs."""
    return [GalleryProvider(variant) for variant in VARIANTS.values() if variant.name != "naive"]
