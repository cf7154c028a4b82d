"""Rows by forced plans, compared with their definitions: what serves them is the CUDA engine, or its emulator."""

import torch

from lib.forced import Runner
from onepass import native, reference
from onepass.validation import reduces_to

WARP, STAGED, BLOCK, CLUSTER, GRID, TWOPASS = range(6)
WHOLE = 2  # of `edges`
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16

# Plans that serve rows of n elements, and the lengths to run them on: one element, odd, one short, full, one over.
FORCED = [
    ((WARP, 1, 128, 4, 1, 1, 0, 0), [1, 3, 4]),
    ((WARP, 2, 64, 12, 4, 1, 0, 0), [1, 8, 12, 21, 24]),
    ((WARP, 32, 4, 8, 1, 1, 0, 0), [1, 31, 33, 255, 256]),
    ((WARP, 32, 4, 20, 4, 1, 0, 0), [4, 500, 512, 513, 637, 640]),
    ((WARP, 4, 32, 24, 8, 1, 0, 1), [1, 3, 65, 95, 96]),
    ((WARP, 4, 32, 48, 8, 1, 0, 0), [8, 152, 184, 187, 192]),
    ((STAGED, 1, 128, 34, 1, 1, 1, 0), [1, 3, 33, 34]),
    ((STAGED, 4, 32, 10, 1, 1, 3, 0), [7, 37, 40]),
    ((STAGED, 32, 8, 26, 1, 1, 2, 0), [1, 781, 832]),
    ((BLOCK, 64, 1, 4, 1, 1, 0, 0), [1, 63, 65, 255, 256]),
    ((BLOCK, 32, 1, 8, 4, 1, 0, 0), [5, 250, 253, 256]),
    ((BLOCK, 160, 1, 24, 8, 1, 0, 0), [2, 130, 1022, 1024, 3833, 3840]),
    ((BLOCK, 512, 1, 8, 1, 1, 0, 0), [1, 1023, 4095, 4096]),
    ((BLOCK, 32, 1, 56, 8, 1, 0, 0), [1016, 1528, 1537, 1544, 1784, 1792]),
    ((BLOCK, 96, 1, 16, 8, 1, 0, 1), [1, 130, 1535, 1536]),
    ((BLOCK, 64, 1, 8, 4, 1, 6, 0), [1, 300, 2045, 2048]),
    ((CLUSTER, 32, 1, 8, 4, 2, 0, 0), [1, 3, 250, 509, 512]),
    ((CLUSTER, 96, 1, 16, 4, 8, 0, 0), [1, 100, 1000, 9001, 12285, 12288]),
    ((CLUSTER, 64, 1, 8, 2, 16, 0, 0), [1, 65, 8191, 8192]),
    ((CLUSTER, 64, 1, 16, 8, 4, 4, 0), [1, 777, 12281, 12288]),
    ((CLUSTER, 32, 1, 8, 4, 2, 2, 1), [1, 3, 1023, 1024]),
    ((GRID, 64, 1, 16, 4, 3, 12, 0), [1, 250, 4098, 12288, 12289, 50001]),
    ((GRID, 32, 1, 32, 8, 132, 12, 0), [1, 9, 100_000, 1_000_001]),
    ((GRID, 128, 1, 16, 2, 1, 12, 1), [1, 3, 2047, 5119, 9001]),
    ((GRID, 96, 1, 16, 4, 5, 0, 0), [1, 2, 31, 7679]),
    ((GRID, 64, 1, 0, 4, 3, 8, 0), [1, 250, 12289, 50001]),
    ((GRID, 32, 1, 0, 8, 132, 0, 0), [9, 1_000_001]),
    ((GRID, 96, 1, 0, 2, 5, 16, 1), [1, 3, 4801, 30011]),
    ((TWOPASS, 64, 1, 4, 1, 1, 0, 0), [1, 63, 257, 5000]),
    ((TWOPASS, 512, 1, 16, 4, 1, 0, 0), [4, 8188, 8192, 8193, 20001]),
]
TYPES = [(F32, F32), (F64, F64), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32), (F32, BF16), (F64, F16)]
STATES = [(F32, F32), (F64, F64), (F16, F32), (BF16, F32)]
# Of float32: half a unit of x - m, which is up to 64 here, and the exponential's own.
TOLERANCE = {F64: 1e-13, F32: 2.2e-6, F16: 2e-3, BF16: 1.6e-2}


def expect(function: str, x: torch.Tensor, y_type: torch.dtype) -> torch.Tensor:
    return getattr(reference, function)(x.to(y_type), 1)


def close(actual: torch.Tensor, expected: torch.Tensor, y_type: torch.dtype, function: str = "softmax") -> None:
    # Probabilities: relative, down to where the numbers are no longer normal. Logarithms: relative to max(1, |result|).
    least = TOLERANCE[y_type] if function.startswith("log") else torch.finfo(y_type).smallest_normal
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[y_type], atol=least, equal_nan=True)


def special(rows: int, n: int, dtype: torch.dtype, device: str = "cuda") -> torch.Tensor:
    x = torch.randn(rows, n, device=device, dtype=F64) * 3
    if rows > 6:
        x[1, : n - 1] = -torch.inf  # a long run, to the last element
        x[2, 1:] = -torch.inf
        x[3] = -torch.inf
        x[4] = x[4].abs() + 100.0  # of which exp is infinite itself
        x[4, n // 2] = torch.inf
        x[5, n // 2] = torch.nan
        x[6] = 7.0
    return x.to(dtype)


def is_served(function: str, x_type: torch.dtype, y_type: torch.dtype) -> bool:
    if function == "logsumexp":
        return reduces_to(function, x_type, y_type)
    return function != "state" or (x_type, y_type) in STATES  # of the type that it is added up in


def check_forced(
    runner: Runner, function: str, x_type: torch.dtype, y_type: torch.dtype, plan: tuple[int, ...], lengths: list[int]
) -> None:
    """A plan on each length that it serves, with vectors as wide as the types allow."""
    lse, state = function == "logsumexp", function == "state"
    tier, lanes, group, values, vector, split, shelf, edges = plan
    # A reduction writes no rows: its vectors are those of the input.
    vector = min(vector, 16 // (x_type.itemsize if lse or state else max(x_type.itemsize, y_type.itemsize)))
    if (tier == CLUSTER and runner.most_cluster == 1) or (values // vector > 16 and tier == GRID):
        return
    kept = values + (0 if tier == STAGED else shelf * vector)
    on_a_gpu = runner.device == "cuda"
    for n in lengths if on_a_gpu else [n for n in lengths if n < 60_000]:
        room = lanes * kept * (split if tier == CLUSTER else 1)
        window = n if n % vector == 0 or edges or tier == STAGED else n + vector - 1
        if (n < vector and not edges) or (tier not in (GRID, TWOPASS) and window > room):
            continue
        if shelf and tier != STAGED and vector * x_type.itemsize < 4:
            continue
        rows = 37 if on_a_gpu else 9
        x = special(rows, n, x_type, runner.device)
        shape = (2, rows) if state else (rows,) if lse else (rows, n)
        whole = tier in (WARP, BLOCK, CLUSTER) and not edges and n % vector == 0
        for edge in (edges, WHOLE) if whole else (edges,):
            forced = [tier, lanes, group, values, vector, split, shelf, edge]
            out = torch.full(shape, torch.nan, device=runner.device, dtype=y_type)
            runner.forced(x, native.FUNCTIONS.index(function), [1], False, forced, out)
            if state:
                m, total = reference.state(x, 1)
                torch.testing.assert_close(out[0].double(), m, rtol=0, atol=0, equal_nan=True)
                torch.testing.assert_close(out[1].double(), total, rtol=4e-6, atol=0, equal_nan=True)
            else:
                close(out, expect(function, x, y_type), y_type, function)
