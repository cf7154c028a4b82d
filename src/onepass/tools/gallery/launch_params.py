"""The launch parameters of the variants: what each does, which values it takes, and how Triton receives them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["LAUNCH_PARAMS", "MAX_TILE", "check_value", "compile_options", "launch_context", "tile_size"]

MAX_TILE = 65536  # elements of a tile in registers: a multiprocessor has that many registers


class LaunchParam(NamedTuple):
    """`about` is the help text; values go from `least` to `most`, and `rule` restricts them further."""

    about: str
    least: int
    most: int
    rule: str = ""


_RULES = {
    "": lambda value: True,
    "a power of two": lambda value: value & (value - 1) == 0,
    "a multiple of 32": lambda value: value % 32 == 0,
}
LAUNCH_PARAMS = {
    # 32 * num_warps threads share a row. More threads hold a longer row in registers; fewer have less to merge.
    "num_warps": LaunchParam("warps of a Triton program", 1, 32, "a power of two"),
    # Each is buffered in shared memory while the one before is computed. Without a loop it does nothing.
    "num_stages": LaunchParam("rows or chunks in flight in a Triton loop", 1, 16),
    # Compute capability 9.0 and later.
    "num_ctas": LaunchParam("thread blocks of a cluster that share a Triton program", 1, 16, "a power of two"),
    # With fewer registers more threads are resident; too few spill. Triton and CUDA take it.
    "maxnreg": LaunchParam("the most registers of a thread", 16, 255),
    # The tile of a row must cover the row.
    "block_size": LaunchParam("elements of a Triton program's tile", 1, 1 << 20, "a power of two"),
    "programs": LaunchParam("programs of the persistent launch", 1, 2**31 - 1),
    "threads": LaunchParam("threads of a CUDA block", 32, 1024, "a multiple of 32"),
    "blocks": LaunchParam("blocks of the CUDA launch", 1, 2**31 - 1),
}


def check_value(what: str, name: str, value: Any) -> None:
    """Raises TypeError or ValueError if the parameter does not take the value.

    >>> check_value("threads", "threads", 100)
    Traceback (most recent call last):
        ...
    ValueError: threads must be 32 to 1024, a multiple of 32; got 100
    """
    _, least, most, rule = LAUNCH_PARAMS[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} must be an int, got {type(value).__name__} {value!r}")
    if not least <= value <= most or not _RULES[rule](value):
        raise ValueError(f"{what} must be {least} to {most}{', ' + rule if rule else ''}; got {value}")


# Triton ----------------------------------------------------------------------------------------------------------


def tile_size(name: str, n: int, block_size: int | None) -> int:
    """The block size asked for, or the smallest power of two that covers a row of n elements.

    Raises ValueError if the block size does not cover the row.
    """
    least = 1 << (n - 1).bit_length()
    if block_size is not None and not least <= block_size <= MAX_TILE:
        raise ValueError(f"{name}: block_size must cover a row of {n}, {least} to {MAX_TILE}; got {block_size}")
    return block_size or least


def compile_options(
    device: torch.device, num_warps: int, num_stages: int | None, num_ctas: int | None, maxnreg: int | None
) -> dict[str, int]:
    """Triton's launch options, without those that are None. Raises ValueError if the device has no clusters."""
    import torch

    from onepass.triton.launch import interpreting

    if interpreting():
        return {}
    if num_ctas is not None and num_ctas > 1 and torch.cuda.get_device_capability(device) < (9, 0):
        raise ValueError(f"num_ctas needs thread block clusters, compute capability 9.0; got {num_ctas} on {device}")
    options = {"num_warps": num_warps, "num_stages": num_stages, "num_ctas": num_ctas, "maxnreg": maxnreg}
    # enable_fp_fusion is given explicitly because its default is about to change.
    return {name: value for name, value in options.items() if value is not None} | {"enable_fp_fusion": True}


@contextlib.contextmanager
def launch_context(name: str, device: torch.device, num_ctas: int | None) -> Iterator[None]:
    """Makes `device` current; raises ValueError for launch parameters that Triton or the GPU refuses."""
    import triton
    from triton.runtime.errors import OutOfResources

    from onepass.triton.launch import on_device

    with on_device(device):
        try:
            yield
        except OutOfResources as error:
            raise ValueError(f"{name}: the launch parameters ask for more than this GPU has: {error}") from error
        except RuntimeError as error:
            if num_ctas is None or num_ctas == 1 or "PassManager" not in str(error):
                raise
            reason = f"triton {triton.__version__} does not compile this kernel for num_ctas = {num_ctas}"
            raise ValueError(f"{name}: {reason}") from error
