"""Compiles kernels into the disk cache, in several processes: NVRTC compiles one program at a time in a process."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from onepass.tools.tune.candidates import Kernel

EACH = 12  # kernels that pay for a process: it takes 2 s to start, a kernel about 0.2 s to compile
MOST = 16  # processes


def shares(todo: Sequence[Kernel], cores: int) -> list[list[Kernel]]:
    """The kernels dealt to as many processes as pay.

    >>> from onepass.tools.tune.candidates import Plan
    >>> [len(share) for share in shares([("softmax", "float32", Plan(0, 1, 128, 4, 4, 1, 0))] * 30, 8)]
    [10, 10, 10]
    """
    count = max(1, min(cores, -(-len(todo) // EACH), MOST))
    return [list(todo[first::count]) for first in range(count)]


def compile_all(todo: Sequence[Kernel], compute: int, report: Callable[[int, int], None]) -> None:
    """Compile the kernels for compute capability `compute`; `report(done, total)` as it goes on.

    A kernel that does not compile, and a process that dies, are passed over: what is missing is compiled where it is
    first called, and an error told there. Without a disk cache nothing is done.
    """
    from onepass import native

    try:
        native.status("cache")
    except RuntimeError:
        return
    report(0, len(todo))
    lock, done = threading.Lock(), 0

    def follow(process: subprocess.Popen[str]) -> None:
        nonlocal done
        assert process.stdout is not None
        for _ in process.stdout:
            with lock:
                done += 1
                report(done, len(todo))

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-c", "from onepass.tools.tune.compile import work; work()"]
    with contextlib.ExitStack() as stack:
        followers = []
        for share in shares(todo, len(os.sched_getaffinity(0))) if todo else []:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                text=True,
            )
            stack.callback(_end, process)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                json.dump([compute, share], process.stdin)
                process.stdin.close()
            followers.append(threading.Thread(target=follow, args=(process,), daemon=True))
            followers[-1].start()
        for follower in followers:
            follower.join()


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait()


def work() -> None:
    """What such a process runs: [compute, [kernel, ...]] comes on its input as JSON, a line a kernel goes out."""
    import torch

    from onepass import native
    from onepass.tools.tune.columns import kernel_of

    compute, share = json.load(sys.stdin)
    for function, dtype, plan in share:
        (name, which), type_ = kernel_of(function), getattr(torch, dtype)
        with contextlib.suppress(RuntimeError):
            native.compile_kernel(name, type_, type_, plan, compute, os.devnull, which)
        print("done", flush=True)
