"""The quick way of the plain call into an `out`: taken where it may be, and there the same as the other way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from lib.host_path import Watch, rows
from lib.support import DTYPES, LAYOUTS, every_dtype, every_function, every_softmax, ints, maker, ours, same
from onepass import functional

Make = Any


def written(function: str, x: Tensor, dim: Any, out: Tensor, **named: Any) -> Any:
    """What a call into `out` does: how it ends, whether the version is raised, and the elements."""
    version = None if out.is_inference() else out._version
    try:
        end: Any = ours(function)(x, dim, out=out, **named) is out
    except Exception as error:
        end = (type(error), str(error), type(error.__context__))
    raised = None if version is None else out._version > version
    return end, raised, out


def assert_same_both_ways(monkeypatch: Any, function: str, make: Make, dim: Any = 1, **named: Any) -> Any:
    """`make` gives an input and an out, new ones each time."""
    x, out = make()
    quick = written(function, x, dim, out, **named)
    with monkeypatch.context() as patch:
        patch.setattr(functional, "call_boxed", lambda *_: False)
        x, out = make()
        slow = written(function, x, dim, out, **named)
    assert quick[:2] == slow[:2]
    if quick[2].layout is torch.strided and not quick[2].is_nested and quick[2].device.type != "meta":
        assert same(quick[2].detach().resolve_neg(), slow[2].detach().resolve_neg())
    return quick[0]


@pytest.fixture
def no_slow_way(monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("the slow way")

    monkeypatch.setattr(functional, "check_input", refuse)


def of(function: str, x: Tensor, dim: int) -> Tensor:
    return torch.full_like(ours(function)(x, dim), 7)


@every_dtype
@every_function
def test_the_plain_call_goes_the_quick_way(function, dtype, no_slow_way):
    for name, layout in LAYOUTS.items():
        x = layout(maker(dtype))
        for dim in ints(x):
            out = of(function, x, dim)
            if name in ("expanded", "overlapping"):
                continue
            assert ours(function)(x, dim, out=out) is out
            assert same(out, ours(function)(x, dim))


@every_softmax
def test_in_place_and_into_columns_go_the_quick_way(function, no_slow_way):
    x = rows()
    expected = ours(function)(x, 1)
    wide = torch.zeros(3, 9)
    assert torch.equal(ours(function)(x, 1, out=wide[:, 2:6]), expected)
    assert wide[:, :2].count_nonzero() == wide[:, 6:].count_nonzero() == 0
    assert ours(function)(x, 1, out=x) is x
    assert torch.equal(x, expected)
    strided = rows().t()
    expected = ours(function)(strided, 1)
    assert torch.equal(ours(function)(strided, 1, out=strided.view(4, 3)), expected)


CASES: dict[str, Make] = {
    "apart": lambda: (rows(), torch.zeros(3, 4)),
    "in place": lambda: (lambda x: (x, x))(rows()),
    "a view of the input": lambda: (lambda x: (x, x.view(3, 4)))(rows()),
    "transposed": lambda: (rows(), torch.zeros(4, 3).t()),
    "a square transposed onto itself": lambda: (lambda x: (x, x.t()))(torch.ones(4, 4)),
    "half over it": lambda: (lambda x: (x[:3], x[1:]))(torch.ones(4, 4)),
    "columns between columns": lambda: (lambda x: (x[:, :4], x[:, 4:]))(torch.ones(3, 8)),
    "every other column": lambda: (lambda x: (x[:, ::2], x[:, 1::2]))(torch.ones(3, 8)),
    "expanded": lambda: (rows(), torch.zeros(3, 1).expand(3, 4)),
    "windows": lambda: (rows(), torch.zeros(9).as_strided((3, 4), (2, 1))),
    "inner and outer interleaved": lambda: (rows(), torch.zeros(20).as_strided((3, 4), (4, 3))),
    "another shape": lambda: (rows(), torch.zeros(3, 5)),
    "another rank": lambda: (rows(), torch.zeros(3, 4, 1)),
    "empty, another shape": lambda: (torch.zeros(0, 4), torch.zeros(0, 5)),
    "empty": lambda: (torch.zeros(0, 4), torch.zeros(0, 4)),
    "empty rows": lambda: (torch.zeros(3, 0), torch.zeros(3, 0)),
    "reduced": lambda: (rows(), torch.zeros(3)),
    "reduced, of empty rows": lambda: (torch.zeros(3, 0), torch.zeros(3)),
    "reduced, onto the input": lambda: (lambda x: (x, x[:, 0]))(rows()),
    "another dtype": lambda: (rows(), torch.zeros(3, 4, dtype=torch.float64)),
    "integers": lambda: (torch.ones(3, 4, dtype=torch.int64), torch.zeros(3, 4)),
    "an out of integers": lambda: (rows(), torch.zeros(3, 4, dtype=torch.int64)),
    "no numbers": lambda: (torch.tensor(1.0), torch.tensor(2.0)),
    "a negated out": lambda: (rows(), torch.zeros(3, 4, dtype=torch.complex64).conj().imag),
    "a negated input": lambda: (torch.complex(rows(), rows()).conj().imag, torch.zeros(3, 4)),
    "meta": lambda: (rows().to("meta"), torch.zeros(3, 4, device="meta")),
    "a meta out": lambda: (rows(), torch.zeros(3, 4, device="meta")),
    "a meta input": lambda: (rows().to("meta"), torch.zeros(3, 4)),
    "a sparse out": lambda: (rows(), torch.zeros(3, 4).to_sparse()),
    "a gradient of the input": lambda: (rows().requires_grad_(), torch.zeros(3, 4)),
    "a gradient of out": lambda: (rows(), torch.zeros(3, 4, requires_grad=True)),
    "out is a view of a leaf": lambda: (rows(), torch.zeros(3, 4, requires_grad=True)[:]),
    "a parameter as out": lambda: (rows(), torch.nn.Parameter(torch.zeros(3, 4))),
}


@pytest.mark.parametrize("case", CASES)
@every_function
def test_both_ways_agree(function, case, monkeypatch):
    for dim in (0, 1, -1, 2, True):
        assert_same_both_ways(monkeypatch, function, CASES[case], dim)
    if function == "logsumexp":
        assert_same_both_ways(monkeypatch, function, CASES[case], keepdim=True)
    for dtype in (*DTYPES, torch.int64) if function != "logsumexp" else ():
        assert_same_both_ways(monkeypatch, function, CASES[case], dtype=dtype)
    with torch.no_grad():
        assert_same_both_ways(monkeypatch, function, CASES[case])


def inference() -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        return rows(), torch.zeros(3, 4)


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


@every_softmax
def test_both_ways_agree_in_every_surrounding(function, monkeypatch):
    make = CASES["apart"]
    assert assert_same_both_ways(monkeypatch, function, inference)[0] is RuntimeError
    with torch.inference_mode():
        assert assert_same_both_ways(monkeypatch, function, make) is True
        assert assert_same_both_ways(monkeypatch, function, inference) is True
    for surrounding in (torch.autocast("cpu", dtype=torch.bfloat16), forward_ad.dual_level(), Watch()):
        with surrounding:
            assert assert_same_both_ways(monkeypatch, function, make) is True
    with Log() as log:
        ours(function)(rows(), 1, out=torch.zeros(3, 4))
    assert f"onepass.{function}.out" in log.seen  # a graph keeps the public name


@every_softmax
def test_transforms_go_the_other_way(function, monkeypatch):
    def call() -> Any:
        try:
            return torch.vmap(lambda row: ours(function)(row, 0, out=torch.zeros(4)))(rows())
        except Exception as error:
            return type(error), str(error)

    quick = call()
    monkeypatch.setattr(functional, "call_boxed", lambda *_: False)
    slow = call()
    assert torch.equal(quick, slow) if isinstance(quick, Tensor) else quick == slow


@every_function
def test_a_saved_out_is_known_to_be_overwritten(function, no_slow_way):
    x = rows()
    out = ours(function)(x, 1)
    product = (out * torch.ones(out.shape, requires_grad=True)).sum()
    ours(function)(x, 1, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.gpu
@every_dtype
@every_function
def test_on_a_gpu(function, dtype, monkeypatch):
    def make() -> tuple[Tensor, Tensor]:
        x = maker(dtype, "cuda")(3, 4)
        return x, of(function, x, 1)

    ours(function)(make()[0], 1)  # lets the device in
    assert assert_same_both_ways(monkeypatch, function, make) is True
    for one, two in ("cpu", "cuda"), ("cuda", "cpu"):
        end = assert_same_both_ways(monkeypatch, function, lambda: (make()[0].to(one), make()[1].to(two)))  # noqa: B023
        assert end[0] is RuntimeError
    if onepass.engines()["cuda"] is None:
        monkeypatch.setattr(functional, "check_input", None)
        x, out = make()
        assert ours(function)(x, 1, out=out) is out
