"""onepass.patch: which calls of torch it serves, what they give, and what it leaves to torch."""

from __future__ import annotations

import pytest
import torch

import onepass
from patch_support import FACES, every_device, with_and_without
from support import LAYOUTS, TORCH, assert_defined, every_dtype, every_function, maker, raised

# What is served -----------------------------------------------------------------------------------------------------


@every_device
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


@every_device
@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
@every_function
def test_results_have_torchs_dtype_shape_and_strides(function, dtype, layout, device):
    x = LAYOUTS[layout](maker(dtype, device))
    for dim in range(-max(x.dim(), 1), max(x.dim(), 1)):
        plain, ours, patched = with_and_without(lambda d=dim: TORCH[function](x, d))
        assert (ours.dtype, ours.shape, ours.stride()) == (plain.dtype, plain.shape, plain.stride())
        assert_defined(function, ours, x, dim)
        assert sum(patched.report.served.values()) == 1


@every_device
def test_several_dims_and_keepdim(device):
    x = maker(torch.float32, device)(3, 4, 5)
    for dims in ((1, 2), (-1, -2), (0, 1, 2)):
        for keepdim in (False, True):
            plain, ours, patched = with_and_without(lambda d=dims, k=keepdim: torch.logsumexp(x, d, k))
            assert ours.shape == plain.shape
            torch.testing.assert_close(ours, plain)
            assert patched.report.served == {"logsumexp": 1}


@every_device
def test_channels_last_can_be_viewed(device):
    x = maker(torch.float32, device)(2, 5, 4, 3).contiguous(memory_format=torch.channels_last)
    with onepass.patch():
        assert x.softmax(-1).view(-1).shape == (120,)
    assert onepass.softmax(x, 1).is_contiguous(memory_format=torch.channels_last)  # a direct call keeps the layout


@every_device
@every_function
def test_integers_and_dtype(function, device):
    x = torch.arange(12, device=device).reshape(3, 4)
    given = {} if function == "logsumexp" else {"dtype": torch.float64}
    plain, ours, patched = with_and_without(lambda: TORCH[function](x, 1, **given))
    torch.testing.assert_close(ours, plain)
    assert bool(patched.report.served) == (function != "logsumexp")


@every_device
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
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
    "gradient of another shape": lambda x: torch.ops.aten._softmax_backward_data(x, x[:1], 1, x.dtype),
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


@every_device
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


class Mine(Exception):
    pass


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13),
    reason="torch took one override from Python alone",
)
def test_an_error_of_another_override_is_raised_as_it_is():
    def fails(*_):
        raise Mine("words of mine")

    x = torch.zeros(3, dtype=torch.int64)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_softmax", fails, "CPU", allow_override=True)
        with onepass.patch(), pytest.raises(Mine, match="words of mine"):
            torch.ops.aten._softmax(x, 0, False)
