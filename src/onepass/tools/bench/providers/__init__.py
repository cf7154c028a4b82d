"""The providers: everything that is benchmarked, in a registry that any kernel can join.

A provider says whether it is available on a device and whether it supports a case, and makes the call that is timed.
`builtin.py` has onepass, torch and naive PyTorch, `third_party.py` other packages, `gallery.py` the gallery's variants.
To join, subclass `Provider` and `register` an instance:

    class Mine(Provider):
        name, label = "mine", "my kernel"

        def forward(self, case, dtype):
            return lambda x: my_softmax(x, case.dim)

    register(Mine())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from onepass.tools.bench.cases import ITEMSIZE, Case
from onepass.tools.bench.collect_env import version as version_of
from onepass.tools.bench.inputs import Inputs

Call = Callable[[], Tensor]


class Provider:
    """One column of the benchmark."""

    name: str
    label: str
    quick: bool = True  # whether --quick includes it
    gallery: bool = False  # a variant of the gallery, which runs only with --gallery or by its name

    def unavailable(self, device: torch.device) -> str | None:
        """Why this provider cannot run on `device` here, or None."""
        return None

    def redundant(self, device: torch.device) -> str | None:
        """Why this provider runs on `device` only if it is named, or None."""
        return None

    def unsupported(self, case: Case, dtype: str) -> str | None:
        """Why this provider does not support the case, or None."""
        return None

    def takes_out(self, case: Case) -> bool:
        """Whether `forward` returns a callable that takes `out=`."""
        return False

    def writes_out(self, inputs: Inputs) -> bool:
        """Whether `prepare` can make a call that writes into `inputs.out`."""
        return inputs.grad is None and self.takes_out(inputs.case)

    def workspace(self, case: Case, dtype: str) -> int:
        """The bytes that a call allocates besides input and output, at least those of a newly allocated output."""
        return prod(case.out_shape()) * ITEMSIZE[case.result_dtype(dtype)]

    def version(self) -> str | None:
        return version_of("torch")

    def engine(self, inputs: Inputs) -> str | None:
        """The engine that runs the call, for a provider with several."""
        return None

    def forward(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        """A callable of the input, and of `out=` if `takes_out`. It may be requested repeatedly."""
        raise NotImplementedError

    def backward(self, inputs: Inputs) -> Call:
        """The backward alone, from what a forward saves, into `inputs.out`. Called only if `writes_out`."""
        raise NotImplementedError

    def prepare(self, inputs: Inputs) -> Call:
        """The call to time: the forward or its backward, into `inputs.out` if `writes_out`.

        A backward that allocates its result goes through autograd.
        """
        f, x, out, grad = self.forward(inputs.case, inputs.dtype), inputs.x, inputs.out, inputs.grad
        if grad is not None:
            if out is not None and self.writes_out(inputs):
                return self.backward(inputs)
            leaf = x.detach().requires_grad_()
            y = f(leaf)
            return lambda: torch.autograd.grad(y, leaf, grad, retain_graph=True)[0]
        if out is not None and self.takes_out(inputs.case):
            return lambda: f(x, out=out)
        return lambda: f(x)


class Copy(Provider):
    """The roofline: a copy (for the backward an addition) that reads and writes as many bytes as the case must."""

    name = label = "copy"

    def prepare(self, inputs: Inputs) -> Call:
        x, grad, out = inputs.x, inputs.grad, inputs.out
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


def copy_of_input(inputs: Inputs) -> Call | None:
    """For the forward of logsumexp a copy of its whole input, which its time is compared with too; else None.

    A logsumexp reads the input and writes next to nothing: at the speed of memory it takes half the time of this copy.
    """
    if inputs.case.function != "logsumexp" or inputs.case.direction != "forward":
        return None
    x, target = inputs.x, torch.empty_like(inputs.x)
    return lambda: target.copy_(x)


_REGISTRY: dict[str, Provider] = {}
COPY = Copy()  # runs always and is not in the registry


def register(provider: Provider) -> None:
    """Adds a provider at the end. Raises ValueError if its name is taken."""
    if provider.name in _REGISTRY or provider.name == COPY.name:
        raise ValueError(f"a provider named {provider.name!r} is registered already")
    _REGISTRY[provider.name] = provider


def registry() -> dict[str, Provider]:
    """All providers by name, in the order of the columns."""
    from onepass.tools.bench.providers import builtin  # noqa: F401, registers the providers of this package

    return dict(_REGISTRY)


def select_providers(
    device: torch.device,
    only: Sequence[str] = (),
    skip: Iterable[str] = (),
    quick: bool = False,
    gallery: bool = False,
) -> tuple[list[Provider], dict[str, str]]:
    """The providers to run, in the registry's order, and by name why others are excluded.

    Without `gallery` the gallery's variants are neither run nor listed as excluded. If `only` is given, only its names
    run, whatever `gallery` says.

    Raises ValueError for an unknown name, or if a provider in `only` cannot run here.
    """
    known = registry()
    for name in [*only, *skip]:
        if name not in known:
            raise ValueError(f"unknown provider {name!r}: there are {', '.join(known)}")
    chosen, excluded = [], {}
    for name, provider in known.items():
        named = name in only
        if name in skip or (only and not named) or (provider.gallery and not named and not gallery):
            continue
        reason = provider.unavailable(device)
        if reason is not None and named:
            raise ValueError(f"provider {name!r} cannot run on {device}: {reason}")
        if reason is None and not named:
            reason = provider.redundant(device) or ("not part of --quick" if quick and not provider.quick else None)
        if reason is None:
            chosen.append(provider)
        else:
            excluded[name] = reason
    if not chosen:
        raise ValueError("no provider is left to run")
    return chosen, excluded
