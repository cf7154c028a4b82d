"""onepass.distributed over gloo processes: every rank runs the cases, and compares its part with unsharded rows.

A case takes the ranks' sizes of the dim that is split. Processes are started once for each number of ranks. A CPU's
float64 results are those of unsharded rows but for roundings.
"""

import functools
import itertools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import onepass
from lib.ranks import join, run, run_cases
from lib.samples import special
from lib.support import DTYPES, FUNCTIONS, slow
from onepass import distributed, distributed_ops
from onepass.validation import Spec

close = torch.testing.assert_close
CASES: dict[str, Callable[["Shards"], None]] = {}
SIZES = {2: (5, 3), 3: (4, 0, 3), 4: (2, 1, 0, 4)}  # of the ranks' parts
F64 = torch.float64
LOSSES: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "ignore_index": 1},
    {"reduction": "none", "label_smoothing": 0.2},
    {"label_smoothing": 0.1, "z_loss": 0.1},
]


class Shards:
    """This rank's part of tensors whose dim 1 is split into `sizes`."""

    def __init__(self, rank: int, sizes: tuple[int, ...]) -> None:
        self.rank, self.sizes, self.total = rank, sizes, sum(sizes)
        self.start = sum(sizes[:rank])
        torch.manual_seed(0)

    def randn(self, *shape: int, dtype: torch.dtype = F64) -> Tensor:
        return torch.randn(shape, dtype=F64).to(dtype)

    def mine(self, t: Tensor) -> Tensor:
        return t.split(self.sizes, 1)[self.rank]

    def result(self, function: str, t: Tensor) -> Tensor:
        return t if function == "logsumexp" else self.mine(t)

    def leaf(self, t: Tensor) -> Tensor:
        return self.mine(t).clone().requires_grad_()


def case(run: Callable[[Shards], None]) -> None:
    CASES[run.__name__] = run


def everywhere(t: Tensor) -> None:
    """Every rank has the same bits."""
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    for part in parts:
        close(part, t, rtol=0, atol=0, equal_nan=True)


def call(function: str, sharded: bool = True) -> Callable[..., Any]:
    return getattr(distributed if sharded else onepass, function)


def check_derivatives(f: Callable[[Tensor], Tensor], whole: Callable[[Tensor], Tensor], s: Shards, x: Tensor) -> None:
    """Gradients, their gradients and tangents. A result of the shape of this rank's part is sharded too."""
    want_x, got_x = x.clone().requires_grad_(), s.leaf(x)
    want, got = whole(want_x), f(got_x)
    is_part = want.dim() == x.dim() and want.shape[1] == s.total
    part = s.mine if is_part else lambda t: t
    close(got, part(want), equal_nan=True)
    g, h = torch.randn(want.shape, dtype=F64), s.randn(*x.shape)
    (want_dx,) = torch.autograd.grad(want, want_x, g, create_graph=True)
    (dx,) = torch.autograd.grad(got, got_x, part(g), retain_graph=True)
    close(dx, s.mine(want_dx))
    (dx,) = torch.autograd.grad(got, got_x, part(g), create_graph=True)
    close(dx, s.mine(want_dx))
    (want_ddx,) = torch.autograd.grad(want_dx, want_x, h)
    (ddx,) = torch.autograd.grad(dx, got_x, s.mine(h))
    close(ddx, s.mine(want_ddx))
    _, want_t = torch.func.jvp(whole, (x,), (h,))
    y, t = torch.func.jvp(f, (s.mine(x),), (s.mine(h),))
    close(y, part(want.detach()))
    close(t, part(want_t))
    with torch.autograd.forward_ad.dual_level():
        dual = f(torch.autograd.forward_ad.make_dual(s.mine(x), s.mine(h)))
        close(torch.autograd.forward_ad.unpack_dual(dual).tangent, part(want_t))
    if not is_part:
        everywhere(got.detach())


# The family -----------------------------------------------------------------------------------------------------------


@case
def rows_of_all_dtypes(s: Shards) -> None:
    for function, dtype in itertools.product(FUNCTIONS, DTYPES):
        x = s.randn(4, s.total, 3, dtype=dtype)
        y = call(function)(s.mine(x), 1)
        assert y.dtype is dtype
        close(y, s.result(function, call(function, False)(x, 1)))


@case
def dims(s: Shards) -> None:
    x = s.randn(3, s.total, 2)
    for function, dim in itertools.product(FUNCTIONS, [(0, 1), (1, -1), (2, 1, 0)]):
        y = call(function)(s.mine(x), dim)
        close(y, s.result(function, call(function, False)(x, dim)))
    close(distributed.logsumexp(s.mine(x), (0, 1), True), onepass.logsumexp(x, (0, 1), True))
    none = x[:0]
    close(distributed.softmax(s.mine(none), 1), s.mine(none))
    one = torch.tensor(3.0)
    close(distributed.softmax(one, 0), torch.tensor(1 / len(s.sizes)))
    assert distributed.logsumexp(one, 0).shape == ()


@case
def result_dtypes(s: Shards) -> None:
    x = s.randn(4, s.total, dtype=torch.bfloat16) * 8
    for dtype in (torch.float32, F64, torch.float16):
        y = distributed.log_softmax(s.mine(x), 1, dtype=dtype)
        assert y.dtype is dtype
        close(y, s.mine(onepass.log_softmax(x, 1, dtype=dtype)))
    numbers = torch.arange(4 * s.total).reshape(4, -1)
    close(distributed.softmax(s.mine(numbers), 1, dtype=F64), s.mine(onepass.softmax(numbers, 1, dtype=F64)))
    close(distributed.logsumexp(s.mine(numbers), 1), onepass.logsumexp(numbers, 1))


@case
def special_rows(s: Shards) -> None:
    x = special(s.total, torch.float32, "cpu")
    for cut in (2, s.total - 1):  # so that all of a rank's part may be -inf
        y = x.clone()
        y[:, :cut] = -torch.inf
        x = torch.cat((x, y))
    for function in FUNCTIONS:
        want = call(function, False)(x, 1)
        close(call(function)(s.mine(x), 1), s.result(function, want), equal_nan=True)


@case
def derivatives(s: Shards) -> None:
    for function, dim in [*itertools.product(FUNCTIONS, [1]), ("softmax", (0, 1)), ("logsumexp", (0, 1))]:
        f, whole = (functools.partial(call(function, sharded), dim=dim) for sharded in (True, False))
        check_derivatives(f, whole, s, s.randn(3, s.total))


@case
def gradients_of_half_types(s: Shards) -> None:
    for function in FUNCTIONS:
        x, dtype = s.randn(4, s.total, dtype=torch.bfloat16), None if function == "logsumexp" else torch.float32
        given: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        want_x, got_x = x.clone().requires_grad_(), s.leaf(x)
        want, got = call(function, False)(want_x, 1, **given), call(function)(got_x, 1, **given)
        g = torch.randn(want.shape, dtype=want.dtype)
        want.backward(g)
        got.backward(s.result(function, g))
        assert got_x.grad is not None
        assert got_x.grad.dtype is torch.bfloat16
        close(got_x.grad, s.mine(want_x.grad))


@case
def transforms(s: Shards) -> None:
    x = s.randn(3, s.total, 2)
    for function in FUNCTIONS:
        f, whole = (functools.partial(call(function, sharded), dim=1) for sharded in (True, False))
        want, got = torch.func.vmap(whole, in_dims=2)(x), torch.func.vmap(f, in_dims=2)(s.mine(x))
        close(got, want if function == "logsumexp" else want.split(s.sizes, 2)[s.rank])
    t = torch.zeros(3, dtype=torch.int64)
    want = torch.func.grad(lambda a: onepass.cross_entropy(a, t))(x[..., 0])
    close(torch.func.grad(lambda a: distributed.cross_entropy(a, t))(s.mine(x[..., 0])), s.mine(want))


@case
def bits(s: Shards) -> None:
    x = s.randn(50, s.total, dtype=torch.float32) * 20
    y = distributed.logsumexp(s.mine(x), 1)
    everywhere(y)
    with onepass.batch_invariant():
        every = distributed.logsumexp(s.mine(x), 1)
        one = distributed.logsumexp(s.mine(x[7:8]), 1)
    assert torch.equal(every[7:8], one)


@case
def blocks_of_rows(s: Shards) -> None:
    before, distributed_ops._blocks = distributed_ops._blocks, lambda x, spec: 3
    try:
        for shape, dim in [((7, s.total), 1), ((2, s.total, 5), 1), ((2, s.total, 4), (0, 1)), ((2, s.total), 1)]:
            x = s.randn(*shape, dtype=torch.float32)
            x[..., -1, :] = -torch.inf
            close(distributed.softmax(s.mine(x), dim), s.mine(onepass.softmax(x, dim)), equal_nan=True)
    finally:
        distributed_ops._blocks = before


@case
def two_groups_one_after_another(s: Shards) -> None:
    """As the dims of a mesh are, of which each rank is in one group each: here the group of all, and of itself."""
    alone = [dist.new_group([rank]) for rank in range(len(s.sizes))][s.rank]
    groups = tuple(distributed_ops.ranks_of("softmax", group) for group in (alone, None))
    x, g = s.randn(3, s.total), s.randn(3, s.total)
    spec = Spec("softmax", [1])
    y = distributed_ops.forward(s.mine(x), spec, groups)
    close(y, s.mine(x.softmax(1)))
    want = x.clone().requires_grad_()
    want.softmax(1).backward(g)
    close(distributed_ops.backward(s.mine(g), (y,), spec, groups, F64), s.mine(want.grad))


@case
def a_group_of_some(s: Shards) -> None:
    group = dist.new_group([0, 1])
    if s.rank > 1:
        with pytest.raises(RuntimeError, match="no member"):
            distributed.softmax(torch.zeros(3), group=group)
        return
    x = s.randn(3, 6)
    part = x.split(3, 1)[s.rank]
    close(distributed.softmax(part, 1, group=group), x.softmax(1).split(3, 1)[s.rank])


# Losses ---------------------------------------------------------------------------------------------------------------


@case
def losses(s: Shards) -> None:
    for options, shape in itertools.product(LOSSES, [(6, s.total), (3, s.total, 2)]):
        x, is_given = s.randn(*shape), len(shape) == 2
        target = torch.randint(s.total, (shape[0], *shape[2:]))
        target.view(-1)[0] = options.get("ignore_index", -100)
        where = {"start": s.start, "classes": s.total} if is_given else {}
        f = functools.partial(distributed.cross_entropy, target=target, **options, **where)
        check_derivatives(f, functools.partial(onepass.cross_entropy, target=target, **options), s, x)


@case
def losses_of_other_dtypes_and_shapes(s: Shards) -> None:
    target = torch.randint(s.total, (4,), dtype=torch.int32)
    for dtype in DTYPES:
        x = s.randn(4, s.total, dtype=dtype)
        want_x, got_x = x.clone().requires_grad_(), s.leaf(x)
        want = onepass.cross_entropy(want_x, target, label_smoothing=0.1)
        loss = distributed.cross_entropy(got_x, target, label_smoothing=0.1)
        close(loss, want)
        want.backward()
        loss.backward()
        close(got_x.grad, s.mine(want_x.grad))
    row = x[:1]
    close(distributed.cross_entropy(s.mine(row)[0], target[0]), onepass.cross_entropy(row[0], target[0]))
    far = s.randn(4, s.total, dtype=torch.float32) + 1e4
    for smoothing in (0.0, 0.1):
        want = onepass.cross_entropy(far.double(), target, label_smoothing=smoothing).float()
        close(distributed.cross_entropy(s.mine(far), target, label_smoothing=smoothing), want, rtol=1e-5, atol=1e-6)
    close(distributed.cross_entropy(s.mine(x[:0]), target[:0], reduction="sum"), torch.zeros((), dtype=x.dtype))


@case
def losses_of_infinite_logits(s: Shards) -> None:
    x = s.randn(5, s.total)
    x[0, 1:] = -torch.inf
    x[1, : s.total - 1] = -torch.inf
    x[2] = -torch.inf
    x[3, 0] = torch.nan  # of which a rank may have nothing else
    x[4, 1] = torch.inf
    target = torch.tensor([1, s.total - 1, 0, s.total - 1, 0])
    want_x, got_x = x.clone().requires_grad_(), s.leaf(x)
    want = onepass.cross_entropy(want_x, target, reduction="none")
    loss = distributed.cross_entropy(got_x, target, reduction="none")
    close(loss, want, equal_nan=True)
    loss.sum().backward()
    want.sum().backward()
    close(got_x.grad, s.mine(want_x.grad), equal_nan=True)


@case
def log_probabilities(s: Shards) -> None:
    x = s.randn(3, s.total, 2)
    for index in (torch.randint(s.total, (3, 2)), torch.randint(s.total, (3, 4, 2))):
        f, whole = (functools.partial(call("log_prob", sharded), index=index, dim=1) for sharded in (True, False))
        check_derivatives(f, whole, s, x)
    half = x.half()
    y = distributed.log_prob(s.mine(half), index, 1, dtype=torch.float32, start=s.start, classes=s.total)
    close(y, onepass.log_prob(half, index, 1, dtype=torch.float32))
    assert distributed.log_prob(s.mine(x), index[:, :0], 1).shape == (3, 0, 2)


@case
def classes_that_do_not_exist(s: Shards) -> None:
    x = s.randn(2, s.total)
    for wrong in (s.total, -1):
        with pytest.raises(IndexError, match=f"class {wrong} is out of range for {s.total} classes"):
            distributed.cross_entropy(s.mine(x), torch.tensor([0, wrong]))
        with pytest.raises(IndexError, match=f"class {wrong}"):
            distributed.log_prob(s.mine(x), torch.tensor([0, wrong]), start=s.start, classes=s.total)


# Calls that differ ----------------------------------------------------------------------------------------------------


@case
def calls_that_differ(s: Shards) -> None:
    def refused(words: str, function: str, *given: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=words):
            call(function)(*given, check=True, **options)

    x, last = s.mine(s.randn(3, s.total)), s.rank == len(s.sizes) - 1
    refused(r"rank 0: softmax .*float64.*rank \d: softmax .*float32", "softmax", x.float() if last else x, 1)
    refused(r"\[3, \*\].*\[2, \*\]", "log_softmax", x[:2] if last else x, 1)
    refused(r"\[3, \*\].*\[1, 3, \*\]", "logsumexp", x[None] if last else x, -1)
    refused(r"dims \[1\].*dims \[0, 1\]", "softmax", x, (0, 1) if last else 1)
    refused("softmin.*log_softmax", "log_softmax" if last else "softmin", x, 1)
    refused(r"classes \[3\].*classes \[2\]", "cross_entropy", x, torch.zeros(2 if last else 3, dtype=torch.int64))
    refused("softmax over dims .* with exchange='kernel'", "softmax", x, 1, exchange="kernel" if last else "collective")
    with pytest.raises(ValueError, match=r"takes a contiguous tensor on a CUDA GPU .* got a tensor on cpu"):
        distributed.softmax(x, 1, exchange="kernel")
    close(distributed.softmax(x, 1, check=True), distributed.softmax(x, 1))
    with pytest.raises(IndexError, match="dim must be"):
        distributed.softmax(x, 5, check=True)


def compiled(s: Shards) -> None:
    x = s.randn(4, s.total)
    target = torch.randint(s.total, (4,))

    group = dist.new_group(list(range(len(s.sizes))))

    def results(x: Tensor, sharded: bool) -> tuple[Tensor, ...]:
        y = distributed.softmax(x, 1, group=group) if sharded else onepass.softmax(x, 1)
        lse = call("logsumexp", sharded)(x, 1)
        return y, lse, call("cross_entropy", sharded)(x, target, label_smoothing=0.1)

    want_x, got_x = x.clone().requires_grad_(), s.leaf(x)
    y, *others = results(want_x, False)
    graph = torch.compile(results, fullgraph=True, backend="aot_eager")
    got_y, *got_others = graph(got_x, True)
    close((got_y, *got_others), (s.mine(y), *others))
    with torch.no_grad():
        close(graph(got_x, True), (s.mine(y), *others))
    grads = [torch.randn(t.shape, dtype=F64) for t in (y, *others)]
    torch.autograd.backward((y, *others), grads)
    torch.autograd.backward((got_y, *got_others), [s.mine(grads[0]), *grads[1:]])
    close(got_x.grad, s.mine(want_x.grad))


def on_gpus(dtype: torch.dtype, error: float) -> None:
    """All functions and a loss with their gradients, plain, in blocks, compiled and of a DTensor."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(0)  # on each rank the same numbers
    x, g = (torch.randn(70, 3000 * size, device="cuda", generator=generator).to(dtype) for _ in range(2))
    target = torch.randint(3000 * size, (70,), device="cuda", generator=generator)

    def mine(t: Tensor) -> Tensor:
        return t.chunk(size, 1)[rank] if t.dim() > 1 else t

    def check(f: Callable[[Tensor], Tensor], whole: Callable[[Tensor], Tensor]) -> None:
        want_x, got_x = x.detach().clone().requires_grad_(), mine(x).detach().clone().requires_grad_()
        want, got = whole(want_x), f(got_x)
        close(got, mine(want) if want.dim() > 1 else want, rtol=error, atol=error)
        of = g if want.dim() > 1 else torch.ones_like(want)
        want.backward(of)
        got.backward(mine(of) if want.dim() > 1 else of)
        close(got_x.grad, mine(want_x.grad), rtol=error, atol=error)

    def sharded(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A function of a DTensor, of this rank's part."""
        mesh = init_device_mesh("cuda", (size,))
        return lambda t: f(DTensor.from_local(t, mesh, [Shard(1)])).to_local()

    for function in ("softmax", "log_softmax", "softmin", "logsumexp"):
        f, whole = (functools.partial(call(function, of), dim=1) for of in (True, False))
        check(f, whole)
        torch._dynamo.reset()  # lest it counts the other functions as compilations of the same code
        check(torch.compile(f, fullgraph=True, backend="aot_eager"), whole)
        check(sharded(whole), whole)
    with mock.patch.object(distributed_ops, "_ROWS_OF_BLOCKS", 1):
        check(functools.partial(distributed.softmax, dim=1), functools.partial(onepass.softmax, dim=1))
    for options in LOSSES:
        losses = (functools.partial(call("cross_entropy", of), target=target, **options) for of in (True, False))
        check(*losses)
    everywhere(distributed.logsumexp(mine(x), 1))
    for function in ("softmax", "log_softmax", "softmin"):
        f, whole = functools.partial(call(function), exchange="kernel"), call(function, False)
        check(functools.partial(f, dim=1), functools.partial(whole, dim=1))
        torch._dynamo.reset()
        check(
            torch.compile(functools.partial(f, dim=1), fullgraph=True, backend="aot_eager"),
            functools.partial(whole, dim=1),
        )
        sizes = [5001 * size - 7 * (size - 1), *[7] * (size - 1)] if size > 2 else [5999, 1]
        for rows, parts in ((1, [3000] * size), (1000, sizes), (33, [0, *[90001] * (size - 1)])):
            z, of = (torch.randn(rows, sum(parts), device="cuda", generator=generator).to(dtype) for _ in range(2))
            own, z = z.split(parts, 1)[rank].contiguous().requires_grad_(), z.requires_grad_()
            got, want = f(own, 1), whole(z, 1)
            close(got, want.split(parts, 1)[rank], rtol=error, atol=error)
            got.backward(of.split(parts, 1)[rank])
            close(own.grad, torch.autograd.grad(want, z, of)[0].split(parts, 1)[rank], rtol=error, atol=error)
    within_graphs_and_streams(mine(x).contiguous())


def within_graphs_and_streams(x: Tensor) -> None:
    f = functools.partial(distributed.softmax, dim=1, exchange="kernel")
    want, other = f(x), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        apart = f(x)
    after = f(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = f(x)
    for _ in range(3):
        y.fill_(0)
        graph.replay()
        close(y, want, rtol=0, atol=0)
    for t in (apart, after, f(x.unflatten(1, (-1, 10)), dim=(1, 2)).flatten(1)):
        close(t, want, rtol=0, atol=0)
    x[:, 5] = torch.inf if dist.get_rank() else -torch.inf
    assert f(x).isnan().all()


def no_answer() -> None:
    """The other rank makes no call."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    f = functools.partial(distributed.softmax, torch.randn(5, 64, device="cuda"), exchange="kernel", group=group)
    first = f()
    if dist.get_rank() == 0:
        assert f().isnan().all()
        with pytest.raises(RuntimeError, match=r"rank 1 of \d+ did not answer within 3 s"):
            f()
    assert not first.isnan().any()
    dist.barrier()


# The processes --------------------------------------------------------------------------------------------------------


def work(size: int, names: str) -> None:
    cases = {**CASES, "compiled": compiled}
    run_cases(size, {name: lambda of=cases[name]: of(Shards(dist.get_rank(), SIZES[size])) for name in names.split()})


def work_on_gpus(size: int) -> None:
    errors = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, F64: 1e-12}
    cases = {str(dtype): functools.partial(on_gpus, dtype, error) for dtype, error in errors.items()}
    cases["no answer"] = no_answer
    run_cases(size, cases, backend="nccl")


def die(size: int) -> None:
    rank = join(size, 5)
    distributed.softmax(torch.zeros(3))
    if rank:
        os._exit(0)
    with pytest.raises(RuntimeError, match=r"(?i)gloo|closed|reset|timed out"):
        distributed.softmax(torch.zeros(3))


@pytest.mark.parametrize(("size", "some"), [slow(2, False), (3, False), (4, True)])
def test_cases(size, some, compilers, tmp_path):
    names = ["rows_of_all_dtypes", "special_rows", "losses_of_infinite_logits", "a_group_of_some"] if some else CASES
    run(compilers, tmp_path, size, __file__, f"work({size}, {' '.join(names)!r})")


def test_compiled(compilers, tmp_path):
    run(compilers, tmp_path, 2, __file__, "work(2, 'compiled')")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_gpus(size, compilers, tmp_path):
    if torch.cuda.device_count() < size:
        pytest.skip(f"fewer than {size} GPUs")
    run(compilers, tmp_path, size, __file__, f"work_on_gpus({size})")


def test_a_rank_that_ends_is_an_error_of_the_others(compilers, tmp_path):
    run(compilers, tmp_path, 2, __file__, "die(2)")


# One process ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_of_one_has_the_bits_of_plain_calls(function, alone):
    x = torch.randn(3, 50)
    assert torch.equal(call(function)(x, 1), call(function, False)(x, 1))
    target = torch.tensor([0, 4, 9])
    assert torch.equal(distributed.cross_entropy(x, target), onepass.cross_entropy(x, target))
    assert torch.equal(distributed.log_prob(x, target), onepass.log_prob(x, target))
    assert distributed.logsumexp(x, 1, True, check=True).shape == (3, 1)


def test_refusals(alone):
    x, target = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    for error, words, refused in [
        (TypeError, "group must be a", lambda: distributed.softmax(x, group="world")),
        (TypeError, r"distributed.softmax\(\): input must be a Tensor", lambda: distributed.softmax([1.0])),
        (NotImplementedError, "needs dtype=", lambda: distributed.softmax(target)),
        (IndexError, "dim must be", lambda: distributed.softmax(x, 2)),
        (ValueError, "start and classes go together", lambda: distributed.cross_entropy(x, target, start=0)),
        (ValueError, r"target has the shape \[2\]", lambda: distributed.cross_entropy(x, target[:1])),
        (TypeError, "target must be a Tensor", lambda: distributed.cross_entropy(x, 1)),
        (ValueError, "reduction", lambda: distributed.cross_entropy(x, target, reduction="all")),
        (ValueError, "got a tensor without dims", lambda: distributed.cross_entropy(x[0, 0], target[0])),
        (ValueError, "index has the shape", lambda: distributed.log_prob(x, target[:1])),
        (TypeError, "index takes integers", lambda: distributed.log_prob(x, x[:, 0])),
        (ValueError, "exchange is 'collective' or 'kernel'", lambda: distributed.softmax(x, exchange="peer")),
    ]:
        with pytest.raises(error, match=words):
            refused()


def test_without_a_group():
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group\(\) first"):
        onepass.distributed.softmax(torch.zeros(3))


def test_a_torch_without_distributed(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"has no torch\.distributed"):
        distributed.cross_entropy(torch.zeros(1, 3), torch.tensor([0]))
