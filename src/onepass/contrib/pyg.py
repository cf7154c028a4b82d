"""The softmax of PyTorch Geometric, over the edges that end in a node.

`onepass.patch(pyg=True)` puts it in the place of `torch_geometric.utils.softmax`, wherever that was imported to.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..segments import Segments, segment_softmax

__all__ = ["softmax"]

_MOST_PLANS = 8
# Segments of an index by the memory that it lies in. A reference that is weak keeps the address from another's use.
_plans: "OrderedDict[tuple[Any, ...], tuple[StorageWeakRef, Segments]]" = OrderedDict()


def softmax(
    src: Tensor,
    index: Tensor | Segments | None = None,
    ptr: Tensor | None = None,
    num_nodes: int | None = None,
    dim: int = 0,
) -> Tensor:
    """A softmax over the elements of `src` with the same index, as `torch_geometric.utils.softmax`.

    That divides by the sum plus 1e-16; here it is the sum alone, which is at least 1. So results differ by rounding.

    Args:
        src: a tensor of any shape, float64, float32, float16 or bfloat16.
        index: the node of each element of `dim`, int64 or int32, in any order; or `onepass.Segments` made of it. The
            order of an index is remembered while its memory lives and is not written, for some of the last ones.
        ptr: where the elements of each node begin and where the last ones end, in the place of an index.
        num_nodes: how many nodes an index has; without it, one more than the largest.
        dim: the dim of the elements.

    Returns:
        A tensor of the shape and dtype of `src`.

    Raises:
        NotImplementedError: neither index nor ptr. The other errors are those of `onepass.segment_softmax`.

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
    """The segments of an index, from before if its memory is still the same."""
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
