"""What the tests of warming up share."""

import pytest
import torch
from click.testing import CliRunner, Result

from onepass import native
from onepass.cli import cli

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
FAMILY = ("softmax", "log_softmax", "softmin")
TYPES = [(F32, F32), (F64, F64), (F16, F16), (BF16, BF16), (BF16, F32), (F32, F16)]


def has_nvrtc() -> bool:
    try:
        return bool(native.status("nvrtc"))
    except RuntimeError:
        return False


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="no NVRTC here")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["warmup", *arguments])


def names(kernels: list[str]) -> set[str]:
    """What tells kernels apart: several plans may ask for one."""
    return {kernel.split("-")[1] for kernel in kernels}
