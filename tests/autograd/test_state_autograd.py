"""onepass.state: gradients, torch.func, torch.compile, torch.export, the operator itself, and its plan."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import onepass
from lib.samples import SAMPLES
from lib.state import assert_state
from lib.support import maker
from onepass import State, reference

# torch.autograd's batched checks warn of operators without a batching rule.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
# Where a maximum is there twice there is no derivative to measure.
every_case = pytest.mark.parametrize(
    "case", [case for case in SAMPLES if case not in ("expanded", "channels_last", "empty dim")]
)


def sample(case: str, device: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, tuple[int, ...]]:
    make, dim = SAMPLES[case]
    return make(maker(dtype, device)).detach().requires_grad_(), dim


# Gradients ----------------------------------------------------------------------------------------------------------
@every_case
def test_gradcheck(case, engine, device):
    x, dim = sample(case, device)
    for keepdim in (False, True):
        f = functools.partial(onepass.state, dim=dim, keepdim=keepdim, engine=engine)
        batched = x.numel() > 0
        assert gradcheck(f, x, check_forward_ad=True, check_batched_grad=batched, check_batched_forward_grad=batched)
        assert gradgradcheck(f, x)


def gradients(f, x: Tensor, gm: Tensor, gl: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    m, l = f(x)  # noqa: E741
    (m * gm.to(m.dtype) + l * gl.to(l.dtype)).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is x.dtype
    return x.grad


@pytest.mark.parametrize("dim", [0, 1, (0, 2), (0, 1, 2)], ids=str)
def test_gradients_are_those_of_the_definition(dtype, dim, engine, device):
    """Also where a maximum is there several times: it is shared evenly, as torch.amax does."""
    x = maker(dtype, device)(4, 50, 3)
    x[:, ::7] = x.amax()
    x[1] = -torch.inf
    x[2, 1:, 0] = -torch.inf
    shape = onepass.state(x, dim).m.shape
    gm, gl = maker(dtype, device, 3)(*shape), maker(dtype, device, 4)(*shape)
    got = gradients(functools.partial(onepass.state, dim=dim, engine=engine), x, gm, gl)
    want = gradients(functools.partial(reference.state, dim=dim), x.double(), gm, gl)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=16 * eps, atol=float(64 * eps * gl.abs().max()))


def test_gradients_of_special_rows(engine, device):
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([[inf, 0.0, 1.0], [-inf, -inf, -inf], [nan, 0.0, 1.0], [nan, nan, nan], [-inf, 2.0, 2.0]])
    x = x.double().to(device)
    ones = torch.ones(5, dtype=torch.float64, device=device)
    got = gradients(functools.partial(onepass.state, engine=engine), x, ones, ones)
    e = torch.e
    share = 1 / 3
    assert got[[0, 1, 4]].flatten().tolist() == pytest.approx([inf, 1, e, share, share, share, 0, 0.5, 0.5])
    assert got[2:4].isnan().all()


def test_gradients_through_a_merge_are_those_of_the_whole(engine, device):
    x = maker(torch.float64, device)(3, 40)

    def merged(x: Tensor) -> Tensor:
        parts = [onepass.state(part, engine=engine) for part in x.split(15, 1)]
        return functools.reduce(onepass.merge, parts).logsumexp()

    assert gradcheck(merged, x.clone().requires_grad_(), check_forward_ad=True)
    got, want = (torch.func.grad(lambda x, f=f: f(x).square().sum())(x) for f in (merged, one_lse))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.func.hessian(merged)(x), torch.func.hessian(one_lse)(x))


def one_lse(x: Tensor) -> Tensor:
    return reference.logsumexp(x, 1)


def test_forward_ad(engine, device):
    x, t = maker(torch.float64, device)(3, 4), maker(torch.float64, device, 9)(3, 4)
    with forward_ad.dual_level():
        for dim in (0, 1, (0, 1)):
            got = onepass.state(forward_ad.make_dual(x, t), dim, engine=engine)
            want = reference.state(forward_ad.make_dual(x, t), dim)
            for ours, theirs in zip(got, want, strict=True):
                tangent = forward_ad.unpack_dual(ours).tangent
                assert tangent is not None
                torch.testing.assert_close(tangent, forward_ad.unpack_dual(theirs).tangent)


def test_a_result_changed_in_place_is_missed_by_backward():
    x = maker(torch.float32)(3, 4).requires_grad_()
    got = onepass.state(x)
    with torch.no_grad():
        got.m.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        got.l.sum().backward()


# torch.func ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("in_dim", [0, 1, -1])
def test_vmap(in_dim, engine, device):
    x = maker(torch.float64, device)(3, 4, 5)
    for dim in (0, -1, (0, 1)):
        for keepdim in (False, True):
            f = functools.partial(onepass.state, dim=dim, keepdim=keepdim, engine=engine)
            got = torch.func.vmap(f, in_dims=in_dim)(x)
            want = [reference.state(v, dim, keepdim) for v in x.unbind(in_dim)]
            torch.testing.assert_close(tuple(got), tuple(torch.stack(parts) for parts in zip(*want, strict=True)))


def test_vmap_down_to_0_d_and_of_gradients(engine, device):
    x = maker(torch.float64, device)(4, 6)
    got = torch.func.vmap(torch.func.vmap(lambda v: onepass.state(v, 0, engine=engine)))(x)
    torch.testing.assert_close(tuple(got), (x, torch.ones_like(x)))

    def loss(f, v: Tensor) -> Tensor:
        m, l = f(v, 0)  # noqa: E741
        return m * l.square()

    ours = functools.partial(onepass.state, engine=engine)
    got = torch.func.vmap(torch.func.grad(functools.partial(loss, ours)))(x)
    torch.testing.assert_close(
        got, torch.stack([torch.func.grad(functools.partial(loss, reference.state))(v) for v in x])
    )
    got = torch.func.jacfwd(functools.partial(loss, ours))(x)
    torch.testing.assert_close(got, torch.func.jacrev(functools.partial(loss, reference.state))(x))


# torch.compile, torch.export, the operator ----------------------------------------------------------------------------
@pytest.mark.usefixtures("fresh_compiler")
def test_compile(engine, device):
    seen: list[str] = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def f(x: Tensor, dim) -> tuple[State, Tensor]:
        got = onepass.state(x, dim, engine=engine)
        return got, onepass.merge(got, got).logsumexp()

    compiled = torch.compile(f, fullgraph=True, backend=backend)
    for dim in (0, -1, (0, 2)):
        x = maker(torch.float64, device)(3, 4, 5).requires_grad_()
        seen.clear()
        got, twice = compiled(x, dim)
        assert len([name for name in seen if "onepass" in name]) == 1
        assert isinstance(got, State)
        assert_state(State(got.m.detach(), got.l.detach()), x.detach(), dim)
        want = torch.func.grad(lambda x, dim=dim: sum(part.sum() for part in reference.state(x, dim)))(x.detach())
        torch.testing.assert_close(torch.autograd.grad(got.m.sum() + got.l.sum(), x, retain_graph=True)[0], want)
        torch.testing.assert_close(twice.detach(), reference.logsumexp(x.detach(), dim) + torch.tensor(2.0).log())


@pytest.mark.usefixtures("fresh_compiler")
def test_compile_with_dynamic_shapes(dtype, engine, device):
    f = torch.compile(lambda x: onepass.state(x, engine=engine), fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((3, 4), (5, 6), (2, 33)):
        x = maker(dtype, device)(*shape)
        assert_state(f(x), x, -1)


def test_export():
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return onepass.state(x, 1).logsumexp()

    x = maker(torch.float32)(3, 4)
    program = torch.export.export(Model(), (x,), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=2, max=64)}})
    program = program.run_decompositions()
    assert "onepass.state.default" in [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    x = maker(torch.float32)(9, 4)
    torch.testing.assert_close(program.module()(x), Model()(x))


# The plan -----------------------------------------------------------------------------------------------------------


def test_explain():
    plan = onepass.explain((16, 4096), function="state", device="h200", dtype=torch.bfloat16)
    assert (plan.function, plan.engine, plan.dtype, plan.out_dtype) == ("state", "cuda", "bfloat16", "float32")
    assert plan.bytes == 16 * (4096 * 2 + 2 * 4)
    assert onepass.explain(torch.zeros(3, 5, dtype=torch.float64), 0, function="state").bytes == 8 * (15 + 10)
    assert onepass.explain((4, 9, 3), 1, function="state", device="h200", engine="triton").tier == "row"
    assert onepass.explain((4, 0), function="state", device="cpu").tier == "none"
    long = onepass.explain((2000, 10**6), function="state", device="h200")
    assert long.tier == "twopass"
    assert not any("twice" in note for note in long.notes)
    with pytest.raises(ValueError, match="state has no dtype="):
        onepass.explain((3, 4), function="state", out_dtype=torch.float16)
