"""Compiles CUDA kernels into the disk cache, in several processes: NVRTC compiles one at a time in a process."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from . import native

_KERNELS_PER_PROCESS = 12  # fewer do not pay for a process: it takes 2 s to start, a kernel 0.15 s to compile
_MAX_PROCESSES = 16


class Kernel(NamedTuple):
    """The arguments by which `native` compiles a kernel."""

    function: str
    x_type: torch.dtype
    y_type: torch.dtype
    which: str  # the pass, one of native.PASSES
    plan: Sequence[int]


def compile_all(kernels: Sequence[Kernel], arch: int, ignore_errors: bool = False) -> Iterator[Kernel]:
    """Compile the kernels for compute capability `arch`, 90 for 9.0; gives each when it is in the disk cache.

    With `ignore_errors` a kernel that does not compile is passed over. Otherwise its error is raised.
    """
    count = min(len(os.sched_getaffinity(0)), -(-len(kernels) // _KERNELS_PER_PROCESS), _MAX_PROCESSES)

    def compile_here(kernel: Kernel) -> None:
        with contextlib.suppress(*([RuntimeError] if ignore_errors else [])):
            compile_one(kernel, arch)

    if count < 2 or not sys.executable:
        for kernel in kernels:
            compile_here(kernel)
            yield kernel
        return
    with contextlib.ExitStack() as stack:
        workers = [_Worker() for _ in range(count)]
        for worker in workers:
            stack.callback(worker.close)
        idle = list(workers)

        def compile_there(kernel: Kernel) -> Kernel:
            worker = idle.pop()
            try:
                if not worker.compile(kernel, arch):
                    compile_here(kernel)  # raises the error with its whole message
            finally:
                idle.append(worker)
            return kernel

        with ThreadPoolExecutor(count) as pool:
            try:
                yield from pool.map(compile_there, kernels)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def compile_one(kernel: Kernel, arch: int) -> None:
    function, x_type, y_type, which, plan = kernel
    native.compile_kernel(function, x_type, y_type, plan, arch, which=which)


class _Worker:
    """A process that compiles the kernels it is given, a JSON line for each; it ends when its input ends."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from onepass._kernel_compiler import work; work()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )

    def compile(self, kernel: Kernel, arch: int) -> bool:
        """Whether the process compiled the kernel."""
        x_type, y_type = native.DTYPES.index(kernel.x_type), native.DTYPES.index(kernel.y_type)
        try:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            job = kernel.function, x_type, y_type, kernel.which, kernel.plan, arch
            print(json.dumps(job), file=self.process.stdin, flush=True)
            return self.process.stdout.readline() == "done\n"
        except OSError:
            return False

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        self.process.terminate()
        self.process.wait()


def work() -> None:
    """The main function of a `_Worker` process."""
    for line in sys.stdin:
        function, x, y, which, plan, arch = json.loads(line)
        try:
            compile_one(Kernel(function, native.DTYPES[x], native.DTYPES[y], which, plan), arch)
        except RuntimeError:
            print("failed", flush=True)
        else:
            print("done", flush=True)
