"""C++ programs that tests build and run: with the library's headers and sources, or linked to libtorch."""

import subprocess
from pathlib import Path

from torch.utils.cpp_extension import include_paths, library_paths

from .paths import CORE, NATIVE


def compiled(program: Path, *arguments: object) -> Path:
    """Builds a program with g++, from sources and options."""
    subprocess.run(["g++", "-std=c++17", *map(str, arguments), "-o", str(program)], check=True)
    return program


def build(folder: Path, name: str, *sources: str, options: tuple[str, ...] = ("-O1", "-pthread")) -> Path:
    """Builds tests/native/<name>.cpp, with sources of the library."""
    files = [NATIVE / f"{name}.cpp", *(CORE / source for source in sources)]
    return compiled(folder / name, *options, f"-I{CORE}", *files)


def build_with_torch(folder: Path, name: str, *options: str, libraries: tuple[str, ...] = ()) -> Path:
    """Builds tests/native/<name>.cpp, linked to libtorch."""
    program = folder / name
    command = ["g++", *options, NATIVE / f"{name}.cpp"]
    command += [word for path in include_paths() for word in ("-isystem", path)]
    for path in library_paths():
        command += [f"-L{path}", f"-Wl,-rpath,{path}"]
    subprocess.run([*command, *libraries, "-ltorch_cpu", "-lc10", "-ldl", "-o", program], check=True)
    return program


def output(program: Path | str, *arguments: object) -> str:
    """The output of a program, which must not fail."""
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout
