"""Builds the native core, src/onepass/_native.so: plain g++ on libtorch's stable ABI, no CPython API, no CUDA toolkit.

One binary serves torch 2.10 and later and every Python, so the wheel is tagged py3-none. CXX and CXXFLAGS are obeyed.
"""

import os
import platform
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CSRC = Path("src/onepass/csrc")
PLAIN = [
    "ops.cpp",
    "backward.cpp",
    "tables.cpp",
    "settings.cpp",
    "inspect.cpp",
    "kernels.cpp",
    "patch.cpp",
    "../gallery/cpu_threepass.cpp",
    "../gallery/cpu_online.cpp",
]
PLAIN += [
    f"cuda/{name}.cpp" for name in ("driver", "cache", "compile", "launch", "engine", "columns", "backward", "warm")
]
# The CPU engine is compiled once for each instruction set, each in a namespace of its own.
PARTS = ["backward", "engine"]
SETS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    SETS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    SETS["avx512"] = [*SETS["avx2"], "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
    SETS["avx512"] += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # 100,000 lines of GCC 12 on its own header
# The CPU engine's steps are written in the order in which they are to be issued.
AS_WRITTEN = ["-fno-schedule-insns2"]
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]  # what vectors of exp need; NaN and inf stay exact
FLAGS += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]  # the stable ABI of torch 2.10


class BuildNative(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"

    def build_extension(self, ext: Extension) -> None:
        from torch.utils.cpp_extension import include_paths, library_paths  # the torch that is there

        objects = Path(self.build_temp)
        jobs = [(name, objects / (name.replace("/", "-") + ".o"), []) for name in PLAIN]
        for isa, flags in SETS.items():
            own = [f"-DONEPASS_ISA={isa}", *flags, *AS_WRITTEN]
            for name in PARTS:
                jobs.append((f"cpu/{name}.cpp", objects / f"cpu-{name}-{isa}.o", own))
        compiler = [*shlex.split(os.environ.get("CXX", "g++")), *FLAGS]
        compiler += [f"-DONEPASS_{isa.upper()}" for isa in SETS]
        compiler += [word for path in include_paths() for word in ("-isystem", path)]
        compiler += shlex.split(os.environ.get("CXXFLAGS", ""))
        objects.mkdir(parents=True, exist_ok=True)

        def compile_one(job: tuple[str, Path, list[str]]) -> None:
            source, target, flags = job
            subprocess.run([*compiler, *flags, "-c", str(CSRC / source), "-o", str(target)], check=True)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, reversed(jobs)))  # the longest first
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        link = [compiler[0], "-shared", "-o", str(library), *(str(target) for _, target, _ in jobs)]
        link += [f"-L{path}" for path in library_paths()]
        # torch is already loaded when this library is: no rpath, so one build fits every place torch is installed in.
        subprocess.run([*link, "-Wl,--as-needed,-z,defs", "-ltorch_cpu", "-lc10", "-ldl", "-lpthread"], check=True)


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


SOURCES = [*PLAIN, *(f"cpu/{name}.cpp" for name in PARTS)]
setup(
    ext_modules=[Extension("onepass._native", [str(CSRC / name) for name in SOURCES])],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPython},
)
