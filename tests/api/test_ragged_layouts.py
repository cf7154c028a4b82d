"""torch's own rows of unequal length: jagged nested tensors and sparse rows."""

import warnings

import pytest
import torch

import onepass
from lib.support import DTYPES, maker, same

F32, F64, *_ = DTYPES
INF = torch.inf


@pytest.mark.parametrize("turned", [False, True])
def test_jagged_tensors(turned, function, engine, device):
    parts = [maker(F64, device, k)(n, 4).requires_grad_() for k, n in enumerate((3, 1, 6))]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    nested = nested.transpose(1, 2) if turned else nested
    ours, theirs = getattr(onepass, function), getattr(torch, function, torch.nn.functional.softmin)
    for dim in (1, 2, -1):
        got = ours(nested, dim, engine=engine)
        each = got.unbind()
        wanted = [theirs(part.t() if turned else part, dim if dim < 0 else dim - 1) for part in parts]
        for mine, want in zip(each, wanted, strict=True):
            torch.testing.assert_close(mine, want)
        if got.is_nested:
            assert got.layout is torch.jagged
            assert got.offsets() is nested.offsets()
        grads = torch.autograd.grad(sum(y.sin().sum() for y in each), parts, retain_graph=True)
        wants = torch.autograd.grad(sum(y.sin().sum() for y in wanted), parts, retain_graph=True)
        torch.testing.assert_close(grads, wants)
    with pytest.raises(NotImplementedError, match="the batch"):
        ours(nested, 0)
    with pytest.raises(NotImplementedError, match="takes one dim"):
        ours(nested, (1, 2))
    with pytest.raises(NotImplementedError, match="takes no scale="):
        ours(nested, 1, scale=2.0)
    with pytest.raises(NotImplementedError, match="nested"):
        onepass.state(nested, 1)


def test_jagged_tensors_with_gaps(device):
    values = maker(F32, device)(9, 2)
    offsets, lengths = (torch.tensor(t, device=device) for t in ([0, 3, 5, 9], [2, 0, 4]))
    nested = torch.nested.nested_tensor_from_jagged(values, offsets, lengths)
    got = onepass.softmax(nested, 1).unbind()
    for a, n, mine in zip((0, 3, 5), (2, 0, 4), got, strict=True):
        torch.testing.assert_close(mine, values[a : a + n].softmax(0))
    torch.testing.assert_close(onepass.logsumexp(nested, 1, True)[2], values[5:9].logsumexp(0, True))


@pytest.mark.parametrize("dense", [(), (2,)])
def test_sparse_rows(dense, function, engine, device):
    rows = torch.tensor([0, 2, 2, 5], device=device)
    columns = torch.tensor([0, 3, 1, 2, 3], device=device)
    values = maker(F64, device)(5, *dense).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.sparse_csr_tensor(rows, columns, values, (3, 4, *dense))
    ours, theirs = getattr(onepass, function), getattr(torch, function, torch.nn.functional.softmin)
    got = ours(x, 1, engine=engine)
    parts = [values[:2], values[5:], values[2:]]
    if function == "logsumexp":
        assert same(got[1], torch.full(dense, -INF, dtype=F64, device=device))
        torch.testing.assert_close(got[[0, 2]], torch.stack([parts[0].logsumexp(0), parts[2].logsumexp(0)]))
    else:
        assert got.layout is torch.sparse_csr
        assert torch.equal(got.col_indices(), columns)
        want = torch.cat([theirs(part, 0) for part in parts])
        torch.testing.assert_close(got.values(), want)
        g = torch.randn_like(want)
        torch.testing.assert_close(torch.autograd.grad(got.values(), values, g), torch.autograd.grad(want, values, g))
    if dense and function != "logsumexp":
        torch.testing.assert_close(ours(x, 2).values(), theirs(values, 1))
    with pytest.raises(NotImplementedError, match="the rows"):
        ours(x, 0)
