"""The results file, schema version 3: what a row holds, how a file is written, and how a bad one is told.

`docs/benchmark.md` documents every field. Nothing here imports torch or times anything.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

STDOUT = "-"  # in place of a file's name
SCHEMA = 3
ADDED = {"graph_error": 2, "input_copy_us": 2, "disturbed": 3}  # field -> its first schema; null in older files
ENVIRONMENT = (
    "device",
    "device_type",
    "driver",
    "cuda",
    "torch",
    "triton",
    "python",
    "onepass",
    "commit",
    "date",
    "cpu",
    "threads",
    "platform",
    "sources",
)


class ResultsError(ValueError):
    """A results file that cannot be read; the message names the file and says what is wrong with it."""


@dataclass
class Row:
    """One provider on one case at one dtype. Times in microseconds; None where a field does not apply."""

    suite: str
    case: str
    function: str
    shape: list[int]
    strides: list[int]
    dim: int | list[int]
    dtype: str
    out_dtype: str
    direction: str
    provider: str
    version: str | None = None
    engine: str | None = None
    threads: int | None = None
    world_size: int = 1
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    graph_us: float | None = None
    graph_error: str | None = None
    call_us: float | None = None
    bytes: int = 0
    gbps: float | None = None
    copy_fraction: float | None = None
    input_copy_us: float | None = None
    ok: bool = False
    error: str | None = None
    disturbed: str | None = None

    def key(self) -> tuple[str, str, str, str, str, str]:
        """What is the same for all providers of one line of the table."""
        return (self.suite, self.case, self.function, self.direction, self.dtype, self.out_dtype)


@dataclass
class Results:
    """A results file in memory."""

    environment: dict[str, Any]
    rows: list[Row]

    def as_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "environment": self.environment, "rows": [asdict(r) for r in self.rows]}


_TEXT, _NUMBER, _COUNT = (str,), (int, float), (int,)
_KINDS: dict[str, tuple[tuple[type, ...], bool]] = {  # field -> (types, may it be null)
    **dict.fromkeys(("suite", "case", "function", "dtype", "out_dtype", "direction", "provider"), (_TEXT, False)),
    **dict.fromkeys(("version", "engine", "error", "graph_error", "disturbed"), (_TEXT, True)),
    **dict.fromkeys(("shape", "strides"), ((list,), False)),
    **dict.fromkeys(("median_us", "p20_us", "p80_us", "graph_us", "call_us"), (_NUMBER, True)),
    **dict.fromkeys(("gbps", "copy_fraction", "input_copy_us"), (_NUMBER, True)),
    "dim": ((int, list), False),
    "threads": (_COUNT, True),
    "world_size": (_COUNT, False),
    "bytes": (_COUNT, False),
    "ok": ((bool,), False),
}
_FIELDS = tuple(f.name for f in fields(Row))


def parse(data: Any, where: str = "results") -> Results:
    """Checks decoded JSON against the schema. Raises ResultsError, which names the first thing that is wrong."""
    if not isinstance(data, Mapping):
        raise ResultsError(f"{where}: a results file is an object, got {_kind(data)}")
    schema = data.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise ResultsError(f"{where}: schema {schema!r} is not known, this version reads schemas 1 to {SCHEMA}")
    environment, rows = data.get("environment"), data.get("rows")
    if not isinstance(environment, Mapping):
        raise ResultsError(f"{where}: 'environment' should be an object, got {_kind(environment)}")
    missing = [name for name in ENVIRONMENT if name not in environment]
    if missing:
        raise ResultsError(f"{where}: 'environment' lacks {', '.join(missing)}")
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise ResultsError(f"{where}: 'rows' should be a list, got {_kind(rows)}")
    late = {name: None for name, first in ADDED.items() if first > schema}
    return Results(dict(environment), [_row(row, f"{where}: row {i}", late) for i, row in enumerate(rows)])


def load(path: str | Path) -> Results:
    """Reads and checks one file. Raises ResultsError for one that is missing, is not JSON or is not of the schema."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ResultsError(f"{path}: not a text file") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ResultsError(f"{path}: not JSON (line {error.lineno}: {error.msg})") from None
    return parse(data, str(path))


def save(results: Results, path: str | Path) -> None:
    """Writes to a temporary name beside `path` and renames: a reader finds the old file or the new, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = as_text(results, str(path))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(whole)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes it 0600, a results file is as readable as any other
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def as_text(results: Results, where: str = "results") -> str:
    """What a file holds, one row per line, so that two files can be compared line by line; checked as `load` does."""
    data = parse(json.loads(json.dumps(results.as_dict(), allow_nan=False)), where).as_dict()
    head = json.dumps(data["environment"], indent=2).replace("\n", "\n  ")
    rows = ",\n".join("    " + json.dumps(row) for row in data["rows"])
    rows = f"[\n{rows}\n  ]" if rows else "[]"
    return f'{{\n  "schema": {SCHEMA},\n  "environment": {head},\n  "rows": {rows}\n}}\n'


def _row(row: Any, where: str, late: Mapping[str, None]) -> Row:
    if not isinstance(row, Mapping):
        raise ResultsError(f"{where} should be an object, got {_kind(row)}")
    row = {**late, **row}
    for word, names in (("lacks", set(_FIELDS) - set(row)), ("has unknown", set(row) - set(_FIELDS))):
        if names:
            raise ResultsError(f"{where} {word} {', '.join(sorted(map(str, names)))}")
    for name, value in row.items():
        types, null = _KINDS[name]
        fits = isinstance(value, types) and (not isinstance(value, bool) or bool in types)
        if not fits and not (null and value is None):
            raise ResultsError(f"{where}: {name!r} should be {types[0].__name__}, got {_kind(value)}")
    if row["ok"] and row["median_us"] is None:
        raise ResultsError(f"{where}: 'ok' is true but 'median_us' is null")
    for name in ("shape", "strides", "dim"):
        values = row[name] if isinstance(row[name], list) else [row[name]]
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            raise ResultsError(f"{where}: {name!r} should hold ints, got {row[name]}")
    return Row(**row)


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
