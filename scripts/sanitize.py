"""Build onepass with AddressSanitizer and UndefinedBehaviorSanitizer, and make it run what needs no GPU.

    python scripts/sanitize.py [--minutes 5] [--seed 0] [--sets all] [--folder build/sanitize]

The CPU engine of every instruction set makes random calls and gradients (scripts/fuzz_cpu.py) in memory that ends at
pages that cannot be touched, which catch what sanitizers do not look at: masked vector accesses among others. Then run
the layouts, the plans of columns and the launches that a thread remembers (tests/native/plans.cpp, launches.cpp).
Sets that this CPU lacks are left out. What is unchanged since the last build is not compiled again.
Ends with status 1 at a wrong result or at what a sanitizer finds, 2 where nothing can be built.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE, TESTS = ROOT / "src" / "onepass" / "csrc", ROOT / "tests" / "native"
SETS = ("baseline", "avx2", "avx512")
COMPILER = [*shlex.split(os.environ.get("CXX", "g++")), "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = ["-O1", "-g1", "-fno-omit-frame-pointer", "-w"]
TABLES = CORE / "plan" / "tables.cpp"
PROGRAMS = {"plans": [TABLES], "launches": [CORE / "cuda" / "host" / "launch.cpp", TABLES]}


def build(folder: Path) -> None:
    """Builds the package, with a sanitized native library. Raises CalledProcessError if the compiler fails."""
    flags = {"CXX": shlex.join(COMPILER), "CXXFLAGS": shlex.join(FLAGS)}
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", folder / "temporary", "--build-lib", folder]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **flags}, stdout=sys.stderr, check=True)


def environment(folder: Path, isa: str) -> dict[str, str]:
    """The environment of a Python that imports onepass from `folder` and uses this instruction set."""
    libraries = [
        subprocess.run([*COMPILER, f"-print-file-name=lib{name}.so"], capture_output=True, text=True).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    own = {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0", "ONEPASS_CPU_CAPABILITY": isa}
    return {**os.environ, **own, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def run(folder: Path, isa: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Runs Python with arguments, under sanitizers."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment(folder, isa), capture_output=True, text=True)


def report(name: str, right: bool, said: str) -> bool:
    """Print the result of a program. Returns whether it found an error."""
    print(f"{name:<9} {said.splitlines()[-1]}" if right else f"{name}: {said[-6000:]}", flush=True)
    return not right


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="for each instruction set (default 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sets", help="the CPU engine alone, of these instruction sets, with commas, or all")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "sanitize", help="default build/sanitize")
    given = parser.parse_args(arguments)
    wanted = given.sets.split(",") if given.sets and given.sets != "all" else SETS
    if not given.minutes > 0 or given.seed < 0:
        parser.error("--minutes is above 0, --seed at least 0")
    for name in wanted:
        if name not in SETS:
            parser.error(f"unknown instruction set {name!r}: there are {', '.join(SETS)}")
    folder, bad = given.folder.resolve(), 0
    try:
        build(folder)
        for name, sources in {} if given.sets else PROGRAMS.items():
            files = [TESTS / f"{name}.cpp", *sources]
            subprocess.run(
                [*COMPILER, *FLAGS, "-std=c++17", "-pthread", f"-I{CORE}", *files, "-o", folder / name], check=True
            )
            quiet = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # the fake driver keeps its modules
            done = subprocess.run([folder / name], env=quiet, stdout=subprocess.PIPE, text=True)
            bad += report(name, done.returncode == 0, done.stdout)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"sanitize: could not build: {error}", file=sys.stderr)
        return 2
    for name in wanted:
        fuzz = ROOT / "scripts" / "fuzz_cpu.py"
        done = run(folder, name, fuzz, "--guard", "--minutes", given.minutes, "--seed", given.seed)
        if "ONEPASS_CPU_CAPABILITY is an instruction set that works here" in done.stderr:
            print(f"{name:<9} left out: this CPU lacks it", flush=True)
        else:
            bad += report(name, done.returncode == 0, done.stdout + done.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
