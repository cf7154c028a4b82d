"""Where a tensor lies: every order of dims, every alignment, the edges of memory, offsets beyond 32 bits."""

import sys
import textwrap

import pytest
import torch

import onepass
from lib.scripts import run_python
from lib.support import assert_defined, every_operator, maker, ours


@pytest.mark.parametrize("n", [1, 3, 8, 17, 63, 130, 1031, 4099])
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


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["cuda", "triton"])
@pytest.mark.parametrize("dim", [0, 1])
def test_more_than_2_to_the_31_elements(engine, dim):
    n = 64
    m = 2**31 // n + 1000
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    shape, last = ((m, n), (slice(-200, None), slice(None)))[:2] if dim else ((n, m), (slice(None), slice(-200, None)))
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    y = onepass.softmax(x, dim, engine=engine)
    assert_defined("softmax", y[last], x[last], dim)
    first = tuple(slice(None) if s == slice(None) else slice(200) for s in last)
    assert_defined("softmax", y[first], x[first], dim)
    lse = onepass.logsumexp(x, dim, engine=engine)
    assert_defined("logsumexp", lse[-200:], x[last], dim)


EDGES = """
    import ctypes, itertools, mmap, sys
    import torch, onepass

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    PAGE = mmap.PAGESIZE
    SIZE = 64 * PAGE

    def island():
        '''SIZE bytes with a page that cannot be touched on either side.'''
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = libc.mmap(None, SIZE + 2 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert libc.mprotect(start, PAGE, 0) == 0
        assert libc.mprotect(start + PAGE + SIZE, PAGE, 0) == 0
        return (ctypes.c_char * SIZE).from_address(start + PAGE)

    a, b = island(), island()
    if sys.argv[1:] == ["trespass"]:
        ctypes.string_at(ctypes.addressof(a) + SIZE, 1)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x, y = torch.frombuffer(a, dtype=dtype), torch.frombuffer(b, dtype=dtype)
        x.copy_(torch.randn(x.numel()))
        for m, n in itertools.product((1, 3), (1, 2, 3, 7, 15, 16, 31, 33, 65, 100, 257, 1000, 4095)):
            if m * n > x.numel():
                continue
            for part in (slice(0, m * n), slice(x.numel() - m * n, None)):
                v, w = x[part].view(m, n), y[part].view(m, n)
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
def test_nothing_outside_the_storage_is_touched():
    """Tensors at the very edges of their memory, with pages beside them whose touch ends the process."""
    assert run_python("-c", textwrap.dedent(EDGES), "trespass").returncode < 0  # a signal: the guard works
    done = run_python("-c", textwrap.dedent(EDGES))
    assert done.stdout.strip() == "stayed inside", (done.returncode, done.stderr[-2000:])


def test_strides_of_random_results():
    """Of which an operator makes those of dense inputs itself."""
    generator = torch.Generator().manual_seed(0)

    def below(bound: int) -> int:
        return int(torch.randint(bound, (), generator=generator))

    dense = 0
    for _ in range(1500):
        rank = 1 + below(4)
        sizes, order = [(1, 2, 3, 5)[below(4)] for _ in range(rank)], torch.randperm(rank, generator=generator).tolist()
        strides, step = [0] * rank, 1
        for dim in order:
            strides[dim] = (step, step, step, step, 0, step + 1, 7)[below(7)] if sizes[dim] > 1 else below(9)
            step *= sizes[dim]
        x = torch.zeros(9999).as_strided(sizes, strides, below(3))
        dense += torch.empty_like(x).stride() == x.stride() and not x.is_contiguous()
        for y in (onepass.softmax(x, below(rank)), torch.ops.onepass._softmax_backward(x, x, 0, [0], torch.bfloat16)):
            assert y.stride() == torch.empty_like(x).stride(), (sizes, strides)
    assert dense > 100
