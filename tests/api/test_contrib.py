"""The functions with the signatures of PyTorch Geometric and DGL, and patch(pyg=True) with torch_geometric itself."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from lib.losses import assert_close
from lib.support import maker, same
from onepass.contrib import dgl, pyg


def expected(src: Tensor, index: Tensor, nodes: int, dim: int = 0) -> Tensor:
    """PyG's arithmetic, in float64."""
    src = src.double().movedim(dim, 0)
    at = index.long().reshape(-1, *[1] * (src.dim() - 1)).expand_as(src)
    top = src.new_zeros(nodes, *src.shape[1:]).scatter_reduce(0, at, src, "amax", include_self=False)
    e = (src - top.gather(0, at)).exp()
    total = src.new_zeros(nodes, *src.shape[1:]).scatter_add(0, at, e) + 1e-16
    return (e / total.gather(0, at)).movedim(0, dim)


@pytest.mark.parametrize("indices", [torch.int32, torch.int64], ids=str)
def test_the_softmax_of_pyg(indices, dtype, device):
    make = maker(dtype, device)
    index = torch.randint(0, 40, (200,), generator=torch.Generator().manual_seed(1)).to(indices).to(device)
    for src, dim in ((make(200), 0), (make(200, 4), 0), (make(3, 200), 1), (make(2, 200, 3), -2)):
        want = expected(src, index, 50, dim)
        assert_close(pyg.softmax(src, index, num_nodes=50, dim=dim), want, dtype)
        assert_close(pyg.softmax(src, index, dim=dim), want, dtype)
        assert same(pyg.softmax(src, onepass.Segments(index), dim=dim), pyg.softmax(src, index, dim=dim))
        ordered = index.sort().values
        ptr = torch.searchsorted(ordered, torch.arange(51, device=device, dtype=indices)).to(indices)
        assert_close(pyg.softmax(src, ptr=ptr, dim=dim), expected(src, ordered, 50, dim), dtype)
    with pytest.raises(NotImplementedError, match="needs an index, or ptr"):
        pyg.softmax(make(3))


def test_an_index_is_sorted_again_once_it_is_written(device):
    index = torch.tensor([1, 0, 1, 2], device=device)
    src = torch.zeros(4, device=device)
    for _ in range(2):
        assert pyg.softmax(src, index).tolist() == [0.5, 1, 0.5, 1]
    assert pyg._segments(index, None) is pyg._segments(index[:], None)
    assert pyg._segments(index, None) is not pyg._segments(index[1:], None)
    index[3] = 0
    assert pyg.softmax(src, index).tolist() == [0.5, 0.5, 0.5, 0.5]
    for _ in range(20):  # memory that is used again
        other = torch.randint(0, 9, (4,), device=device)
        assert_close(pyg.softmax(src, other), expected(src, other, 9), torch.float32)
        del other
    with torch.inference_mode():
        assert pyg.softmax(src, torch.tensor([0, 0, 1, 1], device=device)).tolist() == [0.5] * 4


def graph_of(source: Tensor, target: Tensor, sources: int, targets: int) -> Any:
    """What edge_softmax asks of a graph of DGL."""
    ends = source, target
    return SimpleNamespace(
        edges=lambda form, order: ends,
        find_edges=lambda eids: (source[eids], target[eids]),
        num_src_nodes=lambda: sources,
        num_dst_nodes=lambda: targets,
    )


def test_the_edge_softmax_of_dgl(dtype, device):
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(0, n, (90,), generator=generator).to(device) for n in (12, 7))
    graph, logits = graph_of(source, target, 12, 7), maker(dtype, device)(90, 3)
    assert_close(dgl.edge_softmax(graph, logits), expected(logits, target, 7), dtype)
    assert_close(dgl.edge_softmax(graph, logits, norm_by="src"), expected(logits, source, 12), dtype)
    eids = torch.tensor([5, 3, 80, 4, 44], device=device)
    assert_close(dgl.edge_softmax(graph, logits[:5], eids), expected(logits[:5], target[eids], 7), dtype)
    with pytest.raises(ValueError, match="norm_by must be"):
        dgl.edge_softmax(graph, logits, norm_by="both")
    with pytest.raises(NotImplementedError, match="one type of edges"):
        dgl.edge_softmax(graph, {"a": logits})


def test_patch_without_torch_geometric(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(ImportError, match="torch_geometric"):
        onepass.patch(pyg=True)
    with pytest.raises(TypeError, match="pyg must be a bool"):
        onepass.patch(pyg=1)


@pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_patched_layers_have_the_same_outputs(kind):
    utils = pytest.importorskip("torch_geometric.utils", reason="needs torch_geometric")
    conv = importlib.import_module("torch_geometric.nn")
    torch.manual_seed(0)
    edges, x = torch.randint(0, 60, (2, 500)), torch.randn(60, 16)
    layer = getattr(conv, kind)(16, 8, heads=4)
    theirs = utils.softmax

    def outputs() -> tuple[Tensor, ...]:
        y = layer(x, edges)
        return y, *torch.autograd.grad(y.square().sum(), layer.parameters())

    before = outputs()
    with onepass.patch(pyg=True), onepass.patch(pyg=True):
        assert utils.softmax is pyg.softmax
        after = outputs()
    assert utils.softmax is theirs
    for mine, want in zip(after, before, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4)
