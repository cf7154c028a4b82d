"""Builds with g++ what the emulator runs: kernels, translated from NVRTC's PTX, and the machine."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from onepass import native

from .ptx import Kernel

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1]
CORE = PACKAGE / "csrc"
FOLDERS = (CORE / "core", CORE / "cuda/kernels", PACKAGE / "tools/gallery")  # include folders
UNCHECKED = "-U_FORTIFY_SOURCE"  # the longjmp of FORTIFY_SOURCE cannot switch stacks


@functools.cache
def missing() -> str:
    """What the emulator needs but does not find on this machine; "" if it can run."""
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
    """The folder for built files: in ONEPASS_EMULATOR_DIR, or in the cache of compiled kernels, or else temporary."""
    base = Path(os.environ.get("ONEPASS_EMULATOR_DIR", ""))
    if base == Path():
        with contextlib.suppress(RuntimeError):
            base = Path(native.status("cache")) / "emulator"
    if base == Path():
        base = Path(tempfile.mkdtemp())
        import atexit

        atexit.register(shutil.rmtree, base, ignore_errors=True)
    text = subprocess.run(["g++", "--version"], capture_output=True).stdout
    sources = [path.read_bytes() for path in sorted(HERE.iterdir()) if path.suffix in (".py", ".h", ".cpp")]
    made = base / hashlib.sha256(b"".join([text, *sources])).hexdigest()[:16]
    made.mkdir(parents=True, exist_ok=True)
    return made


def build(made: Path, *arguments: object) -> Path:
    """Builds `made` with g++, unless another process has built it. Raises RuntimeError with the messages of g++."""
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            part = made.with_suffix(".part")
            command = ["g++", "-std=c++17", "-fPIC", *map(str, arguments), "-o", str(part)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr)
            part.rename(made)
    return made


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    return ctypes.CDLL(native.status("compiler"))


def ptx_of(source: Path, compute: str, defines: Sequence[str]) -> str:
    """NVRTC's PTX of a source file. Raises RuntimeError with the compiler's log."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    options = [
        f"--gpu-architecture=compute_{compute}",
        "--std=c++17",
        "--device-as-default-execution-space",
        *(f"-I{path}" for path in (source.parent, *FOLDERS)),
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
    if failed:
        raise RuntimeError(text.value.decode())
    return text.value.decode()


@functools.cache
def flags() -> list[str]:
    """The flags for translated kernels. Building them takes most of the time, and half as long without optimisation."""
    made = ["-O0", "-w", "-ffp-contract=off"]
    if platform.machine() == "x86_64" and " fma " in Path("/proc/cpuinfo").read_text():
        made.append("-mfma")  # otherwise fma is a function call
    build(folder() / "barriers.h.gch", *made, f"-I{HERE}", "-x", "c++-header", HERE / "barriers.h")
    return made


@functools.cache
def translated(source: Path, compute: str, defines: tuple[str, ...], name: str = "onepass_kernel") -> Path:
    """The shared library of the kernel `name` of a source file."""
    code = Kernel(ptx_of(source, compute, defines), name).source
    made = folder() / f"{hashlib.sha256(code.encode()).hexdigest()[:24]}.so"
    if made.exists():
        return made
    text = made.with_name(f"{made.stem}-{os.getpid()}.cpp")
    text.write_text(code)
    try:
        return build(made, *flags(), "-shared", f"-I{folder()}", f"-I{HERE}", text)
    finally:
        text.unlink()


@functools.cache
def host() -> Path:
    """The shared library of the machine."""
    return build(folder() / "host.so", "-O1", UNCHECKED, "-shared", f"-I{HERE}", HERE / "host.cpp", "-ldl")
