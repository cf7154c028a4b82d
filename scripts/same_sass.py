"""Prove that a change renames and moves code without changing an instruction of it.

    python scripts/same_sass.py BASE [--arch 90] [--every] [--sample N] [--no-cpu] [--no-cuda]

BASE is a git revision. The script builds BASE and the working tree, and compares:

- CUDA: the SASS, registers and shared memory of kernels, compiled for one architecture. By default those that
  `tests/lib/kernels.py` selects: of the benchmark suites, and one per function, pair of dtypes, direction and tier.
  With --every all that `onepass.warmup` knows, which takes hours. With --sample N every Nth of them, the same ones each
  time: 12 leaves about 100 kernels, which take some two minutes.
- CPU: the disassembly of the CPU engine in the native library, one function at a time, whatever its name is.

It prints what differs and ends with status 1 if anything does. It needs no GPU. Each revision describes its own
kernels, by `same_sass.py --dump`, so BASE has to have this script. What was found for BASE is kept in build/same_sass.
"""

import argparse
import collections
import difflib
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onepass._kernel_compiler import Kernel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # for lib.kernels, once onepass is built
KEPT = ROOT / "build" / "same_sass"
LISTINGS = KEPT / "listings"  # one file per listing, named by its hash
Dump = dict[str, dict[str, str]]  # "cuda": {kernel: hash}, "cpu": {function: hash}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", nargs="?", help="the git revision to compare with")
    parser.add_argument("--arch", type=int, default=90, help="compute capability, 90 for 9.0")
    parser.add_argument("--every", action="store_true", help="compile every kernel of the warm-up space")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="compile every Nth kernel")
    parser.add_argument("--no-cpu", action="store_true")
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="describe this tree alone, as JSON")
    options = parser.parse_args()
    if options.dump:
        found: Dump = {"cuda": {}, "cpu": {}}
        if not options.no_cuda:
            found["cuda"] = dump_cuda(options.arch, options.every, options.sample)
        if not options.no_cpu:
            found["cpu"] = dump_cpu()
        options.dump.write_text(json.dumps(found, indent=1, sort_keys=True))
        return
    if options.base is None:
        parser.error("name the revision to compare with")
    words = [word for word in sys.argv[1:] if word != options.base]
    base, now = dump_of_revision(options.base, words), dump_of_tree(ROOT, words)
    different = compare_cuda(base["cuda"], now["cuda"]) + compare_cpu(base["cpu"], now["cpu"])
    print(f"{len(now['cuda'])} kernels and {len(now['cpu'])} functions of the CPU engine: {different} differ")
    sys.exit(different > 0)


def dump_of_revision(revision: str, words: list[str]) -> Dump:
    commit = git("rev-parse", "--verify", f"{revision}^{{commit}}")
    kept = KEPT / f"{commit}{''.join(words)}.json"
    if not kept.exists():
        tree = KEPT / "base"
        git("worktree", "prune")
        shutil.rmtree(tree, ignore_errors=True)
        git("worktree", "add", "--force", "--detach", str(tree), commit)
        try:
            if not (tree / "scripts" / Path(__file__).name).exists():
                sys.exit(f"same_sass: {revision} has no scripts/{Path(__file__).name}")
            kept.write_text(json.dumps(dump_of_tree(tree, words)))
        finally:
            git("worktree", "remove", "--force", str(tree))
    return json.loads(kept.read_text())


def dump_of_tree(tree: Path, words: list[str]) -> Dump:
    LISTINGS.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, check=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump.json"
        command = [sys.executable, tree / "scripts" / Path(__file__).name, "--dump", path, *words]
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "SAME_SASS_LISTINGS": str(LISTINGS)}
        subprocess.run(command, cwd=tree, check=True, env=environment)
        return json.loads(path.read_text())


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def keep(listing: str) -> str:
    """Store a listing and return its hash."""
    name = hashlib.sha256(listing.encode()).hexdigest()[:24]
    path = Path(os.environ.get("SAME_SASS_LISTINGS", LISTINGS)) / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(listing)
    return name


# CUDA -------------------------------------------------------------------------------------------------------------


def dump_cuda(arch: int, every: bool, sample: int) -> dict[str, str]:
    from lib.kernels import kinds, select_kernels

    with ProcessPoolExecutor() as pool:
        if every:
            listed = pool.map(list_kernels, kinds(every_pair=True), itertools.repeat(arch))
            kernels = [kernel for some in listed for kernel in some]
        else:
            kernels = [kernel for kernel, _ in select_kernels(arch, every_pair=True)]
        kernels = kernels[::sample]
        print(f"same_sass: compiling {len(kernels)} kernels", file=sys.stderr)
        return dict(pool.map(describe_kernel, kernels, itertools.repeat(arch), chunksize=4))


def list_kernels(kind: tuple[Any, ...], arch: int) -> "list[Kernel]":
    """Every kernel of a kind."""
    from onepass import native
    from onepass._kernel_compiler import Kernel

    *types, which = kind
    return [Kernel(*kind, plan) for plan in sorted(native.kernels_to_warm(*types, -1, arch, (), which, True).values())]


def describe_kernel(kernel: "Kernel", arch: int) -> tuple[str, str]:
    from lib.kernels import name_of, read_usage, run_tool
    from onepass import native

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        native.compile_kernel(*kernel[:3], kernel.plan, arch, cubin, kernel.which)
        sass = run_tool("nvdisasm", "--print-code", "--no-dataflow", cubin)
        return name_of(kernel), keep(f"{read_sass(sass)}{read_usage(cubin)}")


def read_sass(text: str) -> str:
    """Only the instructions, without addresses and names.

    >>> read_sass(".text.rows:  /*0010*/  @P0 BRA `(.L_x_3) ;  /*0020*/  JMP `(rows) ;")
    '@P0 BRA `(.L_x_3) ;\\nJMP `() ;\\n'
    """
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]*;)", text)
    return "".join(re.sub(r"`\((?!\.L_)[^)]*\)", "`()", line) + "\n" for line in lines)


def compare_cuda(base: dict[str, str], now: dict[str, str]) -> int:
    different = sorted(label for label in base.keys() | now.keys() if base.get(label) != now.get(label))
    for label in different[:20]:
        print(f"{label}: {'differs' if label in base and label in now else 'in one tree alone'}")
    shown = next((label for label in different if label in base and label in now), None)
    if shown:
        texts = [(LISTINGS / hashes[shown]).read_text().splitlines() for hashes in (base, now)]
        print(f"\nThe first that differs, {shown}:")
        print("\n".join(list(difflib.unified_diff(*texts, "base", "now", lineterm="", n=1))[:40]))
    return len(different)


# CPU --------------------------------------------------------------------------------------------------------------


def dump_cpu() -> dict[str, str]:
    from onepass import native

    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", native.PATH], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    found: dict[str, str] = {}
    for name, body in re.findall(r"^[0-9a-f]+ <([^>]+)>:\n((?:.+\n)+)", text, re.MULTILINE):
        if re.match(r"_ZN?K?7onepass(8baseline|4avx2|6avx512)|_ZZ?NK?7onepass(8baseline|4avx2|6avx512)", name):
            found[name] = keep(read_assembly(name, body))
    return found


def read_assembly(name: str, body: str) -> str:
    """Only the instructions of a function, without addresses, and without names of symbols outside of it.

    >>> print(read_assembly("f", "10:\\tjne    1c <f+0xc>\\n12:\\tcall   99 <g>\\n17:\\tlea    0x8(%rip),%rax  # 9\\n"))
    jne +0xc
    call
    lea (%rip),%rax
    """
    lines = []
    for line in body.splitlines():
        line = line.partition("\t")[2].partition("#")[0]
        line = re.sub(rf"[0-9a-f]+ <{re.escape(name)}(\+0x[0-9a-f]+)?>", r"\1", line)
        line = re.sub(r"[0-9a-f]+ <[^>]*>", "", line)
        lines.append(re.sub(r"\s+", " ", re.sub(r"-?0x[0-9a-f]+\(%rip\)", "(%rip)", line)).strip())
    while lines and lines[-1].startswith(("nop", "xchg %ax", "data16", "cs nop")):  # padding before the next function
        lines.pop()
    return "\n".join(lines)


def compare_cpu(base: dict[str, str], now: dict[str, str]) -> int:
    """Compares the CPU functions. They are matched by their instructions, because names may change."""
    gone = collections.Counter(base.values()) - collections.Counter(now.values())
    new = collections.Counter(now.values()) - collections.Counter(base.values())
    for word, names, hashes in (("only before", base, gone), ("only now", now, new)):
        for name in [name for name, value in names.items() if value in hashes][:10]:
            print(f"{word}: {name}")
    return max(gone.total(), new.total())


if __name__ == "__main__":
    main()
