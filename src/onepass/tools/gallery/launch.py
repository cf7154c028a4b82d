"""What the Triton rungs share: the tile that covers a row, and the launch options that are given to the compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import triton
from triton.runtime.errors import OutOfResources

from onepass.triton.launch import interpreting, on_device

__all__ = ["MOST", "given", "launching", "tile"]

MOST = 65536  # elements of a tile that lies in registers: a multiprocessor has so many of them


def tile(name: str, n: int, block_size: int | None) -> int:
    """The power of two that covers a row of n elements, or the block size asked for; ValueError if that is less."""
    least = 1 << (n - 1).bit_length()
    if block_size is not None and not least <= block_size <= MOST:
        raise ValueError(f"{name}: block_size must cover a row of {n}, {least} to {MOST}; got {block_size}")
    return block_size or least


def given(
    device: torch.device, num_warps: int, num_stages: int | None, num_ctas: int | None, maxnreg: int | None
) -> dict[str, int]:
    """Triton's launch options, those alone that have a value. Raises ValueError for what the device has not got."""
    if interpreting():
        return {}
    if num_ctas is not None and num_ctas > 1 and torch.cuda.get_device_capability(device) < (9, 0):
        raise ValueError(f"num_ctas needs thread block clusters, compute capability 9.0; got {num_ctas} on {device}")
    options = {"num_warps": num_warps, "num_stages": num_stages, "num_ctas": num_ctas, "maxnreg": maxnreg}
    # FP fusion is asked for by name because its default is about to change.
    return {name: value for name, value in options.items() if value is not None} | {"enable_fp_fusion": True}


@contextlib.contextmanager
def launching(name: str, device: torch.device, num_ctas: int | None) -> Iterator[None]:
    """Makes `device` current, and tells what this Triton or this GPU does not take of the launch parameters."""
    with on_device(device):
        try:
            yield
        except OutOfResources as error:
            raise ValueError(f"{name}: the launch parameters ask for more than this GPU has: {error}") from error
        except RuntimeError as error:
            if num_ctas is None or num_ctas == 1 or "PassManager" not in str(error):
                raise
            said = f"{name}: triton {triton.__version__} does not compile this kernel for num_ctas = {num_ctas}"
            raise ValueError(said) from error
