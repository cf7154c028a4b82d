"""Processes of a test that are the ranks of a process group, of gloo or of NCCL (one for each GPU)."""

import datetime
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .paths import ROOT
from .scripts import Forks


def join(size: int, seconds: float = 60, backend: str = "gloo") -> int:
    """Makes this process a rank of the default group, and returns its number."""
    torch.set_num_threads(1)
    store = dist.FileStore("store", size)
    rank = store.add("ranks", 1) - 1
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device)
    return rank


def run_cases(size: int, cases: dict[str, Callable[..., None]], *arguments: Any, backend: str = "gloo") -> None:
    """Runs the cases on this rank. An error ends the process, because other ranks may wait for it."""
    rank = join(size, backend=backend)
    for name, case in cases.items():
        torch.manual_seed(0)
        try:
            case(*arguments)
        except BaseException:
            sys.exit(f"rank {rank}, {name}: {traceback.format_exc()}")
    dist.destroy_process_group()


def run(processes: Forks, folder: Path, size: int, file: str, code: str) -> None:
    """Runs `code` in `size` processes. It may use the test file `file` as the module t."""
    paths = [str(ROOT / "tests"), str(Path(file).parent)]
    module = Path(file).stem
    ends = processes.run(folder, f"import sys; sys.path[:0] = {paths}; import {module} as t; t.{code}", size)
    errors = [end.errors[-4000:] for end in ends if end.status]
    own = [error for error in errors if "AssertionError" in error] or errors  # errors of other ranks follow from these
    assert not errors, own[0]
