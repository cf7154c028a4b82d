"""Gives the file of tables of a GPU to the CUDA engine, where there is one."""

import functools
import re
from typing import NamedTuple

import torch

from onepass import native
from onepass import table_file as store


class Kind(NamedTuple):
    """A kind of GPU. Two of one `compute` and as many multiprocessors may differ, as H100 and H200 do."""

    name: str  # as torch.cuda.get_device_name and the driver have it
    compute: int  # 90 for compute capability 9.0
    multiprocessors: int


def kind_of(index: int | None) -> Kind:
    """The kind of a CUDA device that is here."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return Kind(properties.name, 10 * properties.major + properties.minor, properties.multi_processor_count)


def load(kind: Kind) -> store.Stored | None:
    """Have the CUDA engine use the file of tables of this kind of GPU, and return it; None where there is none.

    ONEPASS_TABLES=off keeps the built-in tables; ONEPASS_TABLES may name a file, which then has to be there.

    Raises:
        ValueError: the file cannot be read, is wrong, or is of another kind of GPU.
    """
    if store.is_off():
        return None
    try:
        path = store.default_path(kind.name)
    except RuntimeError:  # a user without a home has no file
        return None
    if store.named() is None and not path.exists():
        return None
    stored = store.read(path)
    of = Kind(stored.gpu, stored.compute, stored.multiprocessors)
    if of != kind:
        raise ValueError(f"onepass: the file of tables {path} is of {_words(of)}; this GPU is {_words(kind)}")
    try:
        native.set_tables(kind.name, stored.origin, stored.tables)
    except RuntimeError as error:
        words = str(error).removeprefix("onepass: ")
        raise ValueError(f"onepass: the file of tables {path} is wrong: {words}") from None
    return stored


def _words(kind: Kind) -> str:
    return f"{kind.name} (compute {kind.compute}, multiprocessors {kind.multiprocessors})"


@functools.cache
def load_once(index: int | None) -> None:
    """`load` at the first use of the CUDA engine on a device; a wrong file is told at each."""
    load(kind_of(index))


def note(origin: str, gpu: str) -> str:
    """A sentence on where the tables that the GPUs of a name use are from: `origin` is what `native.tables` says.

    >>> note("built in, measured on NVIDIA H200, 2026-11-21", "NVIDIA H200")
    'tables built in, measured on NVIDIA H200, 2026-11-21'
    >>> note("built in, measured on NVIDIA H200, 2026-11-21", "NVIDIA H100 80GB HBM3")
    'tables measured on NVIDIA H200, 2026-11-21 (the nearest); `onepass tune` measures this one'
    """
    built_in = re.fullmatch(r"built in, measured on (.*), \d{4}-\d\d-\d\d", origin)
    if built_in and built_in[1] != gpu:
        return f"tables {origin.removeprefix('built in, ')} (the nearest); `onepass tune` measures this one"
    return f"tables {'' if built_in else 'from '}{origin}"
