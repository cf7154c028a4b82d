"""The edge_softmax of DGL: a softmax over the edges that begin or end in each node."""

from typing import Any

from torch import Tensor

from ..segments import Segments, segment_softmax

__all__ = ["edge_softmax"]

_ALL = "__ALL__"  # the value of dgl.base.ALL


def edge_softmax(graph: Any, logits: Tensor, eids: Any = _ALL, norm_by: str = "dst") -> Tensor:
    """A softmax over the edges of each node, as `dgl.nn.functional.edge_softmax`.

    Args:
        graph: a `dgl.DGLGraph` with edges of one type, or another object with its methods `edges`, `find_edges`,
            `num_dst_nodes` and `num_src_nodes`.
        logits: the scores of the edges, (edges, ...), in the order of their ids.
        eids: a tensor with the ids of the edges that take part; all edges by default.
        norm_by: "dst" for a softmax over the edges that end in a node, "src" for the edges that begin there.

    Returns:
        A tensor of the shape and dtype of `logits`.

    Raises:
        ValueError: another `norm_by`, or not as many logits as edges. NotImplementedError: logits of several types of
        edges. Also the errors of `onepass.segment_softmax`.

    >>> import torch
    >>> from onepass.contrib import dgl
    >>> class Graph:  # of two nodes
    ...     num_dst_nodes = num_src_nodes = lambda self: 2
    ...     edges = lambda self, form, order: (torch.tensor([0, 1, 0]), torch.tensor([1, 0, 1]))
    >>> dgl.edge_softmax(Graph(), torch.zeros(3, 1)).flatten()
    tensor([0.5000, 1.0000, 0.5000])
    """
    if norm_by not in ("dst", "src"):
        raise ValueError(f"onepass.contrib.dgl.edge_softmax(): norm_by must be 'dst' or 'src', got {norm_by!r}")
    if not isinstance(logits, Tensor):
        raise NotImplementedError("onepass.contrib.dgl.edge_softmax(): takes logits of one type of edges, a Tensor")
    ends = graph.edges(form="uv", order="eid") if isinstance(eids, str) and eids == _ALL else graph.find_edges(eids)
    by_dst = norm_by == "dst"
    nodes = graph.num_dst_nodes() if by_dst else graph.num_src_nodes()
    return segment_softmax(logits, Segments(ends[1 if by_dst else 0], nodes))
