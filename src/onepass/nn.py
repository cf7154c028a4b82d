"""The functions as modules that replace those of torch.nn and Megatron. They have no state and can be pickled."""

from typing import Any

import torch
from torch import Tensor

from . import functional, losses
from .attention import functional_attention, register_hf_attention
from .linear_loss import linear_cross_entropy
from .segments import Segments, segment_softmax

__all__ = [
    "CrossEntropyLoss",
    "Entropy",
    "KLDiv",
    "LinearCrossEntropyLoss",
    "LogProb",
    "LogSoftmax",
    "LogSumExp",
    "ScaledMaskedSoftmax",
    "SegmentSoftmax",
    "Softmax",
    "Softmin",
    "functional_attention",
    "register_hf_attention",
]
_MASK_TYPES = ("no_mask", "padding", "causal", "padding_causal")


class _Module(torch.nn.Module):
    """A module whose attributes are the arguments of a function. The repr shows those that differ from the defaults."""

    def extra_repr(self) -> str:
        given = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "training"}
        default: dict[str, Any] = {
            "dtype": None,
            "engine": "auto",
            "keepdim": False,
            "scale": None,
            "softmax_in_fp32": True,
        }
        default |= {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None}
        default |= {"inplace_backward": False, "check": False, "empty": "nan", "temperature": None, "chunk": None}
        return ", ".join(f"{name}={value}" for name, value in given.items() if value != default.get(name, ...))


class _Family(_Module):
    _function: Any

    def __init__(self, dim: functional.Dim = -1, *, dtype: torch.dtype | None = None, engine: str = "auto") -> None:
        super().__init__()
        self.dim, self.dtype, self.engine = dim, dtype, engine

    def forward(self, input: Tensor) -> Tensor:
        return self._function(input, self.dim, self.dtype, engine=self.engine)


class Softmax(_Family):
    """`onepass.softmax` over `dim` as a module, to replace `torch.nn.Softmax`.

    Args:
        dim, dtype, engine: as `onepass.softmax` takes them. The default dim is the last one; torch.nn.Softmax guesses
            one, with a warning.

    A call takes a tensor of any shape. It returns a tensor of that shape, of the dtype `dtype` or else the input's. A
    call raises the errors of `onepass.softmax`.

    >>> import torch, onepass
    >>> onepass.nn.Softmax(dim=1)(torch.zeros(2, 4))[0]
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    >>> torch.nn.Sequential(torch.nn.Linear(8, 4), onepass.nn.Softmax(dtype=torch.float32))
    Sequential(
      (0): Linear(in_features=8, out_features=4, bias=True)
      (1): Softmax(dim=-1, dtype=torch.float32)
    )
    """

    _function = staticmethod(functional.softmax)


class LogSoftmax(_Family):
    """`onepass.log_softmax` over `dim` as a module, to replace `torch.nn.LogSoftmax`. All else is as in `Softmax`.

    >>> import torch, onepass
    >>> onepass.nn.LogSoftmax(dim=0)(torch.zeros(3, 4))[0]
    tensor([-1.0986, -1.0986, -1.0986, -1.0986])
    """

    _function = staticmethod(functional.log_softmax)


class Softmin(_Family):
    """`onepass.softmin` over `dim` as a module, to replace `torch.nn.Softmin`. All else is as in `Softmax`.

    >>> import torch, onepass
    >>> onepass.nn.Softmin()(torch.tensor([0.0, 0.0, torch.inf]))
    tensor([0.5000, 0.5000, 0.0000])
    """

    _function = staticmethod(functional.softmin)


class LogSumExp(_Module):
    """`onepass.logsumexp` over `dim` as a module; torch.nn has none.

    Args:
        dim, keepdim, engine: as `onepass.logsumexp` takes them.

    A call takes a tensor of any shape. It returns a tensor of the same dtype, without the reduced dims or with size 1
    there. A call raises the errors of `onepass.logsumexp`.

    >>> import torch, onepass
    >>> onepass.nn.LogSumExp(dim=1)(torch.zeros(2, 10))
    tensor([2.3026, 2.3026])
    """

    def __init__(self, dim: functional.Dim, keepdim: bool = False, *, engine: str = "auto") -> None:
        super().__init__()
        self.dim, self.keepdim, self.engine = dim, keepdim, engine

    def forward(self, input: Tensor) -> Tensor:
        return functional.logsumexp(input, self.dim, self.keepdim, engine=self.engine)


class ScaledMaskedSoftmax(_Module):
    """`onepass.softmax` of scores as a module, to replace `FusedScaleMaskSoftmax` of Megatron and Transformer Engine:
    "scaled", "scaled masked" and "scaled upper triang masked" softmax, of any shape.

    Args:
        scale: a factor of the input; None is 1.
        attn_mask_type: "padding", "causal", "padding_causal" or "no_mask", or the member of Megatron's `AttnMaskType`
            of that name. All but "no_mask" take a mask. The causal ones also hide the keys after a query; the last
            query is aligned with the last key.
        softmax_in_fp32: accepted because Megatron has it. Half types are always computed in float32 and rounded once.
        engine: as `onepass.softmax` takes it.

    A call takes a tensor of the shape (batch, heads, queries, keys), or any with at least two dims, and reduces the
    last dim. `mask` is None or a bool tensor that broadcasts to the input, True where an element is MASKED OUT (the
    opposite of `mask=` of `onepass.softmax`). `softmax_offset` is None or has one value per head: the logit of a sink.
    The result has the input's shape and dtype. A row with everything masked out is 0.

    Raises ValueError for an unknown `attn_mask_type`, or a mask with "no_mask"; TypeError for a mask that is not bool.
    A call also raises the errors of `onepass.softmax`. There is no `mask_func` as in Megatron: a masked-out element has
    the score -inf, whatever the input holds there.

    >>> import torch, onepass
    >>> softmax = onepass.nn.ScaledMaskedSoftmax(scale=0.125, attn_mask_type="causal")
    >>> softmax
    ScaledMaskedSoftmax(scale=0.125, attn_mask_type=causal)
    >>> softmax(torch.zeros(1, 1, 2, 2), None)[0, 0]
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    >>> onepass.nn.ScaledMaskedSoftmax()(torch.zeros(2, 3), torch.tensor([False, False, True]))[0]
    tensor([0.5000, 0.5000, 0.0000])
    """

    def __init__(
        self,
        scale: float | None = None,
        attn_mask_type: Any = "padding",
        softmax_in_fp32: bool = True,
        *,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        name = getattr(attn_mask_type, "name", attn_mask_type)
        if name not in _MASK_TYPES:
            raise ValueError(f"ScaledMaskedSoftmax: attn_mask_type must be one of {_MASK_TYPES}, got {name!r}")
        self.scale, self.attn_mask_type, self.softmax_in_fp32, self.engine = scale, name, softmax_in_fp32, engine

    def forward(self, input: Tensor, mask: Tensor | None = None, softmax_offset: Tensor | None = None) -> Tensor:
        if mask is not None and self.attn_mask_type == "no_mask":
            raise ValueError("ScaledMaskedSoftmax: attn_mask_type='no_mask' takes no mask, got one")
        if mask is not None and mask.dtype is not torch.bool:
            raise TypeError(f"ScaledMaskedSoftmax: mask must be of torch.bool, True where masked out, got {mask.dtype}")
        return functional.softmax(
            input,
            -1,
            scale=self.scale,
            mask=None if mask is None else ~mask,
            causal="causal" in self.attn_mask_type,
            sink=None if softmax_offset is None else softmax_offset.view(-1, 1, 1),
            empty="zero",
            engine=self.engine,
        )


class CrossEntropyLoss(_Module):
    """`onepass.cross_entropy` as a module, to replace `torch.nn.CrossEntropyLoss`.

    Args:
        weight: as `onepass.cross_entropy` takes it; a buffer of the module.
        ignore_index, reduction, label_smoothing, z_loss, softcap, inplace_backward, check, empty, engine: as
            `onepass.cross_entropy` takes them.

    A call takes logits, and classes or class probabilities. It raises the errors of `onepass.cross_entropy`.

    >>> import torch, onepass
    >>> loss = onepass.nn.CrossEntropyLoss(label_smoothing=0.1)
    >>> loss
    CrossEntropyLoss(label_smoothing=0.1)
    >>> loss(torch.zeros(2, 8), torch.tensor([3, 5]))
    tensor(2.0794)
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        inplace_backward: bool = False,
        check: bool = False,
        empty: str = "nan",
        engine: str = "auto",
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss, self.softcap, self.inplace_backward, self.check = z_loss, softcap, inplace_backward, check
        self.empty, self.engine = empty, engine

    def forward(self, input: Tensor, target: Tensor) -> Any:
        given = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "training"}
        return losses.cross_entropy(input, target, self.weight, **given)


class LinearCrossEntropyLoss(_Module):
    """`onepass.linear_cross_entropy` as a module without parameters. A call takes (hidden, weight, target, bias=None),
    so that the weight may be tied to an embedding's. It raises the errors of `onepass.linear_cross_entropy`.

    Args:
        ignore_index, reduction, label_smoothing, z_loss, softcap, chunk, engine: as `onepass.linear_cross_entropy`
            takes them.

    >>> import torch, onepass
    >>> loss = onepass.nn.LinearCrossEntropyLoss(chunk=2)
    >>> loss
    LinearCrossEntropyLoss(chunk=2)
    >>> loss(torch.ones(4, 8), torch.zeros(10, 8), torch.tensor([0, 1, 2, 3]))
    tensor(2.3026)
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        chunk: int | None = None,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss, self.softcap, self.chunk, self.engine = z_loss, softcap, chunk, engine

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        given = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "training"}
        return linear_cross_entropy(hidden, weight, target, bias, **given)


class _OfClasses(_Module):
    def __init__(
        self,
        dim: int = -1,
        *,
        temperature: float | None = None,
        dtype: torch.dtype | None = None,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        self.dim, self.temperature, self.dtype, self.engine = dim, temperature, dtype, engine


class LogProb(_OfClasses):
    """`onepass.log_prob` over `dim` as a module, with the arguments and errors of `onepass.log_prob`.

    >>> import torch, onepass
    >>> onepass.nn.LogProb()(torch.zeros(2, 8), torch.tensor([3, 5]))
    tensor([-2.0794, -2.0794])
    """

    def forward(self, input: Tensor, index: Tensor) -> Any:
        return losses.log_prob(
            input, index, self.dim, temperature=self.temperature, dtype=self.dtype, engine=self.engine
        )


class Entropy(_OfClasses):
    """`onepass.entropy` over `dim` as a module, with the arguments and errors of `onepass.entropy`.

    >>> import torch, onepass
    >>> onepass.nn.Entropy()(torch.zeros(2, 8))
    tensor([2.0794, 2.0794])
    """

    def forward(self, input: Tensor) -> Tensor:
        return losses.entropy(input, self.dim, temperature=self.temperature, dtype=self.dtype, engine=self.engine)


class KLDiv(_Module):
    """`onepass.kl_div` over `dim` as a module, with the arguments and errors of `onepass.kl_div`.

    >>> import torch, onepass
    >>> onepass.nn.KLDiv()(torch.tensor([[2.0, 0.0, 1.0]]), torch.zeros(1, 3))
    tensor([0.2662])
    """

    def __init__(
        self,
        dim: int = -1,
        *,
        temperature: float | None = None,
        reduction: str = "none",
        dtype: torch.dtype | None = None,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        self.dim, self.temperature, self.reduction, self.dtype, self.engine = dim, temperature, reduction, dtype, engine

    def forward(self, p_logits: Tensor, q_logits: Tensor) -> Tensor:
        given = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "training"}
        return losses.kl_div(p_logits, q_logits, **given)


class SegmentSoftmax(_Module):
    """`onepass.segment_softmax` as a module. A call takes x, and offsets, or `index=` (and `num_segments=`), or
    `lengths=`. It raises the errors of `onepass.segment_softmax`.

    Args:
        dim, scale, dtype, engine: as `onepass.segment_softmax` takes them.

    >>> import torch, onepass
    >>> onepass.nn.SegmentSoftmax()(torch.zeros(3), torch.tensor([0, 1, 3]))
    tensor([1.0000, 0.5000, 0.5000])
    """

    def __init__(
        self, dim: int = 0, *, scale: float | None = None, dtype: torch.dtype | None = None, engine: str = "auto"
    ) -> None:
        super().__init__()
        self.dim, self.scale, self.dtype, self.engine = dim, scale, dtype, engine

    def forward(self, x: Tensor, offsets: Tensor | Segments | None = None, **segments: Any) -> Tensor:
        given = {"scale": self.scale, "dtype": self.dtype, "engine": self.engine, **segments}
        return segment_softmax(x, offsets, self.dim, **given)
