"""The functions as modules, in the place of torch.nn's and Megatron's: no state, picklable."""

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
    """A call of a function whose arguments are attributes, those that are not the default ones in the repr."""

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
    """`onepass.softmax` over `dim` as a module, in the place of `torch.nn.Softmax`.

    Args:
        dim, dtype, engine: as `onepass.softmax` takes them. Without a dim it is the last one; torch.nn.Softmax guesses
            one, with a warning.

    A call takes a tensor of any shape and gives one of its shape, of its dtype or `dtype`. Errors are those of
    `onepass.softmax`, at the call.

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
    """`onepass.log_softmax` over `dim` as a module, in the place of `torch.nn.LogSoftmax`. As `Softmax` in all else.

    >>> import torch, onepass
    >>> onepass.nn.LogSoftmax(dim=0)(torch.zeros(3, 4))[0]
    tensor([-1.0986, -1.0986, -1.0986, -1.0986])
    """

    _function = staticmethod(functional.log_softmax)


class Softmin(_Family):
    """`onepass.softmin` over `dim` as a module, in the place of `torch.nn.Softmin`. As `Softmax` in all else.

    >>> import torch, onepass
    >>> onepass.nn.Softmin()(torch.tensor([0.0, 0.0, torch.inf]))
    tensor([0.5000, 0.5000, 0.0000])
    """

    _function = staticmethod(functional.softmin)


class LogSumExp(_Module):
    """`onepass.logsumexp` over `dim` as a module; torch.nn has none.

    Args:
        dim, keepdim, engine: as `onepass.logsumexp` takes them.

    A call takes a tensor of any shape and gives one of its dtype, without the reduced dims or with size 1 there. Errors
    are those of `onepass.logsumexp`, at the call.

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
    """`onepass.softmax` of scores as a module, in the place of Megatron's and Transformer Engine's
    `FusedScaleMaskSoftmax`: "scaled", "scaled masked" and "scaled upper triang masked" softmax, of any shape.

    Args:
        scale: what the input is multiplied by; None is 1.
        attn_mask_type: "padding", "causal", "padding_causal" or "no_mask", or a member of Megatron's `AttnMaskType` so
            named. All but "no_mask" take a mask; the causal ones also hide the keys after a query, the last query
            being that of the last key.
        softmax_in_fp32: taken as Megatron has it. Half types are computed in float32 in either case, and rounded once.
        engine: as `onepass.softmax` takes it.

    A call takes a tensor of the shape (batch, heads, queries, keys), or any of at least two dims whose last is reduced;
    a bool mask that broadcasts to it, or None, True where an element is MASKED OUT (`mask=` of `onepass.softmax` is the
    other way round); and `softmax_offset`, None or one value per head: the logit of a sink. It gives a tensor of the
    input's shape and dtype. A row with everything masked out is 0.

    Raises ValueError for an unknown `attn_mask_type`, or a mask with "no_mask"; TypeError for a mask that is not bool.
    Other errors are those of `onepass.softmax`, at the call. Megatron's `mask_func` has no place: what is masked out
    has the score -inf, and takes no part whatever the input holds there.

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
    """`onepass.cross_entropy` as a module, in the place of `torch.nn.CrossEntropyLoss`.

    Args:
        weight: as `onepass.cross_entropy` takes it; a buffer of the module.
        ignore_index, reduction, label_smoothing, z_loss, softcap, inplace_backward, check, empty, engine: as
            `onepass.cross_entropy` takes them.

    A call takes logits and classes, or probabilities of classes. Errors are those of `onepass.cross_entropy`, at the
    call.

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
    """`onepass.linear_cross_entropy` as a module without parameters: a call takes (hidden, weight, target, bias=None),
    so that the weight may be tied to that of an embedding.

    Args:
        ignore_index, reduction, label_smoothing, z_loss, softcap, chunk, engine: as `onepass.linear_cross_entropy`
            takes them, whose errors a call has.

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
    """`onepass.log_prob` of the dim `dim` as a module. Args and errors: those of `onepass.log_prob`.

    >>> import torch, onepass
    >>> onepass.nn.LogProb()(torch.zeros(2, 8), torch.tensor([3, 5]))
    tensor([-2.0794, -2.0794])
    """

    def forward(self, input: Tensor, index: Tensor) -> Any:
        return losses.log_prob(
            input, index, self.dim, temperature=self.temperature, dtype=self.dtype, engine=self.engine
        )


class Entropy(_OfClasses):
    """`onepass.entropy` over `dim` as a module. Args and errors: those of `onepass.entropy`.

    >>> import torch, onepass
    >>> onepass.nn.Entropy()(torch.zeros(2, 8))
    tensor([2.0794, 2.0794])
    """

    def forward(self, input: Tensor) -> Tensor:
        return losses.entropy(input, self.dim, temperature=self.temperature, dtype=self.dtype, engine=self.engine)


class KLDiv(_Module):
    """`onepass.kl_div` over `dim` as a module. Args and errors: those of `onepass.kl_div`.

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
    """`onepass.segment_softmax` as a module. A call takes x, and offsets or `index=` and `num_segments=` or `lengths=`.

    Args:
        dim, scale, dtype, engine: as `onepass.segment_softmax` takes them, whose errors come at the call.

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
