"""Attention that can return its probabilities: two matrix products with a softmax of scores between them."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from .functional import softmax
from .scores import ScoreOptions

__all__ = ["functional_attention", "register_hf_attention"]


def functional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    return_probabilities: bool = False,
    engine: str = "auto",
    **scores: Unpack[ScoreOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scores of q k^T) v, with the probabilities in memory, for users who need the probabilities, or scores
    that a fused kernel lacks. Otherwise `torch.nn.functional.scaled_dot_product_attention` is faster.

    Args:
        q, k, v: floating tensors of the shapes (..., heads, queries, e), (..., heads, keys, e), (..., heads, keys, ev),
            of one dtype and device.
        dropout_p: the share of the probabilities that are set to 0; the rest are scaled up. It applies in evaluation
            too.
        enable_gqa: whether k and v may have fewer heads than q. Neighbouring heads of q then share a head of k and v,
            which are not copied.
        return_probabilities: whether to return (result, probabilities). The probabilities are those after the dropout.
        engine: as `onepass.softmax` takes it.
        scores: as `onepass.softmax` takes them (docs/scores.md), for an input of the shape (..., heads, queries, keys).
            The default scale is 1 / sqrt(e). `causal` aligns the last query with the last key. With `offset=0` it
            aligns the first query with the first key, as `is_causal` of `scaled_dot_product_attention` does.

    Returns:
        A tensor of the shape (..., heads, queries, ev). With `return_probabilities` also a tensor of the shape
        (..., heads, queries, keys).

    Raises:
        ValueError: the heads of q are no multiple of the heads of k. Also the errors of `torch.matmul` and
        `onepass.softmax`.

    Source: Vaswani et al., "Attention is all you need" (arXiv:1706.03762). Grouped heads are from Ainslie et al.
    (arXiv:2305.13245).

    >>> import torch, onepass
    >>> q, k, v = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8), torch.ones(1, 2, 3, 5)
    >>> y, p = onepass.nn.functional_attention(q, k, v, causal=True, enable_gqa=True, return_probabilities=True)
    >>> y.shape, p[0, 0]
    (torch.Size([1, 4, 3, 5]), tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]]))
    """
    if scores.get("scale") is None:
        scores["scale"] = q.size(-1) ** -0.5
    groups = q.size(-3) // max(k.size(-3), 1) if enable_gqa else 1
    if enable_gqa and k.size(-3) * groups != q.size(-3):
        heads = f"got {q.size(-3)} and {k.size(-3)}"
        raise ValueError(f"onepass.functional_attention(): the heads of q are a multiple of those of k, {heads}")
    # The heads of a group become more queries of one head, so that k and v need not be repeated.
    s = _ungroup(_group(q, groups) @ k.mT, groups)
    p = softmax(s, -1, engine=engine, **scores)
    if dropout_p:
        p = torch.nn.functional.dropout(p, dropout_p)
    y = _ungroup(_group(p.to(v.dtype), groups) @ v, groups)
    return (y, p) if return_probabilities else y


def _group(t: Tensor, groups: int) -> Tensor:
    return t if groups == 1 else t.unflatten(-3, (-1, groups)).flatten(-3, -2)


def _ungroup(t: Tensor, groups: int) -> Tensor:
    return t if groups == 1 else t.unflatten(-2, (groups, -1)).flatten(-4, -3)


def register_hf_attention(name: str = "onepass") -> None:
    """Registers `functional_attention` with Hugging Face transformers, for models that are made with
    `attn_implementation=name`. It supports what "eager" supports: padding and sliding windows, grouped heads, Gemma's
    softcap, the sinks of gpt-oss, position biases and dropout. It returns the probabilities.

    Masks are boolean and take a quarter to half of the memory of eager's. A query that sees no key, such as padding,
    has the probabilities 0.

    Raises:
        ImportError: transformers is not installed, or has no `AttentionMaskInterface` (it came with 4.53).

    >>> import onepass
    >>> onepass.nn.register_hf_attention()  # doctest: +SKIP
    >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="onepass")  # doctest: +SKIP
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, _hf_attention)
    AttentionMaskInterface.register(name, _hf_mask)


def _hf_mask(*given: Any, **named: Any) -> Tensor | None:
    """The mask, True where an element takes part. A mask is also made for attention that is only causal."""
    from transformers.masking_utils import sdpa_mask

    mask: Tensor | None = sdpa_mask(*given, **{**named, "allow_is_causal_skip": False})
    return mask


def _hf_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The function that transformers calls. Returns the result as (batch, queries, heads, e), and the probabilities."""
    bias, mask = position_bias, attention_mask
    if mask is not None:
        mask = mask[..., : key.size(-2)]
        if mask.dtype is not torch.bool:
            bias, mask = (mask if bias is None else bias + mask), None
    y, p = functional_attention(
        query,
        key,
        value,
        scale=scaling,
        bias=bias,
        mask=mask,
        softcap=softcap,
        sink=None if s_aux is None else s_aux.view(-1, 1, 1),
        empty="zero",
        dropout_p=dropout if module.training else 0.0,
        enable_gqa=True,
        return_probabilities=True,
    )
    return y.transpose(1, 2).contiguous(), p
