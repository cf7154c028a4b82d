"""The registry of providers, which any kernel can join. To join, subclass `Provider` and `register` an instance:

class Mine(Provider):
    name, label = "mine", "my kernel"

    def forward(self, case, dtype):
        return lambda x: my_softmax(x, case.dim)

register(Mine())
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from onepass.tools.bench.gallery_providers import GalleryProvider
from onepass.tools.bench.provider import COPY, Provider
from onepass.tools.bench.providers import Liger, Naive, Onepass, Quack, Torch, TorchCompile
from onepass.tools.gallery import VARIANTS

_REGISTRY: dict[str, Provider] = {}


def register(provider: Provider) -> None:
    """Adds a provider at the end. Raises ValueError if its name is taken."""
    if provider.name in _REGISTRY or provider.name == COPY.name:
        raise ValueError(f"a provider named {provider.name!r} is registered already")
    _REGISTRY[provider.name] = provider


def registry() -> dict[str, Provider]:
    """All providers by name, in the order of the columns."""
    return dict(_REGISTRY)


def select_providers(
    device: torch.device,
    only: Sequence[str] = (),
    skip: Iterable[str] = (),
    quick: bool = False,
    gallery: bool = False,
    known: Mapping[str, Provider] | None = None,
) -> tuple[list[Provider], dict[str, str]]:
    """The providers to run, of `known` or of the registry, in their order, and by name why others are excluded.

    Without `gallery` its variants are not even listed as excluded, unless `only` names them. Raises ValueError for an
    unknown name, or if a provider in `only` cannot run here.
    """
    known = registry() if known is None else known
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


# The gallery's variant `naive` is part of the provider of that name.
_VARIANTS = [GalleryProvider(variant) for variant in VARIANTS.values() if variant.name != "naive"]
_ENGINE_PROVIDERS = map(Onepass, ("auto", "cpu", "cuda", "triton"))
for _provider in (*_ENGINE_PROVIDERS, Torch(), TorchCompile(), Naive(), Liger(), Quack(), *_VARIANTS):
    register(_provider)
