"""The suite `losses`: cross-entropy, log-probabilities with the entropy, cross-entropy with probabilities and the KL
divergence, forward and with the backward.

Its limit is one read of the logits, or with the backward two reads and a write; the same for losses of two tensors. It
is measured by a copy of as many bytes. Every call is compared with the float64 definition before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass.tools.bench.cases import ITEMSIZE, Case, Shape
from onepass.tools.bench.correctness import TOLERANCE
from onepass.tools.bench.provider import Provider, move_bytes
from onepass.tools.bench.registry import registry
from onepass.tools.bench.suite_runner import Call, SuiteRunner

SUITE = "losses"
DIRECTIONS = ("forward", "forward and backward")
# Rows and classes: the vocabularies of language models, even and odd, and the classes of images, of segmentation maps
SHAPES: dict[str, Sequence[tuple[Shape, str]]] = {
    "cuda": (
        *(((8192, n), "bfloat16") for n in (128256, 50257, 151643, 128257)),
        *(((4096, n), "float32") for n in (128256, 50257)),
        *(((65536, 1000), dtype) for dtype in ("bfloat16", "float32")),
        ((32768, 4099), "float16"),
        ((1 << 20, 64), "bfloat16"),
        ((1 << 22, 19), "bfloat16"),
        ((64, 128256), "float32"),
        ((16, 21, 512, 512), "bfloat16"),
        ((64, 1000, 1024), "float32"),
    ),
    "cpu": tuple(
        (shape, dtype)
        for shape in ((1024, 32000), (256, 50257), (8192, 1000), (65536, 64), (4, 21, 256, 256))
        for dtype in ("float32", "bfloat16")
    ),
}
_LOG_PROB, _SHARES, _KL = "log_prob and entropy", "cross_entropy with probabilities", "kl_div"
# For each function, how many tensors of the logits' size are read or written, in the forward and in all. The KL
# divergence computes both gradients.
MOVES = {"cross_entropy": (1, 3), _LOG_PROB: (1, 3), _SHARES: (2, 5), _KL: (2, 6)}


class LossCase(Case):
    """A shape, whose dim 1 has the classes. `function` is one of MOVES."""

    @property
    def moves(self) -> int:
        return MOVES[self.function][self.direction != DIRECTIONS[0]]

    def bytes(self, dtype: str) -> int:
        return prod(self.shape) * ITEMSIZE[dtype] * self.moves


def cases(kind: str, dtypes: Sequence[str] = ()) -> list[Case]:
    """The cases of a device type."""
    made: list[Case] = []
    for function in MOVES:
        for direction in DIRECTIONS:
            for k, (shape, dtype) in enumerate(SHAPES[kind]):
                if MOVES[function][0] > 1 and (k + k // 2) % 2:
                    continue  # losses of two tensors take half of the shapes, alternating between the dtypes
                if dtypes and dtype not in dtypes:
                    continue
                name = f"{function}, {'x'.join(map(str, shape))}, {direction}"
                quick = ("cpu", "cuda") if shape[1] in (1000, 50257) else ()
                made.append(
                    LossCase(f"{SUITE}/{direction}", name, shape, 1, function, direction, dtypes=(dtype,), quick=quick)
                )
    return made


Loss = Callable[[Tensor, Tensor], Any]


@dataclass
class Logits:
    """The logits of a case, and their classes or the second tensor."""

    case: LossCase
    dtype: str
    x: Tensor
    target: Tensor


def _torch_cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(x, target)


def _torch_log_prob(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(x, 1)
    return log_p.gather(1, target.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(1)


def _torch_kl_div(x: Tensor, y: Tensor) -> Tensor:
    log_p, log_q = torch.log_softmax(x, 1), torch.log_softmax(y, 1)
    return torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)


class LossProvider(Provider):
    """A library's losses, by function."""

    def __init__(self, name: str, losses: Callable[[str], Loss | None], refuses: Callable[[Case, str], str | None]):
        self.name, self.losses, self.refuses = name, losses, refuses
        self.label, self.provider = registry()[name].label, registry()[name]

    def version(self) -> str | None:
        return self.provider.version()

    def unsupported(self, case: Case, dtype: str) -> str | None:
        if self.losses(case.function) is None:
            return f"{self.label} has no {case.function}"
        return self.refuses(case, dtype)

    def prepare_loss(self, logits: Logits) -> Callable[[], Any]:
        """The call to time. With the backward it returns the loss and the gradient of the logits."""
        loss, x, target = self.losses(logits.case.function), logits.x, logits.target
        assert loss is not None
        if logits.case.direction == DIRECTIONS[0]:
            return lambda: loss(x, target)
        leaves = [t.detach().requires_grad_() for t in ((x, target) if logits.case.function == _KL else (x,))]

        def step() -> tuple[Any, ...]:
            result = loss(leaves[0], leaves[-1] if len(leaves) > 1 else target)
            results = result if isinstance(result, tuple) else (result,)
            grads = [torch.ones_like(r) for r in results] if results[0].dim() else None
            return result, *torch.autograd.grad(results, leaves, grads)

        return step


def _ours(function: str) -> Loss:
    if function in ("cross_entropy", _SHARES):
        return onepass.cross_entropy
    if function == _KL:
        return lambda x, y: onepass.kl_div(x, y, 1)
    return lambda x, target: onepass.log_prob(x, target, 1, return_entropy=True)


def _torchs(function: str) -> Loss:
    return {_LOG_PROB: _torch_log_prob, _KL: _torch_kl_div}.get(function, _torch_cross_entropy)


def _compiled(function: str) -> Loss:
    torch._dynamo.reset()
    return torch.compile(_torchs(function), dynamic=False)


def _ligers(function: str) -> Loss | None:
    return (
        import_module("liger_kernel.transformers.functional").liger_cross_entropy
        if function == "cross_entropy"
        else None
    )


def _quacks(function: str) -> Loss | None:
    if function != "cross_entropy":
        return None
    return lambda x, target: import_module("quack.cross_entropy").cross_entropy(x, target, reduction="mean")


def _any(case: Case, dtype: str) -> str | None:
    return None


def _rows_alone(case: Case, dtype: str) -> str | None:
    return None if len(case.shape) == 2 else "takes rows alone"


def _aligned_rows(case: Case, dtype: str) -> str | None:
    odd = case.shape[1] * ITEMSIZE[dtype] % 16
    return "takes rows of a multiple of 16 bytes" if odd else _rows_alone(case, dtype)


_LIBRARIES: dict[str, tuple[Callable[[str], Loss | None], Callable[[Case, str], str | None]]] = {
    "onepass": (_ours, _any),
    "torch": (_torchs, _any),
    "torch-compile": (_compiled, _any),
    "liger": (_ligers, _rows_alone),
    "quack": (_quacks, _aligned_rows),
}


def available(device: torch.device) -> tuple[str, ...]:
    """The names of the installed libraries that can run on a device."""
    return tuple(name for name in _LIBRARIES if registry()[name].unavailable(device) is None)


def with_losses(providers: Sequence[Provider]) -> list[Provider]:
    """The loss providers of those libraries among `providers` that have losses."""
    return [LossProvider(p.name, *_LIBRARIES[p.name]) for p in providers if p.name in _LIBRARIES]


class LossRunner(SuiteRunner):
    """A run of losses."""

    def make(self, case: Case, dtype: str, generator: torch.Generator) -> Logits:
        assert isinstance(case, LossCase)
        x = torch.empty(case.shape, dtype=getattr(torch, dtype), device=self.device).normal_(generator=generator)
        rows = (case.shape[0], *case.shape[2:])
        if case.function in (_SHARES, _KL):
            target = torch.empty_like(x).normal_(generator=generator)
            target = target.softmax(1) if case.function == _SHARES else target
        else:
            target = torch.randint(0, case.shape[1], rows, device=self.device, generator=generator)
        return Logits(case, dtype, x, target)

    def limit(self, data: Logits) -> Call:
        """Copies, and additions of two tensors into a third, that move as many bytes."""
        adds, rest = divmod(data.case.moves, 3)
        calls = [move_bytes(data.x, 3 * data.x.nbytes, 2)] * adds if adds else []
        calls += [move_bytes(data.x, rest * data.x.nbytes)] if rest else []
        return lambda: [call() for call in calls]

    def expect(self, data: Logits) -> tuple[Tensor, ...]:
        return _expected(data)

    def calls(self, provider: LossProvider, data: Logits) -> Sequence[Call]:
        return [provider.prepare_loss(data)]

    def compare(self, provider: LossProvider, data: Logits, got: Any, expected: tuple[Tensor, ...]) -> str | None:
        return _compare(data, got, expected)


def _expected(logits: Logits) -> tuple[Tensor, ...]:
    """In float64, the loss, or the first rows of results that have a number per row, and the gradient of the first rows
    of logits. The gradient is that of the sum of the results."""
    x, target, function = logits.x, logits.target, logits.case.function
    some = slice(0, max(1, (1 << 20) // prod(x.shape[1:])))
    leaf = x[some].double().requires_grad_()
    second = target[some].double() if target.is_floating_point() else target[some]
    if function in (_LOG_PROB, _KL):
        results = _torchs(function)(leaf, second)
        results = results if isinstance(results, tuple) else (results,)
        return *(r.detach() for r in results), *torch.autograd.grad(sum(r.sum() for r in results), leaf)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    step = max(1, (1 << 24) // prod(x.shape[1:]))
    for first in range(0, x.shape[0], step):
        of_part = target[first : first + step]
        of_part = of_part.double() if of_part.is_floating_point() else of_part
        total += torch.nn.functional.cross_entropy(x[first : first + step].double(), of_part, reduction="sum")
    torch.nn.functional.cross_entropy(leaf, second, reduction="sum").backward()
    assert leaf.grad is not None
    rows = x.numel() // x.shape[1]
    return total / rows, leaf.grad / rows


def _compare(logits: Logits, got: Any, expected: tuple[Tensor, ...]) -> str | None:
    """What is wrong with the results of a call, or None. Libraries round steps to the dtype of the logits. Gradients of
    a mean over many rows are subnormal in float16, so they are rounded to multiples of the smallest number."""
    tolerance = 8 * TOLERANCE[logits.dtype]
    has_grad = logits.case.direction != DIRECTIONS[0]
    result = got[0] if has_grad else got
    results = [*result] if isinstance(result, tuple) else [result]
    results += [got[1]] if has_grad else []
    pairs = [(r[: len(e)] if r.dim() else r, e) for r, e in zip(results, expected, strict=False)]
    for ours, right in pairs:
        step = torch.finfo(ours.dtype).tiny * torch.finfo(ours.dtype).eps  # the distance of subnormal numbers
        error = float(((ours.detach().double() - right).abs().max() - step).clamp(min=0) / right.abs().max())
        if not error <= tolerance:
            return f"off by {error:.1e} of the largest number, more than {tolerance:.1e}"
    return None
