"""The surroundings of a call: compiling, exporting, fake tensors, autocast, threads, subclasses, checkpoints."""

import concurrent.futures
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import onepass
from lib import support
from lib.scripts import python_output


@pytest.mark.parametrize("layout", support.LAYOUTS)
@support.every_operator
def test_meta_and_fake_tensors(function, layout):
    for dtype in support.DTYPES if layout == "contiguous" else (torch.bfloat16,):
        check_fake_tensors(function, support.LAYOUTS[layout](support.maker(dtype)))


def check_fake_tensors(function: str, x: torch.Tensor) -> None:
    for dim in support.some_tuples(x):
        f, _ = support.both(function, dim=dim)
        want = f(x)
        with FakeTensorMode() as mode:
            fake = f(mode.from_tensor(x))
        assert fake.device.type == "cpu"
        for y in (fake, f(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"))):
            assert (y.shape, y.dtype) == (want.shape, want.dtype)
            # Of a contiguous tensor with odd strides of size 1 torch.empty_like gives others on the meta device.
            assert y.stride() == want.stride() or (x.is_contiguous() and y.is_contiguous())


def test_any_number_of_threads(function):
    before = torch.get_num_threads()
    try:
        for shape in ((2000, 130), (3, 60_000), (4, 300, 200), (1, 400_000), (500, 400)):
            x = support.maker(torch.float32)(*shape)
            for threads, dim in itertools.product((1, 2, 3), (1, (0, 1))):
                torch.set_num_threads(threads)
                support.assert_defined(function, support.ours(function)(x, dim), x, dim, f" on {threads} threads")
    finally:
        torch.set_num_threads(before)


def test_calls_from_several_python_threads(function, engine, device):
    if engine == "triton" and device == "cpu":
        pytest.skip("Triton's interpreter is no matter of several threads")

    def step(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = support.maker(torch.float32, device, seed)(50, 900 + seed).requires_grad_()
        y = support.ours(function)(x, 1, engine=engine)
        y.square().sum().backward()
        return y.detach(), x.grad

    want = [step(seed) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for got, expected in zip(pool.map(step, range(8)), want, strict=True):
                assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(function, reentrant, engine, device):
    x = support.maker(torch.float64, device)(3, 4).requires_grad_()
    checkpoint(
        lambda t: support.ours(function)(t, 1, engine=engine).square(), x, use_reentrant=reentrant
    ).sum().backward()
    (want,) = torch.autograd.grad(support.ours(function)(x, 1, engine=engine).square().sum(), x)
    torch.testing.assert_close(x.grad, want)


class Tagged(torch.Tensor):
    """A subclass as users write them: no more than a name of its own."""


def test_subclasses(function, engine, device):
    x = support.maker(torch.float32, device)(3, 4)
    y = support.ours(function)(x.as_subclass(Tagged), 1, engine=engine)
    assert type(y) is type(support.TORCH[function](x.as_subclass(Tagged), 1))
    support.assert_defined(function, y.as_subclass(torch.Tensor), x, 1)
    parameter = torch.nn.Parameter(x)
    assert type(support.ours(function)(parameter, 1, engine=engine)) is torch.Tensor
    leaf = x.as_subclass(Tagged).requires_grad_()
    support.ours(function)(leaf, 1, engine=engine).sum().backward()
    assert leaf.grad is not None


def test_importing_onepass_imports_nothing_heavy_and_touches_no_gpu():
    code = (
        "import sys, torch, onepass, onepass.nn, onepass.triton as engine; "
        "names = ('triton', 'matplotlib', 'rich', 'click', 'torch._dynamo', 'torch._inductor', 'onepass.tools'); "
        "onepass.softmax(torch.zeros(3)); "
        "assert engine.unavailable(torch.device('cpu')); "
        "engine.plan_forward(1, 10, torch.float32, torch.float32); "
        "print([m for m in names if m in sys.modules], torch.cuda.is_initialized())"
    )
    assert python_output(code, TRITON_INTERPRET="0") == "[] False"


def test_names():
    assert set(onepass.__all__) >= {*support.FUNCTIONS, "engines", "explain", "Explanation", "reference", "__version__"}
