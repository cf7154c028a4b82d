"""scripts/tables_to_cpp.py: what `onepass tune` wrote, as the built-in tables, which a compiler takes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lib.paths import ROOT
from lib.tune import BASE
from onepass import native
from onepass import tables as store

CSRC = ROOT / "src/onepass/csrc"
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


def file_of(folder: Path, tables: dict, gpu: str = "NVIDIA B200") -> Path:
    path = folder / "mine.json"
    fields = {"gpu": gpu, "compute": 100, "multiprocessors": 148, "date": "2026-12-24T18:00:00+00:00"}
    store.write(path, {"version": store.VERSION, **fields, "tables": tables, "measured": []})
    return path


def run(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts/tables_to_cpp.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def header(tmp_path: Path) -> Path:
    shutil.copy(CSRC / "plan" / "tables_h200.h", tmp_path)
    return tmp_path / "tables_h200.h"


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


def test_a_compiler_reads_what_the_file_says(header, tmp_path):
    compiler = shutil.which("g++") or pytest.skip("no g++ here")
    done = run(file_of(tmp_path, SMALL), "--to", header)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{header}: 18 entries of NVIDIA B200")
    (tmp_path / "main.cpp").write_text(PROGRAM)
    command = [compiler, "-std=c++17", "-Wall", "-Werror", f"-I{tmp_path}", f"-I{CSRC / 'plan'}", tmp_path / "main.cpp"]
    subprocess.run([*command, "-o", tmp_path / "main"], check=True, capture_output=True)
    origin, *lines = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert origin == "built in, measured on NVIDIA B200, 2026-12-24"
    read = [(name, [int(number) for number in numbers]) for name, *numbers in (line.split() for line in lines)]
    assert read == [(name, entry) for name in store.NAMES for entry in SMALL[name]]


def test_the_built_in_tables_are_in_the_format_that_it_writes(header, tmp_path):
    """From the tables in use, of the GPU and date that they name, it makes the header that is there."""
    words, gpu, date = native.tables()["origin"].split(", ")
    assert words == "built in"
    path = file_of(tmp_path, BASE, gpu.removeprefix("measured on "))
    path.write_text(path.read_text().replace("2026-12-24", date))
    before = header.read_text()
    assert run(path, "--to", header).returncode == 0
    assert header.read_text() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 1}, "its version is 5, got 1"),
        ({"tables": {**SMALL, "unaligned_f16": []}}, "table unaligned_f16 is a list of entries"),
        ({"gpu": 'a "GPU"'}, "a GPU has a plain name, got"),
    ],
)
def test_a_wrong_file_is_told_and_nothing_is_written(header, tmp_path, change, words):
    path, before = file_of(tmp_path, SMALL), header.read_text()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    done = run(path, "--to", header)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert header.read_text() == before


def test_a_header_without_marks_is_told(tmp_path):
    (tmp_path / "other.h").write_text("// nothing\n")
    done = run(file_of(tmp_path, SMALL), "--to", tmp_path / "other.h")
    assert done.returncode == 2
    assert "no header with the marks" in done.stderr
