"""The plan of a gradient on a GPU, which is pure: no GPU here."""

from typing import Any

import pytest
import torch

from onepass import batch_invariant, native

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16

# rows, n, dtype -> tier, blocks a row
CHOICES = [
    (8388608, 16, F32, "warp", 1),
    (2097152, 64, BF16, "warp", 1),
    (4096, 1024, F32, "block", 1),
    (4096, 4096, F32, "block", 1),
    (4096, 16384, F32, "cluster", 8),
    (8192, 50257, BF16, "cluster", 8),
    (8192, 151936, BF16, "cluster", 16),
    (4096, 131072, F32, "cluster", 16),
    (1, 131072, F32, "grid", 132),
    (4, 1 << 20, F32, "grid", 33),
    (32, 128256, F32, "grid", 4),
    (1 << 10, 1 << 20, F32, "pipelined", 66),
]


def backward_plan(
    function: str,
    rows: int,
    n: int,
    x_type: torch.dtype,
    dx_type: torch.dtype | None = None,
    row_strides: tuple[int, ...] = (),
    grad_is_broadcast: bool = False,
    **of: Any,
) -> dict[str, Any]:
    """The plan of the gradient of `rows` rows of `n` elements, contiguous but for the strides given from row to row.
    `grad_is_broadcast`: the result's gradient has one value per row."""
    one = grad_is_broadcast or function == "logsumexp"
    strides = zip(row_strides or (n, n, 1 if one else n, 1), (1, 1, 0 if one else 1, 0), strict=True)
    return native.backward_plan(function, (rows, n), list(strides), (1,), x_type, dx_type or x_type, **of)


@pytest.mark.parametrize(("rows", "n", "dtype", "tier", "split"), CHOICES)
def test_choices(rows, n, dtype, tier, split):
    plan = backward_plan("softmax", rows, n, dtype)
    assert (plan["tier"], plan["blocks_per_row"]) == (tier, split)


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
@pytest.mark.parametrize("compute", [80, 90, 100, 120])
@pytest.mark.parametrize("n", [1, 5, 33, 100, 257, 781, 1000, 1025, 5001, 8192, 20001, 50257, 131072, 10**6, 10**8])
def test_a_row_has_room(n, compute, dtype):
    """For any rows at any address, in and out of the batch-invariant mode."""
    for rows, address, padding, invariant in ((1, 0, 0, False), (7, 0, 1, False), (1000, 16, 0, True), (5, 2, 3, True)):
        at = address * dtype.itemsize // 2
        with batch_invariant(invariant):
            plan = backward_plan(
                "softmax",
                rows,
                n,
                dtype,
                row_strides=(n + padding,) * 3 + (1,),
                addresses=(at, at, at, 0),
                arch=compute,
                sm_count=132,
            )
        within = (n + padding) * (rows > 1) % plan["vec_size"] or address % plan["vec_size"]
        window = n + plan["vec_size"] - 1 if within and plan["access"] == "predicated" else n
        if plan["tier"] in ("warp", "block", "cluster"):
            assert plan["threads_per_row"] * plan["items_per_thread"] * plan["blocks_per_row"] >= window
        if plan["access"] == "aligned":
            assert not within
            assert n % plan["vec_size"] == 0
        if compute < 90:
            assert plan["tier"] != "cluster"
        assert plan["threads"] <= 1024


def test_vectors_are_as_wide_as_all_three_tensors_allow():
    def width(*addresses: int, n: int = 1024) -> int:
        return backward_plan("softmax", 8, n, F32, addresses=(*addresses, 0))["vec_size"]

    assert width(0, 0, 0) == width(4, 4, 4) == 4
    assert width(0, 0, 8) == 2
    assert width(0, 4, 0) == 1
    assert backward_plan("softmax", 8, 1024, F32, addresses=(0, 0, 4, 0), grad_is_broadcast=True)["vec_size"] == 4


@pytest.mark.parametrize(
    ("types", "address", "vector"),
    [((F32, F32), 0, 4), ((BF16, BF16), 0, 8), ((F32, BF16), 0, 8), ((F32, BF16), 8, 4), ((F32, BF16), 2, 1)],
)
def test_the_result_of_logsumexp_does_not_narrow_its_input(types, address, vector):
    plan = backward_plan("logsumexp", 8, 1024, *types, addresses=(0, address, 4, 4))
    assert plan["vec_size"] == vector


def test_the_number_of_rows_does_not_count_in_the_batch_invariant_mode():
    for n in (1000, 20000, 131072, 1 << 20, 1 << 24):
        with batch_invariant():
            plans = [backward_plan("softmax", rows, n, F32) for rows in (1, 7, 100, 5000)]
        kept = [
            {key: plan[key] for key in ("tier", "threads_per_row", "items_per_thread", "vec_size", "blocks_per_row")}
            for plan in plans
        ]
        assert all(k == kept[0] for k in kept)


@pytest.mark.parametrize(
    ("n", "tier"),
    [(16, "warp"), (512, "warp"), (513, "warp"), (516, "twopass"), (20001, "twopass"), (1 << 20, "twopass")],
)
def test_logsumexp_goes_in_pieces(n, tier):
    assert backward_plan("logsumexp", 100, n, F32)["tier"] == tier
