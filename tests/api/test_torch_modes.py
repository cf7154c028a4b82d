"""The surroundings of a call: compiling, exporting, fake tensors, autocast, threads, subclasses, checkpoints."""

from __future__ import annotations

import concurrent.futures

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import onepass
from lib.scripts import python_output
from lib.support import SOFTMAXES, TORCH, assert_defined, every_softmax, maker, ours

# Tensors without data -----------------------------------------------------------------------------------------------

SHAPES = [((3, 4), 1), ((2, 3, 4), (0, 2)), ((), 0), ((0, 3), 0), ((3, 0), 1)]


@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_meta_and_fake_tensors(function, dtype, shape, dim):
    x = maker(dtype)(*shape)
    want = ours(function)(x, dim)
    with FakeTensorMode() as mode:
        fake = ours(function)(mode.from_tensor(x), dim)
    for y in (fake, ours(function)(x.to("meta"), dim)):
        assert (y.shape, y.dtype, y.stride()) == (want.shape, want.dtype, want.stride())
    assert fake.device.type == "cpu"


@every_softmax
def test_strides_of_meta_results_are_those_of_real_ones(function):
    for x in (torch.zeros(4, 5).t(), torch.zeros(4, 1).expand(4, 5), torch.zeros(2, 3, 4, 5)[:, ::2].transpose(1, 3)):
        meta = ours(function)(
            x.to("meta") if x.is_contiguous() else torch.empty_strided(x.shape, x.stride(), device="meta"), 0
        )
        assert meta.stride() == ours(function)(x, 0).stride()


# Threads ------------------------------------------------------------------------------------------------------------
def test_any_number_of_threads(function):
    before = torch.get_num_threads()
    try:
        for shape, dim in (
            ((2000, 130), 1),
            ((3, 60_000), 1),
            ((4, 300, 200), 1),
            ((1, 400_000), 1),
            ((500, 400), (0, 1)),
        ):
            x = maker(torch.float32)(*shape)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert_defined(function, ours(function)(x, dim), x, dim, f" on {threads} threads")
    finally:
        torch.set_num_threads(before)


def test_calls_from_several_python_threads(function, engine, device):
    if engine == "triton" and device == "cpu":
        pytest.skip("Triton's interpreter is no matter of several threads")
    inputs = [maker(torch.float32, device, seed)(50, 900 + seed) for seed in range(8)]
    want = [ours(function)(x, 1, engine=engine) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            got = list(pool.map(lambda x: ours(function)(x, 1, engine=engine), inputs))
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_backward_in_autograds_threads(engine, device):
    def gradient(seed):
        x = maker(torch.float64, device, seed)(20, 30).requires_grad_()
        onepass.softmax(x, 1, engine=engine).square().sum().backward()
        return x.grad

    want = [gradient(seed) for seed in range(6)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(a, b) for a, b in zip(pool.map(gradient, range(6)), want, strict=True))


# Other surroundings -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(function, reentrant, engine, device):
    x = maker(torch.float64, device)(3, 4).requires_grad_()
    checkpoint(lambda t: ours(function)(t, 1, engine=engine).square(), x, use_reentrant=reentrant).sum().backward()
    (want,) = torch.autograd.grad(ours(function)(x, 1, engine=engine).square().sum(), x)
    torch.testing.assert_close(x.grad, want)


class Tagged(torch.Tensor):
    """A subclass as users write them: no more than a name of its own."""


def test_subclasses(function, engine, device):
    x = maker(torch.float32, device)(3, 4)
    y = ours(function)(x.as_subclass(Tagged), 1, engine=engine)
    assert type(y) is type(TORCH[function](x.as_subclass(Tagged), 1))
    assert_defined(function, y.as_subclass(torch.Tensor), x, 1)
    parameter = torch.nn.Parameter(x)
    assert type(ours(function)(parameter, 1, engine=engine)) is torch.Tensor
    leaf = x.as_subclass(Tagged).requires_grad_()
    ours(function)(leaf, 1, engine=engine).sum().backward()
    assert leaf.grad is not None


def test_inference_tensors(function):
    with torch.inference_mode():
        x = maker(torch.float32)(3, 4)
        y = ours(function)(x, 1)
    assert y.is_inference()
    assert_defined(function, ours(function)(x, 1), x, 1)


def test_importing_onepass_imports_nothing_heavy_and_touches_no_gpu():
    code = (
        "import sys, torch, onepass; "
        "names = ('triton', 'matplotlib', 'rich', 'click', 'torch._dynamo', 'torch._inductor'); "
        "heavy = [m for m in names if m in sys.modules]; "
        "onepass.softmax(torch.zeros(3)); "
        "print(heavy, torch.cuda.is_initialized())"
    )
    assert python_output(code) == "[] False"


def test_names():
    assert set(onepass.__all__) >= {
        *SOFTMAXES,
        "logsumexp",
        "engines",
        "explain",
        "Explanation",
        "reference",
        "__version__",
    }
