"""Make wheels of compiled CUDA kernels in dist, which the first calls of onepass then find.

onepass-kernels-sm90 has the kernels that `onepass warmup` compiles, and those of softmax over another dim than the last
for random shapes. onepass-kernels-scores-sm90 has those of attention's softmax in half types: with a scale, also with a
mask or a causal window, for common lengths of rows. They are for GPUs that need not be here. A kernel that
build/kernels has from before is not compiled again. Any NVRTC will do; where a driver is too old for its code, onepass
compiles.
"""

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random

import torch

import onepass
from onepass import native
from onepass._kernel_compiler import Kernel
from onepass._warmup import DTYPES, check, kernels_of
from onepass.native import Plan
from onepass.tools.bench.random_cases import log_uniform
from onepass.tools.terminal import console, progress_bar
from onepass.validation import HALF_DTYPES

# Calls of attention, and the lengths of their rows: images' patches, and tokens in steps of a half
SCORES = (("scale",), ("scale", "mask"), ("scale", "causal"))
SCORE_LENGTHS = [*(64 << i for i in range(9)), *(96 << i for i in range(7)), 197, 577, 1000, 1500]
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148, 120: 170}  # of an A100, an H200, a B200, an RTX PRO 6000
ROOT = Path(__file__).resolve().parent.parent
BUILD, DIST = ROOT / "build" / "kernels", ROOT / "dist"


def names(text: str) -> list[str]:
    return text.split(",")


def column_kernels(arch: int, dtypes: Sequence[torch.dtype], count: int, backward: bool) -> list[Kernel]:
    """The kernels of softmax over the middle dim of `count` random shapes of 0.4 MB to 1.2 GB, and of its gradients."""
    rng, kernels = Random(0), {}
    for _ in range(count):
        n, inner = log_uniform(rng, 2, 20_000), log_uniform(rng, 2, 6000)
        sizes = max(1, log_uniform(rng, 100_000, 300_000_000) // (n * inner)), n, inner
        strides, chip = (n * inner, inner, 1), {"arch": arch, "sm_count": MULTIPROCESSORS.get(arch, 132)}
        for dtype in dtypes:
            plan = native.plan("softmax", True, sizes, strides, strides, (1,), dtype, dtype, **chip)["plan"]
            kernels[Kernel("softmax", dtype, dtype, "forward", Plan(*plan))] = None
            if backward:
                tensors = [strides] * 3 + [(0, 0, 0)]
                plan = native.backward_plan("softmax", sizes, tensors, (1,), dtype, dtype, **chip)["plan"]
                kernels[Kernel("softmax", dtype, dtype, "backward", Plan(*plan))] = None
    return list(kernels)


def score_kernels(arch: int, dtypes: Sequence[torch.dtype], lengths: Sequence[int], backward: bool) -> list[Kernel]:
    """The kernels of attention's softmax, and of its gradients, in the half types among `dtypes`."""
    wanted = check([dtype for dtype in dtypes if dtype in HALF_DTYPES], ["softmax"], lengths, arch)
    every = [kernels_of(wanted, -1, arch, lengths, backward, options=options) for options in SCORES]
    return list(dict.fromkeys(kernel for kernels in every for kernel in kernels))


def put(kernel: Kernel, arch: int, folder: Path) -> None:
    if not native.is_kernel_cached(*kernel[:3], kernel.plan, arch, kernel.which):
        native.package_kernel(*kernel[:3], kernel.plan, arch, folder, kernel.which)


def make(arch: int, options: argparse.Namespace) -> None:
    dtypes, lengths = [getattr(torch, name) for name in options.dtypes], [int(n) for n in options.lengths]
    kernels = kernels_of(
        check(dtypes, options.functions, lengths or None, arch), -1, arch, lengths or None, options.backward
    )
    pack("", arch, [*kernels, *column_kernels(arch, dtypes, options.columns, options.backward)])
    if options.scores:
        pack("scores-", arch, score_kernels(arch, dtypes, lengths or SCORE_LENGTHS, options.backward))


def pack(kind: str, arch: int, kernels: Sequence[Kernel]) -> None:
    """Makes the wheel onepass-kernels-{kind}sm{arch}."""
    name, start = f"{kind}sm{arch}", time.monotonic()
    build = BUILD / name.replace("-", "_")
    folder = build / "onepass_kernels" / f"sm_{arch}"
    folder.mkdir(parents=True, exist_ok=True)
    # For the processes that compile: they look for kernels only in this folder.
    os.environ |= {"ONEPASS_KERNELS": str(folder.parent), "ONEPASS_CACHE_DIR": "off"}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        made = pool.map(put, kernels, [arch] * len(kernels), [folder] * len(kernels), chunksize=8)
        with progress_bar(console(sys.stderr), transient=True) as bar:
            list(bar.track(made, len(kernels), description=f"kernels {name}"))
    files = list(folder.glob("*.cubin"))
    for file in files:
        file.chmod(0o644)
    (build / "VERSION").write_text(onepass.__version__)
    project = (ROOT / "packaging" / "kernels" / "pyproject.toml").read_text()
    (build / "pyproject.toml").write_text(project.replace("NAME", name).replace("ARCH", str(arch)))
    shutil.copy(ROOT / "LICENSE", build)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-build-isolation")
    subprocess.run([*pip, "--no-deps", "-w", str(DIST), str(build)], check=True)
    wheel = DIST / f"onepass_kernels_{build.name}-{onepass.__version__}-py3-none-any.whl"
    sizes = f"{sum(file.stat().st_size for file in files)} bytes, {wheel.stat().st_size} as a wheel"
    took = f"{time.monotonic() - start:.0f} s with NVRTC {native.status('nvrtc')}"
    print(f"kernels: {name}, {len(files)} kernels, {sizes}, {took}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=names, default=[*map(str, MULTIPROCESSORS)], help="compute capabilities")
    parser.add_argument("--functions", type=names, default=[*native.FUNCTIONS, "cross_entropy", "segment_softmax"])
    parser.add_argument("--backward", action=argparse.BooleanOptionalAction, default=True, help="gradients too")
    parser.add_argument("--dtypes", type=names, default=[str(dtype)[6:] for dtype in DTYPES])
    parser.add_argument(
        "--lengths", type=names, default=[], help="of the rows; by default any, or with scores the common ones"
    )
    parser.add_argument(
        "--columns", type=int, default=2500, help="random shapes whose kernels over another dim come too"
    )
    parser.add_argument("--scores", action=argparse.BooleanOptionalAction, default=True, help="the second wheel too")
    options = parser.parse_args()
    for arch in options.arch:
        make(int(arch), options)


if __name__ == "__main__":
    main()
