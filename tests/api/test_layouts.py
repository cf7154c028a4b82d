"""Where a tensor lies: any views, columns of any length, every alignment, edges of memory, offsets beyond 32 bits."""

import sys

import pytest
import torch

import onepass
from lib.paths import ROOT
from lib.plans import Engine
from lib.support import assert_defined, every_operator, maker, ours, thin_product
from lib.views import check_gradient, check_views


@pytest.mark.parametrize("seed", range(96))
def test_any_views(seed, device):
    check_views(Engine(device), seed)


# Where the plans' tables of columns change, and beyond all clusters
LENGTHS = [2, 17, 24, 25, 33, 64, 65, 197, 257, 512, 1025, 4096, 4097, 8193, 20_001, 131_072, 300_001]
INNER = (2, 7, 8, 49, 130, 513)


@thin_product(3, n=LENGTHS, dtype=[torch.float32, torch.bfloat16])
def test_columns_and_their_gradients(n, dtype, device):
    """The gradient of the result lies as the result does, or is one number."""
    at, most = LENGTHS.index(n), 10_000_000 if device == "cuda" else 100_000
    inners = {INNER[(at + k) % 6] for k in (0, 2, 3)}
    shapes = [(outer, n, inner) for inner in inners if n * inner <= most for outer in (1, 3)]
    softmax = "softmax" if dtype is torch.float32 else "log_softmax"
    for function, shape in [*((softmax, shape) for shape in shapes), ("logsumexp", (2, n, 6))]:
        x = maker(dtype, device, n)(*shape)
        y, reduces = ours(function)(x, [1], engine=device), function == "logsumexp"
        assert_defined(function, y, x, (1,))
        for g in (maker(dtype, device, 5)(*y.shape), maker(dtype, device, 5)().expand(y.shape)):
            dx = torch.full_like(x, torch.nan)
            check_gradient(Engine(device), function, g, x if reduces else y, y if reduces else None, [1], dx)


@pytest.mark.parametrize("n", [1, 3, 8, 17, 63, 130, 1031, 4099, 40_001])
def test_every_alignment(n, dtype, engine, device):
    """Rows that start at any element of a vector, and end at any: the normal case for odd lengths."""
    buffer = maker(dtype, device)(4 * n + 16)
    for offset in range(9):
        x = buffer[offset : offset + 3 * n].view(3, n)
        out = torch.empty(4 * n + 16, dtype=dtype, device=device)[9 - offset :][: 3 * n].view(3, n)
        assert_defined("softmax", onepass.softmax(x, engine=engine), x, 1)
        assert_defined("log_softmax", onepass.log_softmax(x, out=out, engine=engine), x, 1)
        assert_defined("logsumexp", onepass.logsumexp(x, 1, engine=engine), x, 1)


@pytest.mark.parametrize(
    "shape", [(1, 100_003), (2, 65_537), (70_001, 2), (65_600, 17), (3, 3, 9000), (1, 1, 7)], ids=str
)
@every_operator
def test_few_long_rows_and_many_short_ones(function, shape, engine, device):
    x = maker(torch.float32, device)(*shape)
    for dim in range(len(shape)):
        assert_defined(function, ours(function)(x, dim, engine=engine), x, dim)


@pytest.mark.parametrize("rank", [6, 8, 12, 20])
def test_high_rank(function, rank, engine, device):
    x = maker(torch.float32, device)(*([2, 1] * rank)[:rank]).permute(*torch.randperm(rank).tolist())
    for dim in (0, rank // 2, -1, tuple(range(0, rank, 3)), tuple(range(rank))):
        y = ours(function)(x, dim, engine=engine)
        if function != "logsumexp":
            assert y.stride() == torch.empty_like(x).stride()
        assert_defined(function, y, x, dim)


def test_lazily_negated_views(function, engine, device):
    """`imag` of a conjugate holds a negation that has not been done: torch's functions do it, and so must we."""
    z = torch.complex(maker(torch.float32, device)(4, 9), maker(torch.float32, device, 1)(4, 9))
    x = z.conj().imag
    assert x.is_neg()
    got = ours(function)(x, 1, engine=engine)
    assert_defined(function, got, x.resolve_neg(), 1)
    grad = x.detach().requires_grad_()
    assert_defined(function, ours(function)(grad, 1, engine=engine).detach(), x.resolve_neg(), 1)
    out = torch.zeros_like(got)
    ours(function)(x, 1, out=out, engine=engine)
    assert_defined(function, out, x.resolve_neg(), 1)
    negated = torch.zeros(got.shape, dtype=torch.complex64, device=device).conj().imag
    with pytest.raises(RuntimeError, match="resolve_neg"):
        ours(function)(x, 1, out=negated, engine=engine)
    assert not negated.any()


def test_offsets_beyond_32_bits(function, engine, device):
    """Two rows 2**31 + 11 elements apart. On a CPU the memory between is never touched, so it costs nothing."""
    gap, n = 2**31 + 11, 40
    try:
        buffer = torch.empty(gap + 3 * n, dtype=torch.bfloat16, device=device)
    except (RuntimeError, MemoryError):
        pytest.skip("no room for 4 GiB of addresses")
    make = maker(torch.bfloat16, device)
    rows = buffer.as_strided((2, n), (gap, 1), 7)
    columns = buffer.as_strided((n, 2), (1, gap), 7 + n)
    rows.copy_(make(2, n))
    columns.copy_(make(n, 2))
    for x in (rows, columns):
        given = x.contiguous()
        for dim in (0, 1):
            assert_defined(function, ours(function)(x, dim, engine=engine), given, dim)
    if function != "logsumexp":
        given = rows.contiguous()
        assert_defined(function, ours(function)(rows, 1, out=rows, engine=engine).contiguous(), given, 1)


EDGES = """
import ctypes, itertools, sys, torch, onepass
sys.path.append({tests!r})
from lib.random_calls import guarded
if {trespasses}:
    ctypes.string_at(guarded(1, torch.float32, True).data_ptr() + 4, 1)
dtypes, lengths = (torch.float32, torch.float64, torch.float16, torch.bfloat16), (1, 2, 3, 7, 15, 16, 31, 33, 65, 100)
for dtype, m, n, at_end in itertools.product(dtypes, (1, 3), (*lengths, 257, 1000, 4095, 40_001), (False, True)):
    v, w = (guarded(m * n, dtype, at_end).view(m, n) for _ in range(2))
    v.copy_(torch.randn(m, n))
    for f in (onepass.softmax, onepass.log_softmax, onepass.softmin):
        for dim in (0, 1, (0, 1)):
            f(v, dim, out=w, engine="cpu")
        f(v.view(n, m).t(), 1, out=w.view(n, m).t(), engine="cpu")
        f(v, 1, dtype=torch.float32, engine="cpu")
    for dim in (0, 1):
        onepass.logsumexp(v, dim, engine="cpu")
    assert w.isfinite().all()
print("stayed inside")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="maps memory by Linux's numbers")
def test_nothing_outside_the_storage_is_touched(processes, tmp_path):
    """Tensors at the very edges of their memory, with pages beside them whose touch ends the process."""
    tests = str(ROOT / "tests")
    (lost,) = processes.run(tmp_path, EDGES.format(tests=tests, trespasses=True))
    assert lost.status < 0  # a signal: the guard works
    (done,) = processes.run(tmp_path, EDGES.format(tests=tests, trespasses=False))
    assert done.out.strip() == "stayed inside", (done.status, done.errors[-2000:])
