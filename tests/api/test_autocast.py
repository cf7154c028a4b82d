"""torch.autocast: what torch's functions give under it, and the way to keep half tensors half.

What it does on a GPU is seen without one, by tensors that have no data.
"""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from lib.modes import Operators
from lib.support import DTYPES, TORCH, assert_defined, every_half, every_softmax, maker, ours
from onepass import functional, settings

HALF_TYPES = (torch.float16, torch.bfloat16)


def test_the_dtype_is_torchs(function, dtype, engine, device):
    x = maker(dtype, device)(3, 4)
    with torch.autocast(device, dtype=torch.bfloat16):
        got, want = ours(function)(x, 1, engine=engine), TORCH[function](x, 1)
    assert got.dtype is want.dtype
    assert_defined(function, got, x.to(got.dtype), 1)


def test_the_gradients_are_those_of_float32(function, dtype, engine, device):
    x = maker(dtype, device)(3, 40).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        mine, theirs = ours(function)(x, 1, engine=engine), TORCH[function](x, 1)
    g = maker(theirs.dtype, device, 3)(*theirs.shape)
    (got,), (want,) = (torch.autograd.grad(y, x, g) for y in (mine, theirs))
    assert got.dtype is dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=16 * eps, atol=16 * eps)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors without data on a GPU, under its autocast."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    monkeypatch.setattr(functional, "resolve", lambda engine, device: "cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def gpu_tensor(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(3, 4, dtype=dtype, device="cuda")


def test_on_a_gpu_the_dtype_is_torchs(function, dtype, fake_gpu):
    x = gpu_tensor(dtype)
    assert ours(function)(x, 1).dtype is TORCH[function](x, 1).dtype
    assert ours(function)(x, (0, 1)).dtype is (torch.float32 if dtype in HALF_TYPES else dtype)


@pytest.mark.parametrize("to", DTYPES, ids=str)
@every_half
@every_softmax
def test_a_dtype_given_goes_before_it(function, dtype, to, fake_gpu):
    x = gpu_tensor(dtype)
    assert ours(function)(x, 1, dtype=to).dtype is TORCH[function](x, 1, dtype=to).dtype is to


@every_half
def test_no_cast_goes_before_the_kernel(function, dtype, fake_gpu):
    x = gpu_tensor(dtype)
    with Operators() as mode:
        ours(function)(x, 1)
    assert mode.ours() == [function]
    assert not [name for name in mode.names() if "copy" in name]


@every_half
def test_the_fast_path_takes_no_call_under_autocast(function, dtype, fake_gpu):
    fast = getattr(torch.ops.onepass, f"_{function}").int
    assert fast(gpu_tensor(dtype), 1) is None
    torch.set_autocast_enabled("cuda", False)
    assert fast(gpu_tensor(dtype), 1).dtype is dtype


@pytest.mark.parametrize("dim", [1, (0, 1)], ids=str)
@every_half
def test_half_stays_half(function, dtype, dim, fake_gpu):
    x = gpu_tensor(dtype)
    with onepass.autocast_keeps_half():
        assert ours(function)(x, dim).dtype is dtype
        with onepass.autocast_keeps_half(False):
            assert ours(function)(x, dim).dtype is torch.float32
        assert ours(function)(x, dim).dtype is dtype
    assert ours(function)(x, dim).dtype is torch.float32


def test_it_ends_with_an_error_and_is_of_one_thread(fake_gpu):
    x = gpu_tensor(torch.float16)
    keeps: list[bool] = []
    with onepass.autocast_keeps_half():
        other = threading.Thread(target=lambda: keeps.append(settings._thread.keeps_half))
        other.start()
        other.join()
        with pytest.raises(IndexError), onepass.autocast_keeps_half(False):
            onepass.softmax(x, 2)
        assert onepass.softmax(x, 1).dtype is torch.float16
    assert keeps == [False]
    with pytest.raises(TypeError, match="enabled must be a bool, got 1"):
        onepass.autocast_keeps_half(1)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_graph_knows_of_it():
    compiled = torch.compile(lambda x: x + 1 if settings._thread.keeps_half else x, fullgraph=True, backend="eager")
    x = torch.zeros(2)
    for _ in range(2):
        assert not compiled(x).any()
        with onepass.autocast_keeps_half():
            assert compiled(x).all()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@every_half
def test_compiled_on_a_gpu(function, dtype, backend):
    x = maker(dtype, "cuda")(3, 40)
    compiled = torch.compile(lambda x: ours(function)(x, 1), fullgraph=True, backend=backend)
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            wide = compiled(x)
            with onepass.autocast_keeps_half():
                half = compiled(x)
        assert (wide.dtype, half.dtype) == (torch.float32, dtype)
        assert_defined(function, wide, x.float(), 1)
        assert_defined(function, half, x, 1)
