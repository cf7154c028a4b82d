"""Every provider is checked before it is timed; a wrong one is shown and has no time."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from lib.bench import CASE, CPU, Odd, run, softmax
from lib.transcript import assert_snapshot
from onepass import reference
from onepass.tools.bench import report
from onepass.tools.bench.cases import DIRECTIONS, FUNCTIONS, Case
from onepass.tools.bench.correctness import Checker, Inputs, make_inputs, reference_bytes
from onepass.tools.bench.providers import Naive, Onepass, Torch

# A mistake, and what the row says of it. tests/conftest.py fixes no seed; the data depends on the case.
WRONG: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "zeros": (torch.zeros_like, "error 1.0e+00 at row"),
    "one element": (lambda x: softmax(x).index_fill(0, torch.tensor([3]), 0.5), " at row 3, element"),
    "a NaN": (lambda x: softmax(x).masked_fill(torch.arange(33) == 32, float("nan")), "error nan at row 0, element 32"),
    "no last element": (lambda x: torch.cat([softmax(x[:, :-1]), torch.zeros(4, 1)], 1), "error 1.0e+00 at row"),
    "bfloat16": (lambda x: softmax(x.bfloat16()).float(), "allowed 1.0e-05"),
    "a shape": (lambda x: softmax(x)[:2], "shape (2, 33), torch.float32; it should be (4, 33), torch.float32"),
    "a dtype": (lambda x: softmax(x).double(), "shape (4, 33), torch.float64; it should be (4, 33), torch.float32"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_provider_is_shown_and_never_timed(what: str) -> None:
    f, message = WRONG[what]
    odd = Odd(f)
    rows, said = run(CASE, odd, Torch())
    error = rows["odd"].error or ""
    assert error.startswith("wrong: ")
    assert message in error
    assert said == [f"tiny 4x33, float32, odd: {error}"]
    assert odd.calls == 1  # the check
    assert (rows["odd"].ok, rows["odd"].median_us, rows["odd"].gbps) == (False, None, None)
    assert report.time_text(rows["odd"]) == "WRONG"
    assert rows["torch"].ok


def test_an_output_that_is_not_written_is_found() -> None:
    class Lazy(Odd):
        def writes_out(self, inputs: Inputs) -> bool:
            return True

        def forward(self, case: Case, dtype: str) -> Callable[..., torch.Tensor]:
            return lambda x, out: out

    assert (run(CASE, Torch(), Lazy(softmax))[0]["odd"].error or "").startswith("wrong: error nan")


def test_what_cannot_run_has_a_row_that_says_why() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no row of 33\nand more")

    odd = Odd(f)
    text = ""
    for providers, options in (
        ([odd], {}),
        ([Odd(softmax, takes=1 << 30)], {"free": lambda: 1 << 20}),
        ([Odd(softmax, unsupported="rows of a multiple of 4 only")], {}),
        ([], {"free": lambda: 100}),
    ):
        rows, said = run(CASE, *providers, Torch(), **options)
        text += "".join(f"{name}: {row.error}\n" for name, row in rows.items() if row.error)
        text += "".join(f"    says: {line}\n" for line in [*said, *report.problems(list(rows.values()))])
    assert_snapshot("cannot-run", text)
    assert odd.calls == 1


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_torch_and_naive_are_right(function: str, direction: str, dtype: str) -> None:
    case = replace(CASE, function=function, direction=direction, shape=(2, 5, 3), dim=1)
    rows, said = run(case, Torch(), Naive(), dtype=dtype)
    assert not said
    assert [(name, row.ok, row.error) for name, row in rows.items()] == [
        (name, True, None) for name in ("copy", "torch", "naive")
    ]


LAYOUTS: list[tuple[tuple[int, ...], Any, str, bool]] = [  # (shape, dim, layout, whether torch supports it)
    ((2, 5, 3, 4), 1, "", True),
    ((2, 5, 3, 4), 1, "channels_last", True),
    ((2, 5, 3, 4), 3, "channels_last", True),
    ((3, 7, 5), -1, "transposed", True),
    ((7, 5), 0, "transposed", True),
    ((2, 5, 3, 4), (2, 3), "", True),
    ((2, 5, 3, 4), (-2, -1), "", True),
    ((2, 5, 3, 4), (1, 3), "", False),
    ((2, 5, 3, 4), (2, 3), "channels_last", False),
]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("shape", "dim", "layout", "torch_can"), LAYOUTS, ids=str)
def test_every_layout_is_right(shape: tuple[int, ...], dim: Any, layout: str, torch_can: bool, direction: str) -> None:
    case = Case("t", "t", shape, dim, direction=direction, layout=layout)
    for dtype in ("float32", "bfloat16"):
        rows, said = run(case, Onepass(), Torch(), Naive(), dtype=dtype)
        assert not said
        assert rows["onepass"].engine == "cpu"
        assert all(row.ok for name, row in rows.items() if torch_can or name != "torch")
        assert torch_can or (rows["torch"].error or "").startswith("unsupported: torch's softmax takes one dim")


@pytest.mark.parametrize(
    ("dim", "last"),
    [(-1, (19, 29, slice(None))), (1, (19, slice(None), 6)), ((0, 2), (slice(None), 29, slice(None)))],
)
@pytest.mark.parametrize("function", ["softmax", "logsumexp"])
def test_drawn_rows_are_whole_rows_of_the_result(
    dim: Any, last: Any, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("t", "t", (20, 30, 7), dim=dim, function=function)
    monkeypatch.setattr("onepass.tools.bench.correctness.SAMPLE", 400)
    inputs = make_inputs(case, "float64", CPU, 0)
    checker = Checker(inputs, seed=1)
    assert checker.rows is not None
    assert len(checker.rows) < case.rows()
    assert {0, case.rows() - 1} <= set(checker.rows.tolist())
    result = getattr(reference, function)(inputs.x, dim)
    assert checker.check(result) is None
    wrong = result.clone()  # a change in the last row is found and named
    (wrong[last] if function == "softmax" else wrong.view(-1)[-1:]).add_(1.0)
    assert f"row {case.rows() - 1}" in (checker.check(wrong) or "")


@pytest.mark.parametrize("shape", [(7, 300), (40, 300), (3, 5000), (1, 5000)])
def test_the_memory_of_a_check_bounds_what_is_drawn(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepass.tools.bench.correctness.SAMPLE", 2100)
    case = Case("t", "t", shape)
    checker = Checker(make_inputs(case, "float32", CPU, 0), seed=0)
    assert checker.expected.numel() <= reference_bytes(case) // 64 <= prod(shape)
    assert reference_bytes(replace(case, function="logsumexp")) == reference_bytes(case)
