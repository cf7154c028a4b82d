"""Builds the native core, src/onepass/_native.so: plain g++ on libtorch's stable ABI, no CPython API, no CUDA toolkit.

One binary serves torch 2.10 and later, every Python and glibc 2.28 and later, so the wheel is tagged py3-none. CXX and
CXXFLAGS are obeyed. A file is compiled again only if it, a header that it includes, or the command has changed.
ONEPASS_CPU_SETS=native builds two instruction sets of the CPU engine, the baseline and the best one that this machine
has, for a build that stays here.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

if int(version("setuptools").partition(".")[0]) < 77:
    sys.exit(f"onepass: needs setuptools 77 or later, got {version('setuptools')}: run `pip install -U setuptools`")

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CSRC = Path("src/onepass/csrc")
OBJECTS = Path("build/objects")
FOLDERS = ("torch", "capi", "plan", "cuda/host", "../tools/gallery")
PLAIN = [f"{folder}/{path.name}" for folder in FOLDERS for path in sorted((CSRC / folder).glob("*.cpp"))]
# The CPU engine is compiled once for each instruction set, each in a namespace of its own.
PARTS = ["engine", "backward", "scored", "scored_backward", "loss_backward", "loss", "divergence", "segments"]
PARTS += ["broadcast_sum"]
# The longest first.
SETS: dict[str, list[str]] = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    SETS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    SETS["avx512"] = [*SETS["avx2"], "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
if os.environ.get("ONEPASS_CPU_SETS") == "native" and sys.platform == "linux":
    HAS = {"baseline", *Path("/proc/cpuinfo").read_text().split()}
    BEST = [isa for isa in SETS if isa.replace("avx512", "avx512dq") in HAS][-1]
    SETS = {isa: flags for isa, flags in SETS.items() if isa in ("baseline", BEST)}
# The engine's loops need -O3, which unrolls those over the vectors of a step before it puts them into registers (-O2:
# half as fast). Its passes that cost time and bring none are off. Older x86 processors get small code.
# Steps are written in the order in which they are to be issued. GCC 12 warns of its own header, 100,000 lines.
ENGINE = ["-fno-schedule-insns2", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
FAST = ["-O3", "-fno-split-loops", "-fno-unswitch-loops", "-fno-loop-unroll-and-jam", "-fno-split-paths"]
FAST += ["-fno-ipa-cp-clone", "-fno-tree-loop-distribution", "-fno-loop-interchange", "-fno-gcse", "-fno-thread-jumps"]
FAST += ["-fvect-cost-model=very-cheap"]  # loops are over vectors already
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]  # what vectors of exp need; NaN and inf stay exact
FLAGS += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]  # the stable ABI of torch 2.10
FLAGS += ["-include", str(CSRC / "capi" / "older_glibc.h")]  # that of glibc 2.28
# libgcc's arithmetic comes along; of C++ nothing is taken from torch, which exports parts of its own libstdc++.
# torch is already loaded when this library is: no rpath, so one build fits every place torch is installed in.
# Functions in the order of their names: instances of a template are alike, and deflate looks back 32 KB.
LINK = ["-Wl,--as-needed,-z,defs,--sort-section=name", "-lgcc", "-lstdc++", "-ltorch_cpu", "-lc10", "-ldl", "-lpthread"]


class BuildNative(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"

    def build_extension(self, ext: Extension) -> None:
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        if not shutil.which(compiler[0]):
            sys.exit(f"onepass: needs a C++ compiler, found no {compiler[0]}: install g++, or name one in CXX")
        if find_spec("torch") is None:
            sys.exit(
                "onepass: needs torch 2.10 or later to be built: install it, then `pip install --no-build-isolation .`"
            )
        from torch.utils.cpp_extension import include_paths, library_paths  # the torch that is there

        link = [*compiler, "-shared"]
        compiler += FLAGS
        compiler += [f"-DONEPASS_{isa.upper()}" for isa in SETS]
        compiler += [word for path in include_paths() for word in ("-isystem", path)]
        given = shlex.split(os.environ.get("CXXFLAGS", ""))
        engine = {isa: [f"-DONEPASS_ISA={isa}", *flags, *ENGINE] for isa, flags in SETS.items()}
        for isa in SETS:
            engine[isa] += FAST if len(SETS) == 1 or isa != "baseline" else ["-Os"]
        jobs = [
            (f"cpu/{name}.cpp", f"cpu-{name}-{isa}", flags) for name in PARTS for isa, flags in reversed(engine.items())
        ]
        jobs += [(name, name.replace("../tools/", "").replace("/", "-").removesuffix(".cpp"), []) for name in PLAIN]
        OBJECTS.mkdir(parents=True, exist_ok=True)
        objects = compile_all([([*compiler, *flags, *given], CSRC / source, name) for source, name, flags in jobs])
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        link += ["-o", str(library), *map(str, objects), *(f"-L{path}" for path in library_paths())]
        subprocess.run([*link, *LINK], check=True)


def compile_all(jobs: list[tuple[list[str], Path, str]]) -> list[Path]:
    """Compiles what is not up to date, one file a core, a line for each. The first to start take the longest."""
    made = [
        OBJECTS / f"{name}-{hashlib.sha256(' '.join(command).encode()).hexdigest()[:8]}.o" for command, _, name in jobs
    ]
    todo = [(job, target) for job, target in zip(jobs, made, strict=True) if not up_to_date(target)]
    done, lock = 0, threading.Lock()

    def compile_one(job: tuple[list[str], Path, str], target: Path) -> None:
        nonlocal done
        command, source, name = job
        start = time.monotonic()
        run = [*command, "-MD", "-MF", str(target.with_suffix(".d")), "-c", str(source), "-o", str(target)]
        if subprocess.run(run).returncode:
            target.unlink(missing_ok=True)
            raise SystemExit(f"onepass: {source} does not compile, see above")
        with lock:
            done += 1
            print(f"onepass: [{done}/{len(todo)}] {name}, {time.monotonic() - start:.0f} s", flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, *zip(*todo, strict=True)) if todo else [])
    return made


def up_to_date(target: Path) -> bool:
    """Whether an object is newer than all that it was made from."""
    try:
        sources = target.with_suffix(".d").read_text().replace("\\\n", " ").split()[1:]
        return all(os.path.getmtime(source) <= target.stat().st_mtime for source in sources)
    except OSError:
        return False


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


SOURCES = [*PLAIN, *(f"cpu/{name}.cpp" for name in PARTS)]
setup(
    ext_modules=[Extension("onepass._native", [str(CSRC / name) for name in SOURCES])],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPython},
)
