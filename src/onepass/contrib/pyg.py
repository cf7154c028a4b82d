"""The softmax of PyTorch Geometric, over the edges that end in a node.

`onepass.patch(pyg=True)` replaces `torch_geometric.utils.softmax` by it, in every module that has imported that.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..segments import Segments, segment_softmax

__all__ = ["softmax"]

_MOST_PLANS = 8
# A cache of Segments, by the memory of the index. The weak reference prevents that another storage has the address.
_plans: "OrderedDict[tuple[Any, ...], tuple[StorageWeakRef, Segments]]" = OrderedDict()


def softmax(
    src: Tensor,
    index: Tensor | Segments | None = None,
    ptr: Tensor | None = None,
    num_nodes: int | None = None,
    dim: int = 0,
) -> Tensor:
    """A softmax over the elements of `src` with the same index, as `torch_geometric.utils.softmax`.

    PyG divides by the sum plus 1e-16. This function divides by the sum, which is at least 1, so results differ only by
    rounding.

    Args:
        src: a tensor of any shape, float64, float32, float16 or bfloat16.
        index: the node of each element of `dim`, int64 or int32, in any order; or an `onepass.Segments` made from it.
            The Segments of the last few indices are cached, each until the memory of its index is freed or written.
        ptr: the offsets of the nodes, in place of an index: where the elements of each node begin and the last ones
            end.
        num_nodes: the number of nodes of an index; without it, the largest index plus one.
        dim: the dim of the elements.

    Returns:
        A tensor of the shape and dtype of `src`.

    Raises:
        NotImplementedError: neither index nor ptr is given. Also the errors of `onepass.segment_softmax`.

    >>> import torch
    >>> from onepass.contrib import pyg
    >>> pyg.softmax(torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([1, 0, 1, 2]))
    tensor([0.5000, 1.0000, 0.5000, 1.0000])
    """
    if ptr is not None:
        return segment_softmax(src, ptr, dim)
    if index is None:
        raise NotImplementedError("onepass.contrib.pyg.softmax(): needs an index, or ptr")
    return segment_softmax(src, index if isinstance(index, Segments) else _segments(index, num_nodes), dim)


def _segments(index: Tensor, num_nodes: int | None) -> Segments:
    """The Segments of an index, from the cache if its memory is unchanged."""
    if torch.compiler.is_compiling() or not isinstance(index, Tensor) or index.is_inference():
        return Segments(index, num_nodes)
    storage = index.untyped_storage()
    where = index.storage_offset(), index.shape, index.stride(), index.dtype
    key = storage._cdata, index._version, num_nodes, *where
    if key in _plans and not _plans[key][0].expired():
        _plans.move_to_end(key)
        return _plans[key][1]
    made = Segments(index, num_nodes)
    _plans[key] = StorageWeakRef(storage), made
    if len(_plans) > _MOST_PLANS:
        _plans.popitem(last=False)
    return made
