"""Wrong arguments of rows of unequal length: each has an error that says what was got, before anything is written."""

from typing import Any

import pytest
import torch

import onepass
from lib.support import DTYPES
from onepass.segment_arithmetic import SegmentSpec, forward_arithmetic
from onepass.segment_ops import segment_call

F32, F64, *_ = DTYPES

X, OFFSETS = torch.zeros(5, 2), torch.tensor([0, 2, 5])
ERRORS: list[tuple[dict[str, Any], Any, str]] = [
    ({"offsets": torch.tensor([0, 3, 2, 5])}, ValueError, "do not fall, got 3 and then 2 at 2"),
    ({"offsets": torch.tensor([1, 5])}, ValueError, "from 0 to 5, the items of the dim, got 1 to 5"),
    ({"offsets": torch.tensor([0, 6])}, ValueError, "got 0 to 6"),
    ({"offsets": torch.tensor([0, 7, 5])}, ValueError, "do not fall"),
    ({"offsets": torch.tensor([0, -3, 5], dtype=torch.int32)}, ValueError, "do not fall, got 0 and then -3"),
    ({"offsets": torch.tensor([], dtype=torch.int64)}, ValueError, r"segments \+ 1 numbers"),
    ({"offsets": torch.zeros(2, 2, dtype=torch.int64)}, ValueError, r"got shape \[2, 2\]"),
    ({"offsets": torch.tensor([0.0, 5.0])}, TypeError, "offsets must be int64 or int32, got torch.float32"),
    ({"offsets": torch.tensor([0, 5], dtype=torch.int16)}, TypeError, "got torch.int16"),
    ({"offsets": [0, 5]}, TypeError, "offsets must be a Tensor, got list"),
    ({"offsets": torch.tensor([0, 5], device="meta")}, RuntimeError, "offsets must be on cpu"),
    ({"offsets": None}, ValueError, "takes one of offsets, index= and lengths="),
    ({"index": torch.zeros(5, dtype=torch.int64)}, ValueError, "takes one of"),
    ({"num_segments": 2}, ValueError, "goes with index="),
    ({"offsets": None, "index": torch.tensor([0, 1, 0, 1, 1])}, ValueError, r"not sorted; give Segments\(index\)"),
    ({"offsets": None, "index": torch.tensor([0, 0, 0, 0, 4]), "num_segments": 3}, ValueError, "0 to 2, got 4 at 4"),
    ({"offsets": None, "index": torch.tensor([-1, 0, 0, 0, 0])}, ValueError, "got -1 at 0"),
    ({"offsets": None, "index": torch.tensor([0, 0])}, ValueError, "for each of 5 items, got 2"),
    ({"offsets": None, "index": torch.zeros(5, 1, dtype=torch.int64)}, ValueError, "index has one dim"),
    ({"offsets": None, "index": torch.zeros(5)}, TypeError, "index must be int64 or int32"),
    ({"offsets": None, "lengths": torch.tensor([3, 3])}, ValueError, "leading dims"),
    ({"offsets": None, "lengths": torch.tensor([2, 2, 2, 2, 3])}, ValueError, "from 0 to 2, got 2 to 3"),
    ({"offsets": None, "lengths": torch.tensor([2, 2, 2, 2, 2]), "dim": 0}, ValueError, "behind theirs, got dim 0"),
    ({"offsets": onepass.Segments(torch.tensor([1, 0]))}, ValueError, "segments have 2 items, dim 0 of x has 5"),
    ({"x": [1.0]}, TypeError, "input must be a Tensor"),
    ({"x": torch.zeros(5, dtype=torch.int64)}, NotImplementedError, "takes float32"),
    ({"x": torch.zeros(())}, ValueError, "without dims"),
    ({"dim": 2}, IndexError, "dim must be in"),
    ({"scale": torch.ones(())}, NotImplementedError, "scale is a number"),
    ({"scale": "1"}, TypeError, "scale must be a number"),
    ({"bias": 1.0}, TypeError, "bias must be a Tensor"),
    ({"bias": torch.zeros(3)}, ValueError, "bias broadcasts to"),
    ({"bias": torch.zeros(7, 5, 2)}, ValueError, "bias broadcasts to"),
    ({"bias": torch.zeros(5, 2, dtype=torch.int64)}, NotImplementedError, "bias takes"),
    ({"dtype": torch.int64}, NotImplementedError, "dtype must be one of"),
    ({"out": torch.zeros(4, 2)}, ValueError, "never resized"),
    ({"out": torch.zeros(5, 2, dtype=F64)}, RuntimeError, "the result is torch.float32"),
    ({"engine": "fpu"}, ValueError, "'fpu'"),
]


@pytest.mark.parametrize(("change", "error", "words"), ERRORS, ids=range(len(ERRORS)))
def test_errors(change, error, words):
    given = {"x": X, "offsets": OFFSETS, **change}
    with pytest.raises(error, match=words):
        onepass.segment_softmax(**given)


def test_nothing_is_written_before_an_error():
    out = torch.full((5,), 7.0)
    with pytest.raises(ValueError, match="do not fall"):
        onepass.segment_softmax(X[:, 0], torch.tensor([0, 3, 2, 5]), out=out)
    assert (out == 7).all()


def test_wrong_offsets_in_a_transform():
    for offsets in (torch.tensor([0, 3, 2, 5]), torch.tensor([0, 9])):
        with pytest.raises(ValueError, match="offsets"):
            torch.func.vmap(lambda v, offsets=offsets: onepass.segment_softmax(v, offsets), 1)(X)
        got = forward_arithmetic(X, offsets, None, None, SegmentSpec(0, "softmax"))  # as without a check
        assert got.shape == X.shape


def test_an_order_that_is_none():
    offsets = torch.tensor([0, 2, 4])
    for order in ([0, 1, 2, 2], [0, 1, 2, 4], [0, 1, 2]):
        with pytest.raises(ValueError, match="no permutation"):
            onepass.Segments.from_offsets(offsets, torch.tensor(order))
    with pytest.raises(TypeError, match="dtype"):
        onepass.Segments.from_offsets(offsets, torch.tensor([0, 1, 2, 3], dtype=torch.int32))
    with pytest.raises(ValueError, match="places from 0 to 3, got 9"):
        segment_call(torch.zeros(4), offsets, torch.tensor([0, 1, 2, 9]), None, SegmentSpec(0, "softmax"))
    with pytest.raises(ValueError, match="index has segments from 0 to 1, got 5"):
        onepass.Segments(torch.tensor([0, 5, 1]), 2)
    with pytest.raises(TypeError, match="lengths must be"):
        onepass.Segments.from_lengths(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="do not fall"):
        onepass.Segments.from_lengths(torch.tensor([2, -1, 2]))
