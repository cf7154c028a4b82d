"""Who is raced: a registry that every kernel joins. `entrants.py` has those that come with the package.

A provider says whether it is to be had on a device, whether it serves a case, and makes the call that is timed. To
join, subclass `Provider` and `register` an instance:

    class Mine(Provider):
        name, label = "mine", "my kernel"

        def function(self, case, dtype):
            return lambda x: my_softmax(x, case.dim)

    register(Mine())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from onepass.tools.bench.cases import ITEMSIZE, Case
from onepass.tools.bench.environment import version as version_of
from onepass.tools.bench.work import Work

Call = Callable[[], Tensor]


class Refused(Exception):
    """Raised by a provider's call for a case that it does not take and could not tell from the case alone: the row is
    then "unsupported", as where `supports` gives a reason."""


class Provider:
    """One line of the race. `quick` says whether the quick form runs it unasked, `gallery` that it is a rung of the
    gallery, which runs only when the gallery or its name is asked for."""

    name: str
    label: str
    quick: bool = True
    gallery: bool = False
    limit: bool = False  # a limit (the copy) is what the others are measured by, and is never the best

    def unavailable(self, device: torch.device) -> str | None:
        """Why this provider cannot run on `device` here, or None."""
        return None

    def redundant(self, device: torch.device) -> str | None:
        """Why, on `device`, this provider is another one again and runs only when asked for, or None."""
        return None

    def supports(self, case: Case, dtype: str) -> str | None:
        """Why this provider does not take the case, or None."""
        return None

    def takes_out(self, case: Case) -> bool:
        """Whether `function` gives a callable that takes `out=`."""
        return False

    def writes(self, work: Work) -> bool:
        """Whether `prepare` can have the call write what it is given: the forward by `takes_out`, the backward by
        `gradient`."""
        return work.grad is None and self.takes_out(work.case)

    def workspace(self, case: Case, dtype: str) -> int:
        """Bytes that a call takes besides input and output: what a fresh output takes, at least."""
        return prod(case.out_shape()) * ITEMSIZE[case.result_dtype(dtype)]

    def version(self) -> str | None:
        return version_of("torch")

    def engine(self, work: Work) -> str | None:
        """The engine that serves the call, for providers that have several."""
        return None

    def function(self, case: Case, dtype: str) -> Callable[..., Tensor]:
        """The forward: a callable of the input, and of `out=` where `takes_out`. It may be asked for repeatedly."""
        raise NotImplementedError

    def gradient(self, work: Work) -> Call:
        """The backward alone, from what a forward saves, into `work.out`; asked for where `writes` says so."""
        raise NotImplementedError

    def prepare(self, work: Work) -> Call:
        """The call to time, into `work.out` if it `writes`: the forward, or the backward of it.

        A backward that allocates its own result goes by autograd.
        """
        f, x, out, grad = self.function(work.case, work.dtype), work.x, work.out, work.grad
        if grad is not None:
            if out is not None and self.writes(work):
                return self.gradient(work)
            leaf = x.detach().requires_grad_()
            y = f(leaf)
            return lambda: torch.autograd.grad(y, leaf, grad, retain_graph=True)[0]
        if out is not None and self.takes_out(work.case):
            return lambda: f(x, out=out)
        return lambda: f(x)


class Copy(Provider):
    """The limit: a copy (for the backward: an addition) that reads and writes the bytes that the case must."""

    name = "copy"
    label = "copy"
    limit = True

    def prepare(self, work: Work) -> Call:
        x, grad = work.x, work.grad
        if grad is not None:
            if grad.shape != x.shape:  # logsumexp: the input is read, its gradient written
                y = torch.empty_like(x) if work.out is None else work.out
                return lambda: y.copy_(x)
            y, z = torch.empty_like(grad).copy_(x), torch.empty_like(x) if work.out is None else work.out
            return lambda: torch.add(y, grad, out=z)
        out = work.out
        if out is None or out.shape != x.shape:  # logsumexp reads much and writes little: a copy of half as much
            flat = x.reshape(-1).view(torch.uint8)
            half = flat[: work.case.bytes(work.dtype) // 2]
            target = torch.empty_like(half)
            return lambda: target.copy_(half)
        return lambda: out.copy_(x)


def copy_of_input(work: Work) -> Call | None:
    """For a logsumexp the copy of its whole input, by which its time is judged too; None for any other case.

    A logsumexp reads the input and writes next to nothing: at the speed of memory it takes half the time of this copy.
    """
    if work.case.function != "logsumexp" or work.case.direction != "forward":
        return None
    x, target = work.x, torch.empty_like(work.x)
    return lambda: target.copy_(x)


_REGISTRY: dict[str, Provider] = {}
COPY = Copy()  # always run, and in no registry


def register(provider: Provider) -> None:
    """Adds a provider at the end of the order. Raises ValueError for a name that is taken."""
    if provider.name in _REGISTRY or provider.name == COPY.name:
        raise ValueError(f"a provider named {provider.name!r} is there already")
    _REGISTRY[provider.name] = provider


def registry() -> dict[str, Provider]:
    """All providers by name, in their order."""
    from onepass.tools.bench import entrants  # noqa: F401, registers what comes with the package

    return dict(_REGISTRY)


def pick(
    device: torch.device,
    only: Sequence[str] = (),
    skip: Iterable[str] = (),
    quick: bool = False,
    gallery: bool = False,
) -> tuple[list[Provider], dict[str, str]]:
    """The providers to run, in the registry's order, and why the others are left out, by name.

    The rungs of the gallery join with `gallery`; without it they are left out and not named. `only` is all that runs,
    whatever `gallery` says.

    Raises ValueError for an unknown name, or where `only` names what cannot run here.
    """
    known = registry()
    for name in [*only, *skip]:
        if name not in known:
            raise ValueError(f"unknown provider {name!r}: there are {', '.join(known)}")
    chosen, left_out = [], {}
    for name, provider in known.items():
        asked = name in only
        if name in skip or (only and not asked) or (provider.gallery and not asked and not gallery):
            continue
        reason = provider.unavailable(device)
        if reason is None and not asked:
            reason = provider.redundant(device)
        if reason is None and not asked and quick and not provider.quick:
            reason = "not in the quick form"
        if reason is None:
            chosen.append(provider)
        elif asked:
            raise ValueError(f"provider {name!r} cannot run on {device}: {reason}")
        else:
            left_out[name] = reason
    if not chosen:
        raise ValueError("no provider is left to run")
    return chosen, left_out
