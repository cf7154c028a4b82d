"""Compiles CUDA kernels into the disk cache, in several processes: NVRTC compiles one at a time in a process."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from . import native

_KERNELS_PER_PROCESS = 12  # fewer are not worth a process, which takes 2 s to start; a kernel compiles in 0.15 s
_MAX_PROCESSES = 16


class Kernel(NamedTuple):
    """The arguments with which `native` compiles a kernel."""

    function: str
    x_type: torch.dtype
    y_type: torch.dtype
    which: str  # the pass, one of native.PASSES
    plan: Sequence[int]


def compile_all(kernels: Sequence[Kernel], arch: int, ignore_errors: bool = False) -> Iterator[Kernel]:
    """Compile the kernels for compute capability `arch` (90 for 9.0). Yields each kernel when it is in the disk cache.

    With `ignore_errors` a kernel that does not compile is skipped. Otherwise its error is raised.
    """
    count = min(len(os.sched_getaffinity(0)), -(-len(kernels) // _KERNELS_PER_PROCESS), _MAX_PROCESSES)
    left = dict(enumerate(kernels))
    if count >= 2 and sys.executable:
        for number in _compile_in_processes(kernels, arch, count):
            yield left.pop(number)
    for kernel in left.values():  # a kernel that a process could not compile raises its whole error message here
        with contextlib.suppress(*([RuntimeError] if ignore_errors else [])):
            compile_one(kernel, arch)
        yield kernel


def compile_one(kernel: Kernel, arch: int) -> None:
    function, x_type, y_type, which, plan = kernel
    native.compile_kernel(function, x_type, y_type, plan, arch, which=which)


def _compile_in_processes(kernels: Sequence[Kernel], arch: int, count: int) -> Iterator[int]:
    """Yields the number of each kernel that one of `count` processes has compiled. All processes write to one pipe."""
    jobs = [
        (number, k.function, *map(native.DTYPES.index, (k.x_type, k.y_type)), k.which, k.plan)
        for number, k in enumerate(kernels)
    ]
    command = [sys.executable, "-c", f"from onepass._kernel_compiler import work; work({arch})"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with contextlib.ExitStack() as stack:
        read, write = os.pipe()
        done = stack.enter_context(open(read))
        with open(write, "w") as answers:
            for first in range(count):
                with tempfile.TemporaryFile("w+") as todo:
                    json.dump(jobs[first::count], todo)
                    todo.seek(0)
                    process = subprocess.Popen(
                        command, stdin=todo, stdout=answers, stderr=subprocess.DEVNULL, env=environment
                    )
                stack.callback(process.wait)
                stack.callback(process.terminate)
        yield from map(int, done)


def work(arch: int) -> None:
    """The main function of a process: compiles the kernels that its standard input lists."""
    for number, function, x, y, which, plan in json.load(sys.stdin):
        with contextlib.suppress(RuntimeError):
            compile_one(Kernel(function, native.DTYPES[x], native.DTYPES[y], which, plan), arch)
            os.write(sys.stdout.fileno(), b"%d\n" % number)  # one write, so that no other process writes in between
