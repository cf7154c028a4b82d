"""Providers, the contestants of the benchmark. A provider says whether it is available on a device and supports a case,
and makes the call that is timed. The copy, which is the limit, is a provider too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from onepass.tools.bench.cases import ITEMSIZE, Case
from onepass.tools.bench.collect_env import version as version_of
from onepass.tools.bench.correctness import Inputs

Call = Callable[[], Any]  # a tensor, or for several gradients a tuple of them
INTERPRETED = "interprets its kernels on the CPU, which takes minutes"


class Provider:
    """One column of the benchmark."""

    name: str
    label: str
    quick: bool = True  # whether --quick includes it
    gallery: bool = False  # a variant of the gallery, which runs only with --gallery or by its name
    takes_scores: bool = False
    stepwise: bool = False  # whether each step to the scores is rounded to the input's dtype

    def unavailable(self, device: torch.device) -> str | None:
        """Why this provider cannot run on `device` here, or None."""
        return None

    def redundant(self, device: torch.device) -> str | None:
        """Why this provider runs on `device` only if it is named, or None."""
        return None

    def unsupported(self, case: Case, dtype: str) -> str | None:
        """Why this provider does not support the case, or None."""
        return None

    def writes_out(self, inputs: Inputs) -> bool:
        """Whether `prepare` can make a call that writes into `inputs.out`."""
        return False

    def workspace(self, case: Case, dtype: str) -> int:
        """The bytes that a call allocates besides input and output, at least those of a newly allocated output."""
        return prod(case.out_shape()) * ITEMSIZE[case.result_dtype(dtype)]

    def version(self) -> str | None:
        return version_of("torch")

    def engine(self, inputs: Inputs) -> str | None:
        """The engine that runs the call, for a provider with several."""
        return None

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        """A callable of the input, of `out=` if `writes_out`, and of `side`. It may be requested repeatedly."""
        raise NotImplementedError

    def side(self, inputs: Inputs) -> dict[str, Any]:
        """The arguments of the forward for the scores of a case."""
        return inputs.side

    def backward(self, inputs: Inputs) -> Call:
        """The backward alone, from the tensors that a forward saves, into `inputs.out`. Called only if `writes_out`."""
        raise NotImplementedError

    def prepare(self, inputs: Inputs) -> Call:
        """The call to time: the forward or its backward, into `inputs.out` if `writes_out`.

        A backward that allocates its result goes through autograd.
        """
        f, x, out, grad = self.forward(inputs.case, inputs.dtype), inputs.x, inputs.out, inputs.grad
        f = partial(f, **self.side(inputs)) if inputs.side else f
        if out is not None and self.writes_out(inputs):
            return self.backward(inputs) if grad is not None else lambda: f(x, out=out)
        if grad is None:
            return lambda: f(x)
        leaf = x.detach().requires_grad_()
        y = f(leaf)
        if inputs.case.grads:
            leaves = [leaf, *(inputs.side[name] for name in inputs.case.grads)]
            return lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)
        return lambda: torch.autograd.grad(y, leaf, grad, retain_graph=True)[0]


class Copy(Provider):
    """The roofline: a copy (for the backward an addition) that reads and writes as many bytes as the case must."""

    name = label = "copy"

    def prepare(self, inputs: Inputs) -> Call:
        x, grad, out = inputs.x, inputs.grad, inputs.out
        if inputs.side and grad is None:  # a copy of the input's bytes plus half of the bytes that are only read
            return move_bytes(x, inputs.case.bytes(inputs.dtype))
        if inputs.case.layout == "sliced":  # memory without gaps is copied as fast as any
            x, grad, out = x.contiguous(), *(None if t is None else t.contiguous() for t in (grad, out))
        elif inputs.case.in_place:
            out = torch.empty_like(x)
        if grad is not None:
            z = torch.empty_like(x) if out is None else out
            if grad.shape != x.shape:  # logsumexp reads the input and writes its gradient
                return lambda: z.copy_(x)
            y = torch.empty_like(grad).copy_(x)
            return lambda: torch.add(y, grad, out=z)
        if out is None or out.shape != x.shape:  # logsumexp reads much and writes little: copy half of the bytes
            flat = x.reshape(-1).view(torch.uint8)
            half = flat[: inputs.case.bytes(inputs.dtype) // 2]
            target = torch.empty_like(half)
            return lambda: target.copy_(half)
        return lambda: out.copy_(x)


def move_bytes(x: Tensor, count: int, reads: int = 1) -> Call:
    """A copy, or with two reads an addition, that moves `count` bytes, in the dtype of `x`."""
    sources = [x.new_empty(count // ((reads + 1) * x.element_size())).normal_() for _ in range(reads)]
    result = torch.empty_like(sources[0])
    return (lambda: result.copy_(sources[0])) if reads == 1 else lambda: torch.add(*sources, out=result)


def copy_of_input(inputs: Inputs) -> Call | None:
    """For the forward of logsumexp, a copy of the whole input; else None. The time of logsumexp is compared with it
    too.

    A logsumexp reads the input and writes next to nothing: at the speed of memory it takes half the time of this copy.
    """
    if inputs.case.function != "logsumexp" or inputs.case.direction != "forward":
        return None
    x, target = inputs.x, torch.empty_like(inputs.x)
    return lambda: target.copy_(x)


COPY = Copy()  # runs always and is not in the registry
