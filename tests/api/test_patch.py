"""onepass.patch: which calls of torch it serves, what they give, and what it leaves to torch."""

from __future__ import annotations

import pytest
import torch

import onepass
from lib.patch import FACES, with_and_without
from lib.support import LAYOUTS, TORCH, assert_defined, maker, raised


# What is served -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("face", FACES)
def test_every_name_is_served_and_given_back(face, device):
    function, call = FACES[face]
    x = maker(torch.float32, device)(5, 7)
    plain, ours, patched = with_and_without(lambda: call(x, 1))
    assert patched.report.served == {function: 1}
    assert not patched.report.left
    torch.testing.assert_close(ours, plain)
    call(x, 1)
    assert patched.report.served == {function: 1}  # not after it


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_have_torchs_dtype_shape_and_strides(function, dtype, layout, device):
    x = LAYOUTS[layout](maker(dtype, device))
    for dim in range(-max(x.dim(), 1), max(x.dim(), 1)):
        plain, ours, patched = with_and_without(lambda d=dim: TORCH[function](x, d))
        assert (ours.dtype, ours.shape, ours.stride()) == (plain.dtype, plain.shape, plain.stride())
        assert_defined(function, ours, x, dim)
        assert sum(patched.report.served.values()) == 1


def test_several_dims_and_keepdim(device):
    x = maker(torch.float32, device)(3, 4, 5)
    for dims in ((1, 2), (-1, -2), (0, 1, 2)):
        for keepdim in (False, True):
            plain, ours, patched = with_and_without(lambda d=dims, k=keepdim: torch.logsumexp(x, d, k))
            assert ours.shape == plain.shape
            torch.testing.assert_close(ours, plain)
            assert patched.report.served == {"logsumexp": 1}


def test_channels_last_can_be_viewed(device):
    x = maker(torch.float32, device)(2, 5, 4, 3).contiguous(memory_format=torch.channels_last)
    with onepass.patch():
        assert x.softmax(-1).view(-1).shape == (120,)
    assert onepass.softmax(x, 1).is_contiguous(memory_format=torch.channels_last)  # a direct call keeps the layout


def test_integers_and_dtype(function, device):
    x = torch.arange(12, device=device).reshape(3, 4)
    given = {} if function == "logsumexp" else {"dtype": torch.float64}
    plain, ours, patched = with_and_without(lambda: TORCH[function](x, 1, **given))
    torch.testing.assert_close(ours, plain)
    assert bool(patched.report.served) == (function != "logsumexp")


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_out(function, device):
    call, x = TORCH[function], maker(torch.float32, device)(4, 6)
    want = call(x, 1)
    out = torch.full_like(want, torch.nan)
    with onepass.patch(report=True) as patched:
        assert call(x, 1, out=out) is out
        torch.testing.assert_close(out, want)
        assert patched.report.served == {function: 1}
        resized = torch.empty(0, device=device)
        call(x, 1, out=resized)
        torch.testing.assert_close(resized, want)
        wide = torch.empty_like(want, dtype=torch.float64)
        error = raised(call, x, 1, out=wide)
    assert error is raised(call, x, 1, out=wide)
    assert patched.report.served == {function: 1}
    assert all(reason.startswith("out= of another") for _, reason in patched.report.left)


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_out_and_dtype(function, dtype, device):
    x = maker(dtype, device)(4, 6)
    for to in (torch.float32, torch.float64):
        call = lambda to=to: TORCH[function](x, 1, dtype=to, out=x.new_empty(4, 6, dtype=to))  # noqa: E731
        plain, ours, patched = with_and_without(call)
        torch.testing.assert_close(ours, plain)
        widens = dtype.itemsize == 2 and to is torch.float32
        assert bool(patched.report.served) == (to is dtype or widens)


def test_out_of_logsumexp_is_torchs():
    x = maker(torch.float32)(4, 6)
    plain, ours, patched = with_and_without(lambda: torch.logsumexp(x, 1, out=torch.empty(0)))
    assert torch.equal(ours, plain)
    assert not patched.report.served


def test_out_that_shares_memory():
    x = maker(torch.float32)(6, 6)
    want = torch.softmax(x, 1)
    with onepass.patch(report=True) as patched:
        same = x.clone()
        torch.softmax(same, 1, out=same)
        torch.testing.assert_close(same, want)
        assert patched.report.served == {"softmax": 1}
        memory = torch.zeros(40)
        memory[:36] = x.flatten()
        raised(torch.softmax, memory[:36].view(6, 6), 1, out=memory[4:].view(6, 6))  # torch says what becomes of it
    assert patched.report.left == {("softmax", "out= that shares memory with the input or with itself"): 1}


REFUSED = {
    "dim out of range": lambda x: torch.softmax(x, 2),
    "logsumexp's dim out of range": lambda x: torch.logsumexp(x, 2),
    "a dim twice": lambda x: torch.logsumexp(x, (0, -2)),
    "integers": lambda x: torch.softmax(x.long(), 1),
    "half to float on a CPU": lambda x: torch.ops.aten._softmax(x.half(), 1, True),
    "half to float of floats": lambda x: torch.ops.aten._log_softmax(x, 1, True),
    "gradient of another shape": lambda x: torch.ops.aten._softmax_backward_data(x, x[:1], 1, x.dtype),
    "gradient for an input of half": lambda x: torch.ops.aten._softmax_backward_data(x, x, 1, torch.float16),
    "log's gradient for an input of half": lambda x: torch.ops.aten._log_softmax_backward_data(x, x, 1, torch.float16),
    "gradient for an input of float of a result of half": lambda x: torch.ops.aten._softmax_backward_data(
        x.half(), x.half(), 5, torch.float32
    ),
    "no memory": lambda x: torch.softmax(x[:, :1].expand(3, 1 << 46), 1),
    "gradient without memory": lambda x: torch.ops.aten._softmax_backward_data(
        *(x[:, :1].expand(3, 1 << 46),) * 2, 1, x.dtype
    ),
    "no dim": lambda x: torch.softmax(x, None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_are_torchs(case):
    def said():
        try:
            REFUSED[case](torch.ones(3, 4))
        except Exception as error:
            return type(error), str(error)
        raise AssertionError("torch took it")

    plain, ours, patched = with_and_without(said)
    assert ours == plain
    assert not patched.report.served


@pytest.mark.parametrize("to", [torch.float64, torch.bfloat16, torch.int64, torch.complex64, torch.bool])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["_softmax_backward_data", "_log_softmax_backward_data"])
def test_gradients_for_another_dtype_of_the_input_are_torchs(name, dtype, to):
    g, y = maker(dtype)(3, 4), maker(dtype)(3, 4).softmax(1)
    plain, ours, patched = with_and_without(lambda: getattr(torch.ops.aten, name)(g, y, 1, to))
    assert ours.dtype is plain.dtype is dtype
    torch.testing.assert_close(ours, plain)
    assert bool(patched.report.left) == (to is not dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["_softmax", "_softmax_backward_data", "_log_softmax_backward_data"])
def test_on_cuda_another_dtype_is_taken_where_torch_takes_it(name, to):
    x = maker(torch.float32, "cuda")(3, 4)
    given = (x.to(to), 1, True) if name == "_softmax" else (x, x.softmax(1), 1, to)

    def call():
        try:
            return getattr(torch.ops.aten, name)(*given)
        except RuntimeError as error:
            return type(error), str(error).splitlines()[0]

    plain, ours, _ = with_and_without(call)
    assert type(ours) is type(plain)
    if isinstance(plain, torch.Tensor):
        assert ours.dtype is plain.dtype
        torch.testing.assert_close(ours, plain)
    else:
        assert ours == plain


def test_every_dim_is_served_whatever_the_strides(device):
    x = maker(torch.float32, device)(3, 4, 5)
    for y in (x, x.transpose(0, 2), x[..., :1], x[:, :1].expand(3, 4, 5), x[:, ::2]):
        for dim in range(3):
            plain, ours, patched = with_and_without(lambda y=y, d=dim: torch.softmax(y, d))
            assert ours.stride() == plain.stride()
            torch.testing.assert_close(ours, plain)
            assert patched.report.served == {"softmax": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_cuda_halves_are_widened_in_the_kernel(dtype):
    x = maker(dtype, "cuda")(64, 1000).requires_grad_()
    plain, ours, patched = with_and_without(lambda: torch.softmax(x, -1, dtype=torch.float32))
    torch.testing.assert_close(ours, plain)
    assert ours.dtype is torch.float32
    assert patched.report.served == {"softmax": 1}
    gradients = [torch.autograd.grad(y, x, torch.ones_like(y).cumsum(-1))[0] for y in (plain, ours)]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_an_error_of_onepass_leaves_the_call_to_torch():
    x = maker(torch.float32)(*[1] * 64, 3)  # a dim more than onepass takes
    plain, ours, patched = with_and_without(lambda: x.softmax(-1))
    assert torch.equal(ours, plain)
    assert patched.report.left == {("softmax", "an error of onepass"): 1}


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_more_than_64_dims_are_torchs(function):
    """torch takes any number; also of a patch that was restored, whose kernels stay."""
    x = torch.randn([2, *[1] * 127, 3, 4], requires_grad=True)

    def call():
        y = TORCH[function](x, -1)
        return y, torch.autograd.grad(y, x, torch.ones_like(y).cumsum(-1))[0]

    plain, _, patched = with_and_without(call)
    for got in (call(), plain):
        torch.testing.assert_close([t.flatten() for t in got], [t.flatten() for t in plain])
    assert not patched.report.served
    assert set(patched.report.left) == {(name, "an error of onepass") for name in (function, f"{function} backward")}
