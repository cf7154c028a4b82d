"""The results file, schema version 4: its rows, how it is written, and what is wrong with a bad one.

`docs/benchmark.md` documents every field. Nothing here imports torch or times anything.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

STDOUT = "-"  # the name of a file that means stdout
SCHEMA = 4
ADDED = {
    "graph_error": 2,
    "input_copy_us": 2,
    "disturbed": 3,
    "min_us": 4,
}  # field -> the schema that added it; null in older files
ENVIRONMENT = (
    *("device", "device_type", "driver", "cuda", "torch", "triton", "python", "onepass"),
    *("commit", "date", "cpu", "threads", "platform", "sources"),
)


class ResultsError(ValueError):
    """A results file cannot be read; the message names the file and what is wrong with it."""


@dataclass
class Row:
    """One provider on one case at one dtype. Times are microseconds. A field that does not apply is None."""

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
    min_us: float | None = None
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
        """The fields that all providers of one line of the table share."""
        return (self.suite, self.case, self.function, self.direction, self.dtype, self.out_dtype)


@dataclass
class Results:
    """A results file in memory."""

    environment: dict[str, Any]
    rows: list[Row]

    def as_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "environment": self.environment, "rows": [asdict(r) for r in self.rows]}


_FIELDS = {field.name: str(field.type) for field in fields(Row)}  # the annotations, which the checks read
_TYPES = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,), "list[int]": (list,)}
_TYPES["None"] = (type(None),)


def parse(data: Any, where: str = "results") -> Results:
    """Checks decoded JSON against the schema. Raises ResultsError for the first thing that is wrong."""

    def expect(value: Any, kind: type[dict[Any, Any] | list[Any]], name: str) -> Any:
        if not isinstance(value, kind):
            what = "an object" if kind is dict else "a list"
            raise ResultsError(f"{where}: {name} should be {what}, got {_describe(value)}")
        return value

    schema = expect(data, dict, "a results file").get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise ResultsError(f"{where}: schema {schema!r} is not known, this version reads schemas 1 to {SCHEMA}")
    environment = expect(data.get("environment"), dict, "'environment'")
    if missing := [name for name in ENVIRONMENT if name not in environment]:
        raise ResultsError(f"{where}: 'environment' lacks {', '.join(missing)}")
    absent = {name: None for name, first in ADDED.items() if first > schema}
    rows = [absent | expect(row, dict, f"row {i}") for i, row in enumerate(expect(data.get("rows"), list, "'rows'"))]
    return Results(environment, [_parse_row(row, f"{where}: row {i}") for i, row in enumerate(rows)])


def _parse_row(row: dict[str, Any], where: str) -> Row:
    for word, names in (("lacks", set(_FIELDS) - set(row)), ("has unknown", set(row) - set(_FIELDS))):
        if names:
            raise ResultsError(f"{where} {word} {', '.join(sorted(names))}")
    for name, value in row.items():
        types = [kind for part in _FIELDS[name].split(" | ") for kind in _TYPES[part]]
        if not isinstance(value, tuple(types)) or (isinstance(value, bool) and bool not in types):
            raise ResultsError(f"{where}: {name!r} should be {_FIELDS[name]}, got {_describe(value)}")
        if isinstance(value, list) and not all(type(v) is int for v in value):
            raise ResultsError(f"{where}: {name!r} should hold ints, got {value}")
    if row["ok"] and row["median_us"] is None:
        raise ResultsError(f"{where}: 'ok' is true but 'median_us' is null")
    return Row(**row)


def _describe(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def load(path: str | Path) -> Results:
    """Reads and checks one file. Raises ResultsError if it is missing, not JSON or not of the schema."""
    try:
        return parse(json.loads(Path(path).read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ResultsError(f"{path}: not a text file") from None
    except json.JSONDecodeError as error:
        raise ResultsError(f"{path}: not JSON (line {error.lineno}: {error.msg})") from None


def save(results: Results, path: str | Path) -> None:
    """Writes a temporary file beside `path` and renames it: a reader finds the old or the new file, never a part."""
    path = Path(path)
    whole = as_text(results, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        part = Path(folder, "part")
        part.write_text(whole, encoding="utf-8")
        os.replace(part, path)


def as_text(results: Results, where: str = "results") -> str:
    """The text of a file, checked as `load` does. A row is one line, so that `diff` compares two files row by row."""
    data = parse(json.loads(json.dumps(results.as_dict(), allow_nan=False)), where).as_dict()
    head = json.dumps(data["environment"], indent=2).replace("\n", "\n  ")
    rows = ",\n".join("    " + json.dumps(row) for row in data["rows"])
    rows = f"[\n{rows}\n  ]" if rows else "[]"
    return f'{{\n  "schema": {SCHEMA},\n  "environment": {head},\n  "rows": {rows}\n}}\n'
