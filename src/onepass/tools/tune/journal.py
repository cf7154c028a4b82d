"""What a sweep has measured so far, beside its file: a line a length, so that one that was broken off can go on."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from onepass.tools.tune.measure import Point


class Journal:
    """The journal of a sweep: `points` are those of the sweep before, `add` writes one more, `remove` ends it.

    Args:
        path: of the journal.
        header: what was asked for, of which GPU, by which version: only a journal with the same one is gone on with.
        fresh: do not go on.

    Raises:
        ValueError: a journal of another sweep, a damaged one, or one that another process is writing.
    """

    def __init__(self, path: Path, header: dict[str, Any], fresh: bool = False):
        self.path = path
        self.points: list[Point] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b")  # noqa: SIM115 (open as long as the sweep runs)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"another process is tuning: it writes {path}") from None
            self._file.seek(0)
            text = b"" if fresh else self._file.read()
            whole = text[: text.rfind(b"\n") + 1]  # a line that was being written when the process ended is dropped
            if whole:
                self._take(whole.decode(errors="replace").splitlines(), json.loads(json.dumps(header)))
            if not self.points:  # nothing to lose: not even a journal of another sweep
                whole = b""
            self._file.truncate(len(whole))
            if not whole:
                self._write(header)
        except BaseException:
            self._file.close()
            raise

    def _take(self, lines: list[str], header: dict[str, Any]) -> None:
        try:
            found, *points = [json.loads(line) for line in lines]
            if not isinstance(found, dict):
                raise TypeError("the first line is no object")
            self.points = [Point.from_dict(point) for point in points]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"the journal {self.path} is damaged ({error}); --fresh starts anew") from None
        if not points:
            return
        differ = [key for key in {**header, **found} if header.get(key) != found.get(key)]
        if differ:
            what = ", ".join(f"{key}: {_short(found.get(key))}, now {_short(header.get(key))}" for key in differ)
            raise ValueError(f"the journal {self.path} is of another sweep ({what}); --fresh starts anew")

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def add(self, point: Point) -> None:
        """Write a point down, on disk before this returns."""
        self._write(point.as_dict())
        self.points.append(point)

    def remove(self) -> None:
        """The sweep is done and its file written."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
