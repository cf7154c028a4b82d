"""The surroundings of a call: compiling, exporting, fake tensors, autocast, threads, subclasses, checkpoints."""

import concurrent.futures
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import onepass
from lib.scripts import python_output
from lib.support import (
    DTYPES,
    FUNCTIONS,
    LAYOUTS,
    TORCH,
    assert_defined,
    both,
    every_operator,
    maker,
    ours,
    some_tuples,
)


@pytest.mark.parametrize("layout", LAYOUTS)
@every_operator
def test_meta_and_fake_tensors(function, layout):
    for dtype in DTYPES if layout == "contiguous" else (torch.bfloat16,):
        check_fake_tensors(function, LAYOUTS[layout](maker(dtype)))


def check_fake_tensors(function: str, x: torch.Tensor) -> None:
    for dim in some_tuples(x):
        f, _ = both(function, dim=dim)
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
            x = maker(torch.float32)(*shape)
            for threads, dim in itertools.product((1, 2, 3), (1, (0, 1))):
                torch.set_num_threads(threads)
                assert_defined(function, ours(function)(x, dim), x, dim, f" on {threads} threads")
    finally:
        torch.set_num_threads(before)


def test_calls_from_several_python_threads(function, engine, device):
    if engine == "triton" and device == "cpu":
        pytest.skip("Triton's interpreter is no matter of several threads")

    def step(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = maker(torch.float32, device, seed)(50, 900 + seed).requires_grad_()
        y = ours(function)(x, 1, engine=engine)
        y.square().sum().backward()
        return y.detach(), x.grad

    want = [step(seed) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for got, expected in zip(pool.map(step, range(8)), want, strict=True):
                assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


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
    assert set(onepass.__all__) >= {*FUNCTIONS, "engines", "explain", "Explanation", "reference", "__version__"}
