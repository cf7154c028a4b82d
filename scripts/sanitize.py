"""Build the C++ that runs without torch and without a GPU with AddressSanitizer and UndefinedBehaviorSanitizer; run it.

    python scripts/sanitize.py [--calls 20000] [--seed 0] [--sets all] [--folder build/sanitize] [--plant FAULT]

The CPU engine of every instruction set that setup.py compiles, over random calls, a third of them gradients
(tests/native/sanitize_cpu.cpp, sanitize_backward.h); the layouts, the plans of columns and the launches that a thread
remembers (plans.cpp, launches.cpp). Prints how many calls of each were checked. Sets that this CPU lacks
are left out. What is unchanged since the last run is not compiled again.
Ends with status 1 at a wrong result or at what a sanitizer finds, 2 where nothing can be built. `--plant` makes the
driver of the CPU engine commit a fault, which must be found.
"""

import argparse
import os
import runpy
import shlex
import subprocess
import sys
import types
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
CORE, TESTS = ROOT / "src" / "onepass" / "csrc", ROOT / "tests" / "native"
SANITIZE = ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SANITIZE += ["-Wno-maybe-uninitialized"]  # which takes the undefined lanes of intrinsics for a mistake
TABLES = CORE / "plan" / "tables.cpp"
PROGRAMS = {"plans": [TABLES], "launches": [CORE / "cuda" / "host" / "launch.cpp", TABLES]}


def build_settings() -> tuple[dict[str, list[str]], list[str]]:
    """setup.py's instruction sets with their flags, and its flags for all, without its optimization."""
    names = ("setuptools", "setuptools.command", "setuptools.command.bdist_wheel", "setuptools.command.build_ext")
    absent = {name: types.ModuleType(name) for name in names}
    for word in ("Extension", "setup"):
        setattr(absent["setuptools"], word, lambda *_, **__: None)
    absent[names[2]].bdist_wheel, absent[names[3]].build_ext = object, object  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, absent):
        made = runpy.run_path(str(ROOT / "setup.py"))
    return made["SETS"], [flag for flag in made["FLAGS"] if not flag.startswith(("-O", "-fvisibility"))]


def newest(*folders: Path) -> float:
    files = (p for folder in folders for p in (folder.rglob("*") if folder.is_dir() else [folder]))
    return max(p.stat().st_mtime for p in files if p.suffix in (".h", ".cpp", ".py"))


def build(folder: Path, programs: Sequence[str]) -> None:
    """Compile what is older than its sources into `folder`. Raises CalledProcessError where the compiler does."""
    known, flags = build_settings()
    folder.mkdir(parents=True, exist_ok=True)
    compiler = [*shlex.split(os.environ.get("CXX", "g++")), *flags, *SANITIZE, f"-I{CORE}", "-pthread"]
    known = {name: own for name, own in known.items() if not lacking(name)}
    compiler += [f"-DONEPASS_{name.upper()}" for name in known]
    core = newest(CORE / "cpu", CORE / "core", ROOT / "setup.py", Path(__file__))
    driver = max(core, newest(*TESTS.glob("sanitize_*.*")))
    jobs: list[tuple[Path, float, list[object]]] = []
    for name, own in known.items():
        for part in ("engine", "backward"):
            words = ["-c", CORE / "cpu" / f"{part}.cpp", f"-DONEPASS_ISA={name}", *own]
            jobs.append((folder / f"{name}-{part}.o", core, words))
    jobs.append((folder / "driver.o", driver, ["-c", TESTS / "sanitize_cpu.cpp"]))
    for name in programs:
        sources = [TESTS / f"{name}.cpp", *PROGRAMS[name]]
        jobs.append((folder / name, newest(CORE, *sources), list(sources)))
    stale = [job for job in jobs if not job[0].exists() or job[0].stat().st_mtime < job[1]]

    def compile_one(job: tuple[Path, float, list[object]]) -> None:
        target, _, words = job
        done = target.with_name(f"{target.name}.{os.getpid()}")  # several builds may share a folder
        subprocess.run([*compiler, *map(str, words), "-o", str(done)], check=True)
        done.replace(target)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, stale))
    parts = [str(path) for path, _, words in jobs if "-c" in words]
    compile_one((folder / "sanitize_cpu", 0, parts))


def lacking(name: str) -> str | None:
    """What this CPU lacks of an instruction set, by the flags that setup.py compiles it with, or None."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    has = next((set(line.split()) for line in lines if line.startswith("flags")), None)
    wanted = [
        flag[2:].replace("avx512bf16", "avx512_bf16").replace("avx512fp16", "avx512_fp16")
        for flag in build_settings()[0][name]
        if flag.startswith(("-mavx", "-mfma", "-mf16c"))
    ]
    return None if has is None else ", ".join(word for word in wanted if word not in has) or None


def report(name: str, right: bool, said: str) -> bool:
    """Print what a program said, whose last word is the number of calls; gives whether it found something."""
    print(f"{name:<9} {int(said.split()[-1]):,} calls checked, all right" if right else f"{name}: {said}", flush=True)
    return not right


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000, help="of each instruction set (default 20000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sets", help="the CPU engine alone, of these instruction sets, with commas, or all")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "sanitize", help="default build/sanitize")
    parser.add_argument("--plant", choices=["read", "page", "write", "value"], help="commit this fault")
    given = parser.parse_args(arguments)
    known = list(build_settings()[0])
    wanted = given.sets.split(",") if given.sets and given.sets != "all" else known
    if given.calls < 1 or given.seed < 0:
        parser.error("--calls is at least 1, --seed at least 0")
    for name in wanted:
        if name not in known:
            parser.error(f"unknown instruction set {name!r}: there are {', '.join(known)}")
    programs = [] if given.sets else list(PROGRAMS)
    try:
        build(given.folder, programs)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"sanitize: could not build: {error}", file=sys.stderr)
        return 2
    bad = 0
    for name in wanted:
        missing = lacking(name)
        if missing:
            print(f"{name:<9} not built: this CPU has no {missing}", flush=True)
            continue
        command = [
            str(given.folder / "sanitize_cpu"),
            str(given.seed),
            str(given.calls),
            *([given.plant] if given.plant else []),
        ]
        done = subprocess.run(
            command, env={**os.environ, "ONEPASS_CPU_CAPABILITY": name}, stdout=subprocess.PIPE, text=True
        )
        right = done.returncode == 0 and done.stdout.split() == [name, str(given.calls)]
        bad += report(name, right, done.stdout)
    for name in programs:
        quiet = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # the driver that is none keeps its modules
        done = subprocess.run([str(given.folder / name)], env=quiet, stdout=subprocess.PIPE, text=True)
        bad += report(name, done.returncode == 0, done.stdout)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
