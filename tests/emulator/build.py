"""What the emulator runs, built: kernels by NVRTC's PTX of them, and the engine's side of calls."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
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


@functools.cache
def folder() -> Path:
    """For what is built, as long as this process is there."""
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def build(*arguments: object) -> None:
    command = ["g++", "-std=c++17", "-fPIC", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
    header = folder() / "barriers.h"
    shutil.copy(HERE / header.name, header)
    build(*made, f"-I{HERE}", "-x", "c++-header", header, "-o", f"{header}.gch")
    return made


@functools.cache
def translated(source: Path, compute: str, defines: tuple[str, ...]) -> Path:
    """The library of a kernel."""
    code = Kernel(ptx_of(source, compute, defines)).source
    library = folder() / f"{hashlib.sha256(code.encode()).hexdigest()[:24]}.so"
    if not library.exists():
        library.with_suffix(".cpp").write_text(code)
        build(*flags(), "-shared", f"-I{folder()}", f"-I{HERE}", library.with_suffix(".cpp"), "-o", library)
    return library


@functools.cache
def host() -> Path:
    """The engine's side of calls and the machine, built."""
    library = folder() / "emulated.so"
    sources = [
        HERE / "emulated.cpp",
        CORE / "cuda/host/launch.cpp",
        CORE / "plan/tables.cpp",
    ]
    unchecked = "-U_FORTIFY_SOURCE"  # its longjmp takes no other stacks
    build("-O1", unchecked, "-pthread", f"-I{CORE}", f"-I{HERE}", "-shared", *sources, "-ldl", "-o", library)
    return library
