"""The launch parameters of the variants: what each does, which values it takes, and how Triton receives them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["LAUNCH_PARAMS", "MAX_TILE", "tile_size", "triton_launch"]

MAX_TILE = 65536  # elements of a tile in registers: a multiprocessor has that many registers


class LaunchParam(NamedTuple):
    """`about` is the help text; `rule` says which numbers from the first to the last are `values`."""

    about: str
    values: Sequence[int]
    rule: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raises TypeError or ValueError if the parameter does not take the value.

        >>> LAUNCH_PARAMS["threads"].check("threads", 100)
        Traceback (most recent call last):
            ...
        ValueError: threads must be 32 to 1024, a multiple of 32; got 100
        """
        if type(value) is not int:
            raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
        if value not in self.values:
            raise ValueError(f"{name} must be {self.values[0]} to {self.values[-1]}{self.rule}; got {value}")


def _powers(most: int) -> tuple[Sequence[int], str]:
    return [2**i for i in range(most.bit_length())], ", a power of two"


LAUNCH_PARAMS = {
    # 32 * num_warps threads share a row. More threads hold a longer row in registers; fewer have less to merge.
    "num_warps": LaunchParam("warps of a Triton program", *_powers(32)),
    # Each is buffered in shared memory while the one before is computed. Without a loop it does nothing.
    "num_stages": LaunchParam("rows or chunks in flight in a Triton loop", range(1, 17)),
    # Compute capability 9.0 and later.
    "num_ctas": LaunchParam("thread blocks of a cluster that share a Triton program", *_powers(16)),
    # With fewer registers more threads are resident; too few spill. Triton and CUDA take it.
    "maxnreg": LaunchParam("the most registers of a thread", range(16, 256)),
    # The tile of a row must cover the row.
    "block_size": LaunchParam("elements of a Triton program's tile", *_powers(1 << 20)),
    "programs": LaunchParam("programs of the persistent launch", range(1, 2**31)),
    "threads": LaunchParam("threads of a CUDA block", range(32, 1025, 32), ", a multiple of 32"),
    "blocks": LaunchParam("blocks of the CUDA launch", range(1, 2**31)),
}


def tile_size(name: str, n: int, block_size: int) -> int:
    """The block size asked for, or the smallest power of two that covers a row of n elements.

    Raises ValueError if the block size does not cover the row.
    """
    least = 1 << (n - 1).bit_length()
    if block_size and not least <= block_size <= MAX_TILE:
        raise ValueError(f"{name}: block_size must cover a row of {n}, {least} to {MAX_TILE}; got {block_size}")
    return block_size or least


@contextlib.contextmanager
def triton_launch(name: str, device: torch.device, **options: int) -> Iterator[dict[str, int]]:
    """Makes `device` current and gives Triton's launch options; raises ValueError if Triton or the GPU refuses them."""
    import torch
    import triton
    from triton.runtime.errors import OutOfResources

    from onepass.triton.launch import interpreting, on_device

    clusters = options.get("num_ctas", 1) > 1
    if clusters and not interpreting() and torch.cuda.get_device_capability(device) < (9, 0):
        raise ValueError(f"{name}: num_ctas needs thread block clusters, compute capability 9.0, not that of {device}")
    with on_device(device):
        try:
            # enable_fp_fusion is given explicitly because its default is about to change.
            yield {} if interpreting() else {**options, "enable_fp_fusion": True}
        except OutOfResources as error:
            raise ValueError(f"{name}: the launch parameters ask for more than this GPU has: {error}") from error
        except RuntimeError as error:
            if not clusters or "PassManager" not in str(error):
                raise
            reason = f"does not compile this kernel for num_ctas = {options['num_ctas']}"
            raise ValueError(f"{name}: triton {triton.__version__} {reason}") from error
