"""The rungs in rising order."""

from __future__ import annotations

import importlib.util
import shutil

import torch

from onepass.gallery.rung import Rung

__all__ = ["RUNGS", "rung"]


def _anywhere(device: torch.device) -> str | None:
    return None


def _jit(device: torch.device) -> str | None:
    from onepass.gallery.naive_jit import missing

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
    from onepass.engines import unavailable

    return unavailable("cuda", device) if device.type == "cuda" else "runs on NVIDIA GPUs alone"


_TRITON = ("num_warps", "num_stages", "num_ctas", "maxnreg", "block_size")
_CUDA = ("threads", "blocks", "maxnreg")

RUNGS: dict[str, Rung] = {
    rung.name: rung
    for rung in (
        Rung("naive", "naive.py", "naive:softmax", _anywhere),
        Rung("naive-jit", "naive_jit.py", "naive_jit:softmax", _jit, takes_out=False),
        Rung("naive-compile", "naive_compile.py", "naive_compile:softmax", _compile, takes_out=False),
        Rung("triton-row", "triton_row.py", "triton_row:softmax", _triton, _TRITON),
        Rung("triton-persistent", "triton_persistent.py", "triton_persistent:softmax", _triton, (*_TRITON, "programs")),
        Rung("triton-online", "triton_online.py", "triton_online:softmax", _triton, _TRITON),
        Rung("cpu-threepass", "cpu_threepass.cpp", "cpu:threepass", _cpu),
        Rung("cpu-online", "cpu_online.cpp", "cpu:online", _cpu),
        Rung("cuda-warp", "cuda_warp.cu", "cuda:warp", _cuda, _CUDA),
        Rung("cuda-block", "cuda_block.cu", "cuda:block", _cuda, _CUDA),
        Rung("cuda-online", "cuda_online.cu", "cuda:online", _cuda, _CUDA),
        Rung("cuda-auto", "cuda_auto.py", "cuda_auto:softmax", _cuda, _CUDA),
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
