"""Gives the file of tables of a GPU to the CUDA engine, where there is one."""

import functools
from typing import Any

import torch

from onepass import native
from onepass.tune import store

BUILT_IN = (90, 132)  # the kind of GPU that the built-in tables were measured on


def kind_of(index: int | None) -> tuple[int, int]:
    """(compute capability times ten, multiprocessors) of a CUDA device that is here."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


def load(compute: int, multiprocessors: int) -> store.Stored | None:
    """Have the CUDA engine use the file of tables of this kind of GPU, and return it; None where there is none.

    ONEPASS_TABLES=off keeps the built-in tables; ONEPASS_TABLES may name a file, which then has to be there.

    Raises:
        ValueError: the file cannot be read, is wrong, or is of another kind of GPU.
    """
    if store.is_off():
        return None
    try:
        path = store.default_path(compute, multiprocessors)
    except RuntimeError:  # a user without a home has no file
        return None
    if store.named() is None and not path.exists():
        return None
    stored = store.read(path)
    if (stored.compute, stored.multiprocessors) != (compute, multiprocessors):
        raise ValueError(
            f"onepass: the file of tables {path} is of {stored.gpu} (compute {stored.compute}, multiprocessors "
            f"{stored.multiprocessors}); this GPU has compute {compute}, multiprocessors {multiprocessors}"
        )
    try:
        native.set_tables(compute, multiprocessors, stored.origin, stored.tables)
    except RuntimeError as error:
        words = str(error).removeprefix("onepass: ")
        raise ValueError(f"onepass: the file of tables {path} is wrong: {words}") from None
    return stored


@functools.cache
def load_once(index: int | None) -> None:
    """`load` at the first use of the CUDA engine on a device; a wrong file is told at each."""
    load(*kind_of(index))


def note(used: dict[str, Any], compute: int, multiprocessors: int) -> str:
    """A sentence on where the tables that a GPU uses are from; `used` is what `native.tables` says.

    >>> note({"origin": "built in, of an H200"}, 90, 132)
    'tables built in, of an H200'
    >>> note({"origin": "built in, of an H200"}, 89, 128)
    'tables of an H200 (the nearest); `onepass tune` measures this one'
    """
    origin = str(used["origin"])
    if origin.startswith("built in, ") and (compute, multiprocessors) != BUILT_IN:
        return f"tables {origin.removeprefix('built in, ')} (the nearest); `onepass tune` measures this one"
    return f"tables {'' if origin.startswith('built in') else 'from '}{origin}"
