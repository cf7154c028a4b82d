"""The rungs of the gallery as providers. They run when asked for: by `--gallery`, or one by its name."""

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

__all__ = ["INTERPRETED", "RungProvider", "providers", "refusal"]

INTERPRETED = "interprets its kernels on the CPU, which takes minutes"


def refusal(rung: Variant, case: Case, dtype: str) -> str | None:
    """Why a rung does not take a case, or None. Only for a rung that can run here."""
    if case.function != "softmax" or case.direction != "forward":
        return "the gallery has only the forward of softmax"
    if case.out_dtype:
        return "a variant has no dtype to give"
    if len(case.shape) != 2 or case.dims() != (1,) or case.layout:
        return "a variant takes only the last dim of a matrix"
    if dtype not in DTYPES:
        return f"a variant takes float32, float16 and bfloat16, got {dtype}"
    return rung.refuses(case.shape[0], case.shape[1], getattr(torch, dtype))


class RungProvider(Provider):
    """A rung in the race. `launch` holds launch parameters in place of the rung's own choice."""

    gallery = True

    def __init__(self, rung: Variant, **launch: int):
        self.rung, self.launch = rung, launch
        self.name = rung.name
        self.label = f"{rung.language}, {rung.file}"
        self.quick = rung.name != "naive-compile"  # compiles for seconds a shape, as torch-compile does

    def unavailable(self, device: torch.device) -> str | None:
        return self.rung.unavailable(device)

    def redundant(self, device: torch.device) -> str | None:
        return INTERPRETED if device.type == "cpu" and self.rung.language == "Triton" else None

    def supports(self, case: Case, dtype: str) -> str | None:
        return refusal(self.rung, case, dtype)

    def takes_out(self, case: Case) -> bool:
        return self.rung.takes_out

    def workspace(self, case: Case, dtype: str) -> int:
        least = super().workspace(case, dtype)
        if not self.rung.name.startswith("naive"):
            return least
        return max(least, 4 * 4 * prod(case.shape))  # four temporaries of float32 at a time, at most

    def version(self) -> str | None:
        """torch's for the rungs whose kernels are torch's."""
        import onepass

        return super().version() if self.rung.name.startswith("naive") else onepass.__version__

    def function(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        rung = self.rung
        if not self.launch:
            return rung
        options: dict[str, Any] = dict(self.launch)
        return lambda x, out=None: rung(x, out=out, **options)


def providers() -> list[RungProvider]:
    """One for each rung but `naive`, which the provider of that name runs."""
    return [RungProvider(rung) for rung in VARIANTS.values() if rung.name != "naive"]
