"""What the emulator runs, built: kernels by NVRTC's PTX of them, and the engine's side of calls."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import onepass
from onepass import native

from .ptx import Kernel

HERE = Path(__file__).parent
CORE = Path(onepass.__file__).with_name("csrc")


@functools.cache
def missing() -> str:
    """What there is not on this machine; empty where it can emulate."""
    if not shutil.which("g++"):
        return "no g++"
    if sys.platform != "linux":
        return "not Linux"
    try:
        native.status("nvrtc")
    except RuntimeError as error:
        return str(error)
    return ""


def folder() -> Path:
    """For what is built, by whichever process of the tests is the first that needs it."""
    return Path(os.environ["ONEPASS_TESTS_BUILT"])


def build(made: Path, *arguments: object) -> Path:
    """`made` of other files, unless another process has."""
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            part = made.with_suffix(".part")
            command = ["g++", "-std=c++17", "-fPIC", *map(str, arguments), "-o", str(part)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            part.rename(made)
    return made


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    return ctypes.CDLL(native.status("compiler"))


def ptx_of(source: Path, compute: str, defines: Sequence[str]) -> str:
    """NVRTC's PTX of a source file."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    options = [
        f"--gpu-architecture=compute_{compute}",
        "--std=c++17",
        "--device-as-default-execution-space",
        f"-I{source.parent}",
        f"-I{CORE / 'core'}",
        *defines,
    ]
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    kind = "ProgramLog" if failed else "PTX"
    getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{kind}")(program, text)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert not failed, text.value.decode()
    return text.value.decode()


@functools.cache
def flags() -> list[str]:
    """For translations. Most of the time goes into building them: without optimization it is half."""
    made = ["-O0", "-w", "-ffp-contract=off"]
    if platform.machine() == "x86_64" and " fma " in Path("/proc/cpuinfo").read_text():
        made.append("-mfma")  # else fma is a call
    build(folder() / "barriers.h.gch", *made, f"-I{HERE}", "-x", "c++-header", HERE / "barriers.h")
    return made


@functools.cache
def translated(source: Path, compute: str, defines: tuple[str, ...]) -> Path:
    """The library of a kernel."""
    code = Kernel(ptx_of(source, compute, defines)).source
    source = folder() / f"{hashlib.sha256(code.encode()).hexdigest()[:24]}-{os.getpid()}.cpp"
    source.write_text(code)
    return build(source.with_suffix(".so"), *flags(), "-shared", f"-I{folder()}", f"-I{HERE}", source)


@functools.cache
def host() -> Path:
    """The engine's side of calls and the machine, built."""
    sources = (
        HERE / "emulated.cpp",
        CORE / "cuda/host/launch.cpp",
        CORE / "cuda/host/loss.cpp",
        CORE / "cuda/host/divergence.cpp",
        CORE / "cuda/host/segments.cpp",
        CORE / "cuda/host/scored.cpp",
        CORE / "cuda/host/ranks.cpp",
        CORE / "plan/tables.cpp",
    )
    unchecked = "-U_FORTIFY_SOURCE"  # its longjmp takes no other stacks
    options = "-O0", unchecked, "-pthread", f"-I{CORE}", f"-I{HERE}", "-shared"
    return build(folder() / "emulated.so", *options, *sources, "-ldl")
