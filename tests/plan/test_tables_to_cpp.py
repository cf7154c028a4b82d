"""scripts/tables_to_cpp.py: what `onepass tune` wrote, as the built-in tables, which a compiler takes."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from lib.cpp import compiled, output
from lib.paths import CORE
from lib.scripts import load_script
from lib.tune import BASE, tables_back
from onepass import native
from onepass import tables as store

__all__ = ["tables_back"]
ANY = store.ANY
SMALL = {
    "write_f32": [[24, 0, 2, 0, 1, 0], [4096, 2, 0, 20, 1, 0], [ANY, 4, 480, 16, 1, 0]],
    "write_f16": [[65536, 3, 128, 32, 8, 4], [ANY, 5, 512, 16, 1, 0]],
    "reduce_f32": [[ANY, 5, 256, 16, 1, 0]],
    "reduce_f16": [[ANY, 5, 256, 32, 1, 0]],
    "unaligned_f32": [[40, 1, 1, 0, 1, 0], [ANY, -1, 0, 0, 1, 0]],
    "unaligned_f16": [[ANY, -1, 0, 0, 1, 0]],
    "few_rows_f32": [[255, -1, 0, 0, 1, 0], [ANY, 2, 0, 20, 1, 0]],
    "few_rows_f16": [[ANY, -1, 0, 0, 1, 0]],
    "columns_f32": [[24, 6, 64, 24, 64, 0], [ANY, 7, 0, 0, 8, 0]],
    "columns_f16": [[ANY, 6, 128, 16, 8, 1]],
    "columns_backward_f32": [[ANY, 7, 0, 0, 16, 0]],
    "columns_backward_f16": [[ANY, 7, 0, 0, 8, 0]],
}


def file_of(folder: Path, tables: dict, gpu: str = "a GPU") -> Path:
    path = folder / "mine.json"
    fields = {"gpu": gpu, "compute": 100, "multiprocessors": 148, "date": "2026-12-24T18:00:00+00:00"}
    store.write(path, {"version": store.VERSION, **fields, "tables": tables, "measured": []})
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the script, which makes a header of a file, and gives what it prints, or the error with which it ends."""
    script = load_script("tables_to_cpp")

    def run(path: Path, header: Path, status: int = 0) -> str:
        monkeypatch.setattr("sys.argv", ["tables_to_cpp.py", str(path), "--to", str(header)])
        with pytest.raises(SystemExit, match=str(status)) if status else nullcontext():
            script.main()
        said = capsys.readouterr()
        return said.err if status else said.out

    return run


@pytest.fixture
def header(tmp_path: Path) -> Path:
    return Path(shutil.copy(CORE / "plan" / "tables_h200.h", tmp_path))


PROGRAM = """
#include <cstdio>
#include "tables_h200.h"
int main() {
  using namespace onepass;
  std::printf("%s\\n", built_in().origin.c_str());
  for (const NamedTable& named : kTables) {
    for (const Entry& e : built_in().*named.table)
      std::printf("%s %lld %d %d %d %d %d\\n", named.name, (long long)e.limit, e.tier, e.threads, e.items_per_thread,
                  e.blocks_per_row, e.smem_vecs);
  }
}
"""


def test_a_compiler_reads_what_the_file_says(run, header, tmp_path):
    assert run(file_of(tmp_path, SMALL), header).startswith(f"{header}: 18 entries of a GPU")
    (tmp_path / "main.cpp").write_text(PROGRAM)
    options = "-Wall", "-Werror", f"-I{tmp_path}", f"-I{CORE / 'plan'}"
    origin, *lines = output(compiled(tmp_path / "main", tmp_path / "main.cpp", *options)).splitlines()
    assert origin == "built in, measured on a GPU, 2026-12-24"
    read = [(name, [int(number) for number in numbers]) for name, *numbers in (line.split() for line in lines)]
    assert read == [(name, entry) for name in store.NAMES for entry in SMALL[name]]


def test_the_built_in_tables_are_in_the_format_that_it_writes(run, header, tmp_path, tables_back):
    """From the tables in use, of the GPU and date that they name, it makes the header that is there."""
    words, gpu, date = native.tables()["origin"].split(", ")
    assert words == "built in"
    path, before = file_of(tmp_path, BASE, gpu.removeprefix("measured on ")), header.read_text()
    path.write_text(path.read_text().replace("2026-12-24", date))
    run(path, header)
    assert header.read_text() == before


def test_what_is_wrong_is_told_and_nothing_is_written(run, header, tmp_path):
    before = header.read_text()
    for change, words in (
        ({"version": 1}, "its version is 5, got 1"),
        ({"tables": {**SMALL, "unaligned_f16": []}}, "table unaligned_f16 is a list of entries"),
        ({"gpu": 'a "GPU"'}, "a GPU has a plain name, got"),
    ):
        path = file_of(tmp_path, SMALL)
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        assert words in run(path, header, 2).splitlines()[-1]
        assert header.read_text() == before
    (tmp_path / "other.h").write_text("// nothing\n")
    assert "no header with the marks" in run(file_of(tmp_path, SMALL), tmp_path / "other.h", 2)
