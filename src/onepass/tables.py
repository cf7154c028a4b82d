"""The tuning tables of a GPU, by which the CUDA engine chooses plans: the file's path and format, and loading it."""

import functools
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import native
from .native import TABLES as NAMES

Entry = list[int]
Table = list[Entry]
Tables = dict[str, Table]

VERSION = 5
ANY = 2**63 - 1


class TableFile(NamedTuple):
    """The content of a file of tables that the engine needs."""

    path: Path
    gpu: str
    compute: int
    multiprocessors: int
    date: str
    tables: Tables

    @property
    def origin(self) -> str:
        return f"{self.path}, measured on {self.gpu}, {self.date[:10]}"


def is_off() -> bool:
    """Whether ONEPASS_TABLES=off restricts the engine to its built-in tables."""
    return os.environ.get("ONEPASS_TABLES", "") == "off"


def named() -> Path | None:
    """The file that ONEPASS_TABLES names, or None."""
    given = os.environ.get("ONEPASS_TABLES", "")
    return Path(given) if given and not is_off() else None


def default_path(gpu: str) -> Path:
    """The file for GPUs of this name: $ONEPASS_TABLES if that names a file, else one in the user's config folder.

    The config folder is $XDG_CONFIG_HOME if that is an absolute path, else ~/.config. Raises RuntimeError if the user
    has no home.

    >>> default_path("NVIDIA H200").name if not named() else "tables-nvidia-h200.json"
    'tables-nvidia-h200.json'
    """
    if (path := named()) is not None:
        return path
    given = os.environ.get("XDG_CONFIG_HOME", "")
    folder = Path(given) if os.path.isabs(given) else Path.home() / ".config"
    return folder / "onepass" / f"tables-{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def check_tables(tables: Any) -> None:
    """Raise ValueError unless `tables` has all tables, with entries of six integers. The engine checks their values.

    >>> check_tables({"write_f32": []})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: tables are write_f32, write_f16, ...; got write_f32
    """
    if not isinstance(tables, dict) or set(tables) != set(NAMES):
        got = ", ".join(map(str, tables)) or "none" if isinstance(tables, dict) else repr(tables)[:80]
        raise ValueError(f"tables are {', '.join(NAMES)}; got {got}")
    for name, table in tables.items():
        if not isinstance(table, list) or not table:
            raise ValueError(f"table {name} is a list of entries, got {repr(table)[:80]}")
        for at, entry in enumerate(table):
            if (
                not isinstance(entry, list)
                or len(entry) != 6
                or not all(type(n) is int and -ANY <= n <= ANY for n in entry)
            ):
                fields = "limit, tier, threads, items_per_thread, blocks_per_row, smem_vecs"
                raise ValueError(f"table {name}, entry {at}: six whole numbers ({fields}), got {repr(entry)[:80]}")


def read(path: Path) -> TableFile:
    """Read a file of tables. Raises ValueError that names the file and what is wrong with it."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"onepass: the file of tables {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"onepass: the file of tables {path} is not JSON: {error}") from error
    try:
        if not isinstance(given, dict):
            raise ValueError(f"it is a JSON object, got {repr(given)[:80]}")
        if given.get("version") != VERSION or isinstance(given["version"], bool):
            raise ValueError(f"its version is {VERSION}, got {given.get('version')!r}")
        for key, kind in (("gpu", str), ("compute", int), ("multiprocessors", int), ("date", str)):
            if type(given.get(key)) is not kind:
                raise ValueError(f"its {key} is a {'text' if kind is str else 'whole number'}, got {given.get(key)!r}")
        check_tables(given.get("tables"))
    except ValueError as error:
        raise ValueError(f"onepass: the file of tables {path} is wrong: {error}") from None
    return TableFile(path, given["gpu"], given["compute"], given["multiprocessors"], given["date"], given["tables"])


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file of tables atomically: to a temporary file in the same folder, which is then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({key: value for key, value in content.items() if key not in ("tables", "measured")})
    tables = ",\n".join(
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"   {json.dumps(e)}" for e in table) + "\n  ]"
        for name, table in content["tables"].items()
    )
    measured = ",\n".join(f"  {json.dumps(point)}" for point in content["measured"])
    text = f'{text[:-1]},\n "tables": {{\n{tables}\n }},\n "measured": [\n{measured}\n ]\n}}\n'
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


# Tables in the CUDA engine --------------------------------------------------------------------------------------------


class GpuModel(NamedTuple):
    """A model of GPU. Two models may have the same `compute` and `multiprocessors` and still differ: H100 and H200."""

    name: str  # as torch.cuda.get_device_name and the driver report it
    compute: int  # 90 for compute capability 9.0
    multiprocessors: int


def gpu_model(index: int | None) -> GpuModel:
    """The model of a CUDA device of this machine."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return GpuModel(properties.name, 10 * properties.major + properties.minor, properties.multi_processor_count)


def load(kind: GpuModel) -> TableFile | None:
    """Load the file of tables of this GPU model into the CUDA engine, and return it. None if there is no file.

    ONEPASS_TABLES=off keeps the built-in tables. If ONEPASS_TABLES names a file, the file has to exist.

    Raises:
        ValueError: the file cannot be read, is wrong, or is for another GPU model.
    """
    if is_off():
        return None
    try:
        path = default_path(kind.name)
    except RuntimeError:  # a user without a home has no file
        return None
    if named() is None and not path.exists():
        return None
    stored = read(path)
    of = GpuModel(stored.gpu, stored.compute, stored.multiprocessors)
    if of != kind:
        raise ValueError(f"onepass: the file of tables {path} is of {_words(of)}; this GPU is {_words(kind)}")
    try:
        native.set_tables(kind.name, stored.origin, stored.tables)
    except RuntimeError as error:
        words = str(error).removeprefix("onepass: ")
        raise ValueError(f"onepass: the file of tables {path} is wrong: {words}") from None
    return stored


def _words(kind: GpuModel) -> str:
    return f"{kind.name} (compute {kind.compute}, multiprocessors {kind.multiprocessors})"


@functools.cache
def load_once(index: int | None) -> None:
    """`load` at the first use of the CUDA engine on a device. A wrong file raises an error at every use."""
    load(gpu_model(index))


def note(origin: str, gpu: str) -> str:
    """A sentence that says where the tables for GPUs of this name are from. `origin` is that of `native.tables`.

    >>> note("built in, measured on NVIDIA H200, 2026-11-21", "NVIDIA H200")
    'tables built in, measured on NVIDIA H200, 2026-11-21'
    >>> note("built in, measured on NVIDIA H200, 2026-11-21", "NVIDIA H100 80GB HBM3")
    'tables measured on NVIDIA H200, 2026-11-21 (the nearest); `onepass tune` measures this one'
    """
    built_in = re.fullmatch(r"built in, measured on (.*), \d{4}-\d\d-\d\d", origin)
    if built_in and built_in[1] != gpu:
        return f"tables {origin.removeprefix('built in, ')} (the nearest); `onepass tune` measures this one"
    return f"tables {'' if built_in else 'from '}{origin}"
