"""DTensors over gloo processes: each result and gradient is that of the whole tensor, for all placements.

Processes are started once for each number of ranks, and run all cases of that number.
"""

import importlib.util
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from lib.ranks import run, run_cases
from lib.scripts import python_output
from lib.support import DTYPES, FUNCTIONS, SOFTMAXES, TORCH, ours
from onepass import _when_imported

close = torch.testing.assert_close
CASES: dict[int, dict[str, Callable[[], None]]] = {2: {}, 4: {}}
F64 = torch.float64


def case(size: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(run: Callable[[], None]) -> Callable[[], None]:
        CASES[size][run.__name__] = run
        return run

    return register


def work(size: int, *names: str) -> None:
    run_cases(size, {name: CASES[size][name] for name in names or CASES[size]})


class Traffic(TorchDispatchMode):
    """The elements that each collective gives this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("_c10d_functional", "c10d") and "wait" not in func.name():
            self.elements += [result.numel()] if isinstance(result, Tensor) else [sys.maxsize]
        return result


def mesh_of(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes)


def spread(t: Tensor, mesh: Any, placements: Any) -> Any:
    """A DTensor with the values of `t`. Of sums that are pending, each rank has an equal part."""
    whole = [Replicate() if p.is_partial() else p for p in placements]
    made = distribute_tensor(t, mesh, whole)
    parts = 1
    for d, p in enumerate(placements):
        parts *= mesh.size(d) if p.is_partial() else 1
    if parts == 1:
        return made
    options = {"shape": t.shape, "stride": t.stride(), "run_check": False}
    return DTensor.from_local(made.to_local() / parts, mesh, placements, **options)


def placed(function: str, placements: Any, dims: tuple[int, ...], keepdim: bool) -> tuple[Any, ...]:
    """The placements of a result."""
    found = []
    for p in placements:
        d = getattr(p, "dim", None)
        if p.is_partial() or (function == "logsumexp" and d in dims):
            p = Replicate()
        elif function == "logsumexp" and d is not None and not keepdim:
            p = Shard(d - sum(other < d for other in dims))
        found.append(p)
    return tuple(found)


def check(
    x: Tensor, mesh: Any, placements: Any, function: str, dims: tuple[int, ...], keepdim: bool, of: Any = None
) -> None:
    """Result, gradient and traffic of a call, beside those of the whole tensor. `of` makes the placements of the
    gradient of those of the result."""
    options = (keepdim,) if function == "logsumexp" else ()
    want_x, got_x = x.clone().requires_grad_(), spread(x, mesh, placements).requires_grad_()
    want = ours(function)(want_x, dims, *options)
    with Traffic() as traffic:
        got = ours(function)(got_x, dims, *options)
    assert got.placements == placed(function, placements, dims, keepdim)
    assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
    assert got.to_local().shape == distribute_tensor(want.detach(), mesh, got.placements).to_local().shape
    close(got.full_tensor(), want)
    g = torch.randn(want.shape, dtype=want.dtype)
    given = spread(g, mesh, got.placements if of is None else of(got.placements))
    with Traffic() as of_backward:
        (dx,) = torch.autograd.grad(got, got_x, given)
    close(dx.full_tensor(), torch.autograd.grad(want, want_x, g)[0])
    rows = torch.Size(size for d, size in enumerate(x.shape) if d not in dims).numel()
    sizes = [mesh.size(d) for d, p in enumerate(placements) if rows and getattr(p, "dim", None) in dims]
    splits = [size for size in sizes if size > 1]
    if not any(p.is_partial() for p in placements):
        assert len(traffic.elements) == len(splits)
        assert all(count <= size * 2 * rows for count, size in zip(traffic.elements, splits, strict=True))
        if of is None:
            assert len(of_backward.elements) == len(splits) * (function != "logsumexp")
            assert all(count <= size * rows for count, size in zip(of_backward.elements, splits, strict=False))


# Two ranks ------------------------------------------------------------------------------------------------------------


@case(2)
def placements() -> None:
    mesh, x = mesh_of(2), torch.randn(3, 5, 4, dtype=F64)
    every = [Shard(0), Shard(1), Shard(2), Replicate(), Partial()]
    for function, p, dims, keepdim in itertools.product(FUNCTIONS, every, [(1,), (2, 0)], [False, True]):
        check(x, mesh, [p], function, dims, keepdim)


@case(2)
def placements_of_gradients() -> None:
    mesh, x = mesh_of(2), torch.randn(3, 5, 4, dtype=F64)
    for function, p, q in itertools.product(
        FUNCTIONS,
        [Shard(1), Shard(0), Replicate()],
        [Shard(0), Shard(1), Replicate(), Partial()],
    ):
        check(x, mesh, [p], function, (1,), False, lambda _, q=q: [q])


@case(2)
def layouts_and_special_sizes() -> None:
    mesh = mesh_of(2)
    for x in (
        torch.randn(5, 3, dtype=F64).t(),
        torch.randn(3, 1, dtype=F64),
        torch.randn(3, 0, dtype=F64),
        torch.randn(0, 4, dtype=F64),
    ):
        for function, p in itertools.product(FUNCTIONS, [Shard(0), Shard(1), Replicate()]):
            check(x, mesh, [p], function, (1,), False)
    for function in FUNCTIONS:
        close(
            ours(function)(spread(torch.tensor(2.0), mesh, [Replicate()]), -1).full_tensor(),
            ours(function)(torch.tensor(2.0), -1),
        )
    x = torch.tensor(
        [[0.0, -torch.inf, -torch.inf, -torch.inf], [-torch.inf] * 4, [0, torch.inf, 1, 2], [torch.nan, 1, 2, 3]]
    )
    for function in FUNCTIONS:
        got = ours(function)(spread(x, mesh, [Shard(1)]), 1).full_tensor()
        close(got, ours(function)(x, 1), equal_nan=True)


@case(2)
def dtypes() -> None:
    mesh = mesh_of(2)
    pairs = [*((dtype, None) for dtype in DTYPES), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)]
    for function, (dtype, to) in itertools.product(FUNCTIONS, [*pairs, (torch.bfloat16, F64)]):
        named = {} if function == "logsumexp" else {"dtype": to}
        x = torch.randn(4, 33).to(dtype)
        want_x, got_x = x.clone().requires_grad_(), spread(x, mesh, [Shard(1)]).requires_grad_()
        want, got = ours(function)(want_x, 1, **named), ours(function)(got_x, 1, **named)
        assert got.dtype is got.to_local().dtype is want.dtype
        close(got.full_tensor(), want)
        g = torch.randn(want.shape).to(want.dtype) / 10
        want.backward(g)
        got.backward(spread(g, mesh, got.placements))
        assert got_x.grad.dtype is dtype
        rounded = max(dtype, want.dtype, key=lambda each: torch.finfo(each).eps)
        tolerance = {"rtol": 0.02, "atol": 5e-3} if rounded in (torch.float16, torch.bfloat16) else {}
        close(got_x.grad.full_tensor().to(rounded), want_x.grad.to(rounded), **tolerance)
    x = torch.randn(4, 6, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert onepass.softmax(spread(x, mesh, [Shard(1)]), 1).dtype is onepass.softmax(x, 1).dtype
    counts = spread(torch.arange(5), mesh, [Shard(0)])
    close(onepass.softmax(counts, 0, torch.float32).full_tensor(), torch.arange(5.0).softmax(0))
    close(onepass.logsumexp(counts, 0).full_tensor(), torch.arange(5.0).logsumexp(0))


@case(2)
def states() -> None:
    mesh, x = mesh_of(2), torch.randn(4, 5, dtype=F64)
    for p, dims, keepdim in itertools.product([Shard(0), Shard(1), Replicate()], [(1,), (0, 1)], [False, True]):
        want_x, got_x = x.clone().requires_grad_(), spread(x, mesh, [p]).requires_grad_()
        want, got = (onepass.state(t, dims, keepdim) for t in (want_x, got_x))
        for mine, whole in zip(got, want, strict=True):
            close(mine.full_tensor(), whole)
        for m, l in (want, got):
            (m.sin().sum() + l.cos().sum()).backward()
        close(got_x.grad.full_tensor(), want_x.grad)
        merged = onepass.merge(got, got)
        close(merged.l.full_tensor(), want.l * 2)


@case(2)
def gradients_of_gradients() -> None:
    mesh, x = mesh_of(2), torch.randn(4, 5, dtype=F64)
    for function, p in itertools.product(FUNCTIONS, [Shard(0), Shard(1), Replicate()]):
        made = []
        for t in (x.clone().requires_grad_(), spread(x, mesh, [p]).requires_grad_()):
            (dx,) = torch.autograd.grad(ours(function)(t, 1).sin().sum(), t, create_graph=True)
            (ddx,) = torch.autograd.grad(dx.pow(3).sum(), t, create_graph=True)
            made.append((dx, ddx, torch.autograd.grad(ddx.square().sum(), t)[0]))
        for want, got in zip(*made, strict=True):
            close(got.full_tensor(), want)


@case(2)
def transforms() -> None:
    mesh, x = mesh_of(2), torch.randn(4, 6, dtype=F64)
    d = spread(x, mesh, [Shard(1)])
    got = torch.func.grad(lambda t: onepass.softmax(t, 1).sin().sum())(d)
    close(got.full_tensor(), torch.func.grad(lambda t: onepass.softmax(t, 1).sin().sum())(x))
    got = torch.func.vmap(lambda t: onepass.log_softmax(t, 0))(d)
    close(got.full_tensor(), onepass.log_softmax(x, 1))
    with torch.inference_mode():
        close(onepass.softmax(spread(x, mesh, [Shard(1)]), 1).full_tensor(), onepass.softmax(x, 1))


def in_a_graph(x: Any, log_softmax: Any, softmax: Any, logsumexp: Any) -> Any:
    return (softmax(x * 2, 1) * log_softmax(x, 1)).sin() + logsumexp(x, 1, True)


@case(2)
def compiled() -> None:
    mesh, x = mesh_of(2), torch.randn(4, 6, dtype=F64)
    functions = onepass.log_softmax, onepass.softmin, onepass.logsumexp
    torchs = torch.log_softmax, torch.softmax, torch.logsumexp
    for p, used in ((Shard(1), functions), (Shard(0), functions), (Shard(1), torchs)):
        torch.compiler.reset()
        elements: list[int] = []

        def compile_graph(graph: Any, _: Any, elements: list[int] = elements) -> Any:
            for node in graph.graph.nodes:
                if "c10d" in str(node.target) and "wait" not in str(node.target):
                    elements.append(node.meta["val"].numel())
            return make_boxed_func(graph.forward)

        want_x, got_x = x.clone().requires_grad_(), spread(x, mesh, [p]).requires_grad_()
        want = in_a_graph(want_x, *used)
        want.sum().backward()
        with onepass.patch():
            compiler = aot_autograd(fw_compiler=compile_graph)
            got = torch.compile(in_a_graph, fullgraph=True, backend=compiler)(got_x, *used)
            got.sum().backward()
        close(got.full_tensor(), want)
        close(got_x.grad.full_tensor(), want_x.grad)
        assert len(elements) == (6 if p == Shard(1) else 0)  # one is the sum that broadcasting needs
        assert all(count <= 2 * 2 * 4 for count in elements)


def weighted(y: Tensor, w: Tensor) -> Tensor:
    """A sum, in which every element of `w` has a result. The gradient of a reduction is a sum that is pending."""
    return ((y if y.dim() == w.dim() else y.unsqueeze(1)) * w).sum()


@case(2)
def patched() -> None:
    mesh, x, w = mesh_of(2), torch.randn(4, 7), torch.randn(4, 7)
    handlers = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)
    for (function, torchs), p in itertools.product(TORCH.items(), [Shard(1), Shard(0), Replicate()]):
        want_x, got_x = x.clone().requires_grad_(), spread(x, mesh, [p]).requires_grad_()
        want = torchs(want_x, 1)
        weighted(want, w).backward()
        spread_w = spread(w, mesh, [p])
        with onepass.patch(report=True) as patch, Traffic() as traffic:
            got = torchs(got_x, 1)
            weighted(got, spread_w).backward()
        close(got.full_tensor(), want)
        assert got.stride() == want.stride()
        close(got_x.grad.full_tensor(), want_x.grad)
        named = {"softmin": "softmax"}.get(function, function)
        served = {named: 1} if function == "logsumexp" else {named: 1, f"{named} backward": 1}
        assert {name: count for name, count in patch.report.served.items() if count} == served
        assert not patch.report.fallbacks
        assert all(count <= 2 * 2 * 4 for count in traffic.elements)
    assert dict(handlers) == before
    for whole in (torch.arange(12).reshape(3, 4), torch.randn(2, 4, dtype=torch.complex64)):  # torch computes
        with onepass.patch(report=True) as patch:
            got = torch.logsumexp(spread(whole, mesh, [Shard(1)]), 1)
        close(got.full_tensor(), torch.logsumexp(whole, 1))
        assert patch.report.fallbacks == {("logsumexp", f"dtype {whole.dtype}"): 1}
        assert not any(patch.report.served.values())
    with onepass.patch(), pytest.raises(IndexError):
        torch.softmax(spread(x, mesh, [Shard(1)]), 2)


@case(2)
def loss_parallel_beside_a_patch() -> None:
    from torch.distributed.tensor.parallel import loss_parallel

    mesh, x, target = mesh_of(2), torch.randn(4, 6), torch.randint(0, 6, (4,))
    handlers, key = DTensor._op_dispatcher._custom_op_handlers, torch.ops.aten._log_softmax.default
    want_x = x.clone().requires_grad_()
    F.cross_entropy(want_x, target).backward()

    def loss() -> None:
        got_x = spread(x, mesh, [Shard(1)]).requires_grad_()
        F.cross_entropy(got_x, spread(target, mesh, [Replicate()])).backward()
        close(got_x.grad.full_tensor(), want_x.grad)

    with onepass.patch():
        own = handlers[key]
        with loss_parallel():
            loss()
        assert handlers[key] is own
        loss()
    assert key not in handlers
    with loss_parallel():
        with onepass.patch():
            loss()
        loss()
        patch = onepass.patch()
    assert handlers[key] is own
    patch.restore()
    assert key not in handlers


@case(2)
def refusals() -> None:
    mesh, x = mesh_of(2), torch.randn(4, 6)
    d, target = spread(x, mesh, [Shard(1)]), torch.randint(0, 6, (4,))
    index, offsets = spread(target, mesh, [Replicate()]), torch.tensor([0, 2, 4])
    ones = spread(torch.ones(6), mesh, [Replicate()])
    with pytest.raises(TypeError, match="got both"):
        torch.ops.onepass._softmax_backward(x, d, 0, [1], torch.float32)
    for refused in (
        lambda: onepass.softmax(d, 1, scale=2.0),
        lambda: onepass.log_softmax(d, 1, bias=ones),
        lambda: onepass.softmax(d, 1, causal=True),
        lambda: onepass.logsumexp(d, 1, sink=0.0),
        lambda: onepass.softmax(x, 1, bias=ones),
        lambda: onepass.softmax(x, 1, mask=ones.bool()),
        lambda: onepass.softmax(d, 1, out=torch.empty_like(d)),
        lambda: onepass.softmax(d, 1, out=torch.empty_like(x)),
        lambda: onepass.softmax(x, 1, out=torch.empty_like(d)),
        lambda: onepass.logsumexp(d, 1, out=torch.empty(4)),
        lambda: onepass.cross_entropy(d, target),
        lambda: onepass.cross_entropy(d, index, z_loss=0.1, label_smoothing=0.1),
        lambda: onepass.cross_entropy(x, index),
        lambda: onepass.cross_entropy(x, target, ones),
        lambda: onepass.cross_entropy(d, d.abs()),
        lambda: onepass.log_prob(d, index),
        lambda: onepass.log_prob(x, index),
        lambda: onepass.entropy(d, 1),
        lambda: onepass.kl_div(d, x),
        lambda: onepass.kl_div(x, d),
        lambda: onepass.linear_cross_entropy(d, x, target),
        lambda: onepass.linear_cross_entropy(x, x, index),
        lambda: onepass.segment_softmax(d, offsets),
        lambda: onepass.segment_softmax(x, spread(offsets, mesh, [Replicate()])),
        lambda: onepass.segment_logsumexp(d, index=torch.tensor([0, 0, 1, 1])),
        lambda: onepass.segment_state(d, onepass.Segments(offsets)),
        lambda: onepass.explain(d),
        lambda: onepass.nn.ScaledMaskedSoftmax(scale=2.0)(d),
        lambda: onepass.nn.CrossEntropyLoss()(d, index),
        lambda: torch.ops.onepass._softmax.int(d, 1),
    ):
        for grads in (False, True):
            d.requires_grad_(grads)
            with pytest.raises((NotImplementedError, RuntimeError), match=r"no DTensor|no gradient"):
                refused()


# Four ranks -----------------------------------------------------------------------------------------------------------


@case(4)
def meshes_of_two_dims() -> None:
    mesh, x = mesh_of(2, 2), torch.randn(3, 5, 6, dtype=F64)
    every = [Shard(0), Shard(1), Replicate(), Partial()]
    for function, p, q in itertools.product(("softmax", "logsumexp"), every, every):
        check(x, mesh, [p, q], function, (1,), False)
    for p, q in itertools.product(every[:2], every[:2]):
        check(x, mesh, [p, q], "log_softmax", (0, 1), False)
        check(x, mesh, [p, q], "logsumexp", (0,), True)


@case(4)
def meshes_of_one_dim_and_of_three() -> None:
    for function, n in itertools.product(FUNCTIONS, (3, 9)):  # a rank has nothing, ranks have parts of several sizes
        check(torch.randn(4, n, dtype=F64), mesh_of(4), [Shard(1)], function, (1,), False)
    mesh, x = mesh_of(2, 1, 2), torch.randn(3, 5, 6, dtype=F64)
    for function in FUNCTIONS:
        check(x, mesh, [Shard(2), Shard(1), Shard(1)], function, (1,), False)


@case(4)
def strided_shards() -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, x, rank = mesh_of(2, 2), torch.randn(8, 3, dtype=F64), dist.get_rank()
    first = 4 * (rank % 2) + 2 * (rank // 2)  # the dims of the mesh split in the order from right to left
    mine = slice(first, first + 2)

    def own(t: Tensor, g: Tensor) -> None:
        for function, dim in itertools.product(SOFTMAXES, (0, 1)):
            want_x, got_x = x.clone().requires_grad_(), t.detach().requires_grad_()
            want, got = ours(function)(want_x, dim), ours(function)(got_x, dim)
            assert got.placements == t.placements
            close(got.to_local(), want[mine])
            (dx,) = torch.autograd.grad(got, got_x, g)
            close(dx.to_local(), torch.autograd.grad(want, want_x, x.cos())[0][mine])
        close(onepass.logsumexp(t, 0).to_local(), x.logsumexp(0))
        lse = onepass.logsumexp(t.unsqueeze(0), 2)
        close(lse.to_local(), x.logsumexp(1)[None, mine])
        assert {p.dim for p in lse.placements} == {1}

    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    options = {"shape": x.shape, "stride": x.stride(), "run_check": False}
    own(*(DTensor.from_local(t[mine], mesh, strided, **options) for t in (x, x.cos())))


@case(4)
def orders_of_shards() -> None:
    from torch.distributed.tensor import _dtensor_spec

    if not hasattr(_dtensor_spec, "ShardOrderEntry"):
        return
    mesh, x, rank = mesh_of(2, 2), torch.randn(8, 3, dtype=F64), dist.get_rank()
    first = 4 * (rank % 2) + 2 * (rank // 2)
    meta = _dtensor_spec.TensorMeta(x.shape, x.stride(), x.dtype)
    order = (_dtensor_spec.ShardOrderEntry(0, (1, 0)),)
    spec = _dtensor_spec.DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=order)
    for function in FUNCTIONS:  # a result has the order of default
        got_x = DTensor(x[first : first + 2].clone(), spec, requires_grad=False)
        close(ours(function)(got_x, 1).to_local(), ours(function)(x, 1)[2 * rank : 2 * rank + 2])


@case(4)
def a_mesh_of_some() -> None:
    mesh, x = DeviceMesh("cpu", [1, 3]), torch.randn(4, 6, dtype=F64)
    for function in FUNCTIONS:
        d = spread(x, mesh, [Shard(1)]).requires_grad_()
        y = ours(function)(d, 1)
        y.sum().backward()
        if dist.get_rank() in (1, 3):
            close(y.full_tensor(), ours(function)(x, 1))
        else:
            assert not y.to_local().numel()


# The processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", CASES)
def test_cases(size, compilers, tmp_path):
    run(compilers, tmp_path, size, __file__, f"work({size})")


def test_dtensors_are_imported_by_others_alone():
    code = "import sys, torch, onepass; names = 'torch.distributed.tensor', 'onepass.dtensor'; "
    code += "print(*(n in sys.modules for n in names)); import torch.distributed.tensor.parallel as p; "
    code += "print(names[1] in sys.modules, 'onepass' in p.loss._disable_custom_loss_ops.__module__, sys.meta_path)"
    before, after = python_output(code).splitlines()
    assert before == "False False"
    assert after.startswith("True True")
    assert "onepass" not in after


def test_what_is_imported_is_acted_on_once(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "imported_later.py").write_text("number = 1\n")
    numbers: list[int] = []
    before = list(sys.meta_path)
    _when_imported.when_imported("imported_later", lambda module: numbers.append(module.number))
    assert importlib.util.find_spec("imported_later")
    assert not numbers
    import imported_later

    assert numbers == [1]
    assert sys.meta_path == before
    _when_imported.when_imported("imported_later", lambda module: numbers.append(module.number + 1))
    assert numbers == [1, 2]
    del sys.modules[imported_later.__name__]
    _when_imported.when_imported("imported_later", lambda module: module.another)
    with pytest.warns(UserWarning, match=r"does not know this imported_later: .* 'another'"):
        importlib.import_module("imported_later")
    del sys.modules[imported_later.__name__]
