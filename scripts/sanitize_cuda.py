"""Small calls of the column kernels, for a sanitizer: odd lengths, tensors that begin within a vector, and every way in
which blocks share columns.

    compute-sanitizer --tool memcheck python scripts/sanitize_cuda.py
    compute-sanitizer --tool racecheck python scripts/sanitize_cuda.py
"""

import torch

import onepass

COLUMNS, GRID, STREAM = 6, 7, 8
PREDICATED, ALIGNED, SLAB, SLAB_ALIGNED = 0, 2, 3, 4


def calls(vector: int) -> list[tuple[tuple[int, int, int], tuple[int, ...]]]:
    """Sizes, reduced over dim 1, and (tier, threads_x, threads_y, vecs_per_thread, blocks, smem_vecs, access)."""
    return [
        ((3, 37, 4 * vector), (COLUMNS, 4, 8, 2, 1, 4, ALIGNED)),
        ((2, 333, 2 * vector), (COLUMNS, 2, 16, 4, 2, 8, ALIGNED)),
        ((2, 333, 3 * vector), (COLUMNS, 3, 16, 2, 8, 4, ALIGNED)),
        ((5, 40, 3 * vector), (COLUMNS, 3, 8, 5, 1, 1, ALIGNED)),
        ((1, 1001, 2 * vector), (GRID, 2, 64, 2, 3, 8, ALIGNED)),
        ((1, 2001, vector), (GRID, 1, 256, 2, 4, 0, ALIGNED)),
        ((200, 250, 2 * vector), (GRID, 2, 16, 4, 2, 8, ALIGNED)),
        ((150, 31 * vector, 49), (GRID, 98, 1, 4, 2, 4, SLAB_ALIGNED)),
        ((2, 999, 2 * vector), (STREAM, 2, 16, 2, 3, 0, ALIGNED)),
        ((3, 24, 49), (COLUMNS, 49, 1, 4, 1, 8, SLAB_ALIGNED)),
        ((3, 48, 49), (COLUMNS, 98, 1, 2, 2, 4, SLAB_ALIGNED)),
        ((2, 101, 7), (COLUMNS, 28, 1, 8, 4, 0, SLAB)),
        ((2, 77, 5), (GRID, 40, 1, 4, 3, 0, SLAB)),
        ((2, 77, 2 * vector + 3), (COLUMNS, 2, 8, 3, 4, 0, PREDICATED)),
    ]


def make_input(sizes: tuple[int, ...], dtype: torch.dtype, offset: int) -> torch.Tensor:
    count = torch.Size(sizes).numel()
    return torch.randn(count + offset + 8, device="cuda").to(dtype)[offset : offset + count].view(sizes)


def main() -> None:
    count = 0
    for dtype in (torch.bfloat16, torch.float32):
        widest = 16 // dtype.itemsize
        for sizes, (tier, threads_x, threads_y, vecs_per_thread, blocks, smem_vecs, access) in calls(widest):
            offset = 0 if access in (ALIGNED, SLAB_ALIGNED) else 1
            vector = 1 if offset else widest
            plan = [tier, threads_x, threads_y, vecs_per_thread * vector, vector, blocks, smem_vecs, access]
            x, g, y = (make_input(sizes, dtype, offset) for _ in range(3))
            x.mul_(40)  # so that the maximum grows while elements are read
            torch.ops.onepass._softmax_with_plan(x, 0, [1], False, plan, y)
            torch.ops.onepass._softmax_backward_with_plan(g, x, None, 0, [1], plan, y)
            count += 2
        for sizes, dim in (((64, 1000, 7, 7), 1), ((3, 5000, 8), 1), ((1, 70000, 16), 1), ((2, 4096, 256), 1)):
            x = make_input(sizes, dtype, 0).requires_grad_()
            onepass.softmax(x, dim).backward(make_input(sizes, dtype, 0))
            count += 2
    torch.cuda.synchronize()
    print(f"{count} calls")


if __name__ == "__main__":
    main()
