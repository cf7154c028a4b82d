"""What the Triton rungs share: the tile that covers a row, and the launch options that are given to the compiler."""

from __future__ import annotations

import torch

from onepass.triton.available import interpreting

__all__ = ["given", "tile"]


def tile(name: str, n: int, block_size: int | None) -> int:
    """The power of two that covers a row of n elements, or the block size asked for; ValueError if that is less."""
    least = 1 << (n - 1).bit_length()
    if block_size is not None and block_size < least:
        raise ValueError(
            f"{name}: the tile must cover the row: block_size at least {least} for N = {n}, got {block_size}"
        )
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
