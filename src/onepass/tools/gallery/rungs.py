"""The rungs in rising order."""

from __future__ import annotations

import importlib.util
import shutil
from functools import partial
from typing import TYPE_CHECKING

from onepass.tools.gallery.rung import Rung

if TYPE_CHECKING:
    import torch

__all__ = ["RUNGS", "rung"]


def _anywhere(device: torch.device) -> str | None:
    return None


def _jit(device: torch.device) -> str | None:
    from onepass.tools.gallery.naive_jit import missing

    return missing()


def _compile(device: torch.device) -> str | None:
    if device.type != "cpu":
        return None if importlib.util.find_spec("triton") else "needs triton"
    return None if shutil.which("g++") or shutil.which("clang++") else "needs a C++ compiler"


def _triton(device: torch.device) -> str | None:
    from onepass.triton import unavailable

    return unavailable(device)


def _cpu(device: torch.device) -> str | None:
    return None if device.type == "cpu" else "runs on the CPU alone"


def _cuda(device: torch.device) -> str | None:
    from onepass._engines import unavailable

    return unavailable("cuda", device) if device.type == "cuda" else "runs on NVIDIA GPUs alone"


_cpp_rung = partial(Rung, unavailable=_cpu, runs_on="CPU")
_cuda_rung = partial(Rung, unavailable=_cuda, options=("threads", "blocks", "maxnreg"), runs_on="NVIDIA GPU")
_triton_rung = partial(Rung, unavailable=_triton, runs_on="GPU")
_TRITON = ("num_warps", "num_stages", "num_ctas", "maxnreg", "block_size")

RUNGS: dict[str, Rung] = {
    rung.name: rung
    for rung in (
        Rung("naive", "naive.py", "naive:softmax", _anywhere),
        Rung("naive-jit", "naive_jit.py", "naive_jit:softmax", _jit, takes_out=False),
        Rung("naive-compile", "naive_compile.py", "naive_compile:softmax", _compile, takes_out=False),
        _triton_rung("triton-row", "triton_row.py", "triton_row:softmax", options=_TRITON),
        _triton_rung(
            "triton-persistent", "triton_persistent.py", "triton_persistent:softmax", options=(*_TRITON, "programs")
        ),
        _triton_rung("triton-online", "triton_online.py", "triton_online:softmax", options=_TRITON),
        _cpp_rung("cpu-threepass", "cpu_threepass.cpp", "cpu:threepass"),
        _cpp_rung("cpu-online", "cpu_online.cpp", "cpu:online"),
        _cuda_rung("cuda-warp", "cuda_warp.cu", "cuda:warp"),
        _cuda_rung("cuda-block", "cuda_block.cu", "cuda:block"),
        _cuda_rung("cuda-online", "cuda_online.cu", "cuda:online"),
        _cuda_rung("cuda-auto", "cuda_auto.py", "cuda_auto:softmax"),
    )
}


def rung(name: str) -> Rung:
    """The rung of that name. Raises ValueError with the names there are.

    >>> import torch
    >>> rung("naive")(torch.zeros(1, 2))
    tensor([[0.5000, 0.5000]])
    """
    if name not in RUNGS:
        raise ValueError(f"unknown rung {name!r}: there are {', '.join(RUNGS)}")
    return RUNGS[name]
