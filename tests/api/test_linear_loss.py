"""The cross-entropy of a linear layer in chunks of rows, against torch's of all logits."""

import pytest
import torch
from torch.nn import functional as F

import onepass
from lib.support import DTYPES, maker

F32, F64, F16, BF16 = DTYPES


@pytest.mark.parametrize("chunk", [None, 1, 5, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_gradients(chunk, reduction, engine, device):
    make = maker(F64, device, scale=0.5)
    hidden, weight, bias = make(3, 4, 8), make(11, 8), make(11)
    target = torch.randint(0, 11, (3, 4), generator=torch.Generator().manual_seed(1)).to(device)
    target[0, 1] = target[2, 3] = -100
    for with_bias in (False, True):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)[: 2 + with_bias]]
        others = [t.clone().requires_grad_() for t in (hidden, weight, bias)[: 2 + with_bias]]
        named = {"reduction": reduction, "label_smoothing": 0.1 * with_bias}
        got = onepass.linear_cross_entropy(*leaves[:2], target, *leaves[2:], chunk=chunk, engine=engine, **named)
        logits = F.linear(*others)
        want = F.cross_entropy(logits.flatten(0, 1), target.flatten(), **named)
        torch.testing.assert_close(got, want.reshape(got.shape))
        g = make(*got.shape)
        for ours, theirs in zip(
            torch.autograd.grad(got, leaves, g), torch.autograd.grad(want, others, g.reshape(want.shape)), strict=True
        ):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_dtypes(dtype, engine, device):
    make = maker(dtype, device, scale=0.5)
    hidden, weight = make(40, 16).requires_grad_(), make(50, 16).requires_grad_()
    target = torch.randint(0, 50, (40,), device=device)
    loss = onepass.linear_cross_entropy(hidden, weight, target, z_loss=1e-3, softcap=5.0, chunk=16, engine=engine)
    assert loss.dtype is dtype
    a, b = (t.detach().double().requires_grad_() for t in (hidden, weight))
    s = 5 * (F.linear(a, b) / 5).tanh()
    want = F.cross_entropy(s, target) + 1e-3 * s.logsumexp(1).square().mean()
    eps = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(loss.detach().double(), want.detach(), rtol=eps, atol=eps)
    for ours, theirs in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(want, (a, b)), strict=True
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=eps, atol=eps * float(theirs.abs().amax()))


def test_gradients_that_are_not_needed(device):
    make = maker(F32, device)
    hidden, weight, target = make(6, 4), make(5, 4).requires_grad_(), torch.arange(6, device=device) % 5
    loss = onepass.linear_cross_entropy(hidden, weight, target)
    (got,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(got, torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight), target), weight)[0])
    with torch.no_grad():
        assert not onepass.linear_cross_entropy(hidden, weight, target).requires_grad
    loss = onepass.linear_cross_entropy(hidden, weight, target)
    with pytest.raises(RuntimeError, match="its gradient has no gradient"):
        torch.autograd.grad(loss, weight, create_graph=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_retained_graph_has_the_same_gradients_again(reduction, device):
    make = maker(F32, device)
    leaves = hidden, weight, bias = [make(*shape).requires_grad_() for shape in ((6, 4), (5, 4), (5,))]
    target = torch.arange(6, device=device) % 5
    loss = onepass.linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, chunk=4)
    g = make(*loss.shape)
    first = torch.autograd.grad(loss, leaves, g, retain_graph=True)
    kept = [t.clone() for t in first]
    again = torch.autograd.grad(loss, leaves, 2 * g)
    torch.testing.assert_close(list(first), kept, rtol=0, atol=0)
    torch.testing.assert_close(list(again), [2 * t for t in kept])


def test_a_tied_weight_and_accumulated_gradients(device):
    make = maker(F64, device, scale=0.3)
    embedding = make(7, 5).requires_grad_()
    tokens = torch.tensor([0, 3, 6, 1, 2, 5], device=device)
    for _ in range(2):
        onepass.linear_cross_entropy(embedding[tokens], embedding, tokens.roll(-1), chunk=4).backward()
    got, embedding.grad = embedding.grad, None
    F.cross_entropy(embedding[tokens] @ embedding.T, tokens.roll(-1)).backward()
    assert embedding.grad is not None
    torch.testing.assert_close(got, embedding.grad * 2)


def test_no_rows_and_no_row_that_counts(device):
    weight = torch.ones(5, 4, device=device, requires_grad=True)
    nothing = onepass.linear_cross_entropy(
        torch.ones(0, 4, device=device), weight, torch.ones(0, dtype=int, device=device)
    )
    assert nothing.isnan()
    (grad,) = torch.autograd.grad(nothing, weight, torch.ones_like(nothing))
    assert not grad.any()
    target = torch.full((3,), -100, device=device)
    assert onepass.linear_cross_entropy(torch.ones(3, 4, device=device), weight, target).isnan()
    assert onepass.linear_cross_entropy(torch.ones(3, 4, device=device), weight, target, reduction="sum") == 0


def test_under_autocast(device):
    make = maker(F32, device, scale=0.5)
    hidden, weight, target = make(9, 8).requires_grad_(), make(12, 8).requires_grad_(), torch.arange(9, device=device)
    with torch.autocast(device, dtype=BF16):
        loss = onepass.linear_cross_entropy(hidden, weight, target)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert [g.dtype for g in grads] == [F32, F32]
    want = F.cross_entropy(F.linear(hidden, weight), target)
    torch.testing.assert_close(loss.float(), want, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight": torch.zeros(5, 3)}, ValueError, r"hidden \(..., E\) and weight \(C, E\)"),
        ({"weight": torch.zeros(5, 4, dtype=F64)}, TypeError, "tensors of one dtype"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias has the shape \[5\]"),
        ({"target": torch.zeros(2, dtype=torch.int64)}, ValueError, r"target has the shape \[3\]"),
        ({"target": torch.tensor([0, 5, 1])}, IndexError, "class 5 is out of range"),
        ({"reduction": "median"}, ValueError, "reduction must be"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1"),
        ({"label_smoothing": 2.0}, RuntimeError, "between 0.0 and 1.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change, error, words):
    given = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(5, 4), "target": torch.tensor([0, 1, 2]), **change}
    with pytest.raises(error, match=words):
        onepass.linear_cross_entropy(**given)


@pytest.mark.gpu
def test_memory_stays_below_a_tenth_of_the_logits(room):
    rows, classes, width = 8192, 128256, 64
    hidden = torch.randn(rows, width, device="cuda", dtype=BF16, requires_grad=True)
    weight = torch.randn(classes, width, device="cuda", dtype=BF16, requires_grad=True)
    target = torch.randint(0, classes, (rows,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    onepass.linear_cross_entropy(hidden, weight, target).backward()
    assert torch.cuda.max_memory_allocated() - before < 0.1 * rows * classes * 2


SHARDED = """
import os
try:
    os.close(os.open("first", os.O_CREAT | os.O_EXCL))
    rank = 0
except FileExistsError:
    rank = 1
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import onepass
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
torch.manual_seed(0)
weight, bias, hidden, target = torch.randn(8, 5), torch.randn(8), torch.randn(2, 6, 5), torch.randint(0, 8, (2, 6))
mesh = init_device_mesh("cpu", (2,))
shards = [distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (weight, bias)]
whole = [t.clone().requires_grad_() for t in (weight, bias)]
loss = onepass.linear_cross_entropy(hidden[rank], shards[0], target[rank], shards[1])
losses = [onepass.linear_cross_entropy(hidden[r], whole[0], target[r], whole[1]) for r in (0, 1)]
loss.backward()
(sum(losses) / 2).backward()
torch.testing.assert_close(loss, losses[rank])
for shard, all_of_it in zip(shards, whole):
    assert shard.grad.placements == (Shard(0),)
    torch.testing.assert_close(shard.grad.to_local(), all_of_it.grad.chunk(2)[rank])
dist.destroy_process_group()
"""


def test_parameters_that_ranks_share(compilers, tmp_path):
    """Each rank has rows of its own; the gradient of a shard is the mean of all ranks."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    for done in compilers.run(tmp_path, SHARDED, 2):
        assert done.status == 0, done.errors[-2000:]
