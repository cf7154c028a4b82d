"""What a run shows, and the pictures that are drawn of its files."""

import io
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from lib.bench import CASE, measured
from onepass.tools.bench import results, table
from onepass.tools.bench.report import LiveTable, Plain
from onepass.tools.bench.results import Results, Row
from onepass.tools.gallery import VARIANTS


@pytest.fixture(scope="module")
def made() -> Results:
    return measured()


# What is shown


def test_plain_lines_tell_the_run(made: Results) -> None:
    out = io.StringIO()
    plain = Plain(4, out)
    plain.case(CASE, "float32")
    plain.rows([r for r in made.rows if r.key() == made.rows[0].key()])
    plain.finish(made.rows)
    text = out.getvalue()
    assert text.isascii()
    assert "[1/4] tiny 4x33, f32" in text
    assert "of a copy" in text
    assert "WRONG" in text
    assert re.search(r"^odd: tiny 4x33, f32: wrong: error .* \(and 3 more\)$", text, re.MULTILINE)
    assert re.search(r"onepass is \d+\.\d\dx as fast as torch \(geometric mean of 4, ", text)
    widths = {len(line) for line in text.splitlines() if line.startswith("----")}
    assert len(widths) == 1


def test_the_summary_of_known_numbers() -> None:
    def row(case: str, provider: str, us: float) -> Row:
        return Row("s", case, "softmax", [2, 2], [2, 1], -1, "float32", "float32", "forward", provider, median_us=us,
                   bytes=16, gbps=1.0, copy_fraction=0.5, ok=True)  # fmt: skip

    rows = [row("a", "onepass", 1.0), row("a", "torch", 2.0), row("b", "onepass", 1.0), row("b", "torch", 8.0)]
    assert "onepass is 4.00x as fast as torch (geometric mean of 2, 2.00x to 8.00x)" in table.summary(rows)
    assert [line.best() for line in table.lines(rows)] == ["onepass", "onepass"]
    assert table.plain(rows).splitlines()[2].split() == ["a", "2x2", "f32", "1.00", "0.50*", "2.00", "0.50", "2.00"]


def test_the_summary_of_small_inputs_on_a_gpu() -> None:
    def row(case: str, provider: str, us: float, n: int, threads: int | None = None) -> Row:
        return Row("s", case, "softmax", [2, n], [n, 1], -1, "float32", "float32", "forward", provider, median_us=us,
                   bytes=16, ok=True, threads=threads)  # fmt: skip

    rows = [row("a", "copy", 5.0, 8), row("a", "onepass", 7.0, 8)]
    rows += [row("b", "copy", 5.0, 8), row("b", "onepass", 9.0, 8)]
    rows += [row("c", "copy", 5.0, 8_000_000), row("c", "onepass", 50.0, 8_000_000)]
    said = "inputs under 64 MB, us over the copy: onepass 3.0 (at most 4.0)"
    assert said in table.summary(rows)
    assert said not in table.summary([replace(r, threads=2) for r in rows])
    assert "onepass 1.0" in table._over_the_copy([row("a", "copy", 5.0, 7), row("a", "onepass", 6.0, 7)])[0]


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_live_table_fits_the_terminal(made: Results, width: int) -> None:
    from rich.console import Console

    rows = [replace(r, case="4K attention, 128 queries", median_us=r.median_us and 123456.7) for r in made.rows]
    rows = [replace(r, case=f"{r.case}, {r.shape}") for r in rows]
    live = LiveTable(4, "title")
    live.console = Console(file=io.StringIO(), width=width, height=30, force_terminal=True, color_system=None)
    with live.console.capture() as caught:
        live.console.print(live.table(rows))
    text = caught.get()
    assert all(len(line) <= width for line in text.splitlines())
    assert ("shape" in text) == (width == 160)
    assert text.count("WRONG") == 4
    assert "…" not in text
    for part in ("onepass", "torch", "bf16", "attention", "queries"):
        assert part in text


# The pictures


def sweep(file: Results) -> Results:
    """A sweep's rows out of nothing: what is drawn needs no clock."""
    rows = []
    for n in (256, 1024, 4096):
        for i, name in enumerate(("copy", "onepass", "torch", "mine")):
            us = n * 0.01 * (i + 1)
            row = Row("sweep", f"64x{n}", "softmax", [64, n], [n, 1], -1, "float32", "float32", "forward", name)
            row = replace(row, threads=file.rows[0].threads, ok=True)
            rows.append(replace(row, median_us=us, bytes=512 * n, gbps=512 * n / us * 1e-3, copy_fraction=1 / (i + 1)))
    return Results(file.environment, rows)


def test_pictures_are_drawn_from_files_without_a_clock_or_torch(made: Results, tmp_path: Path) -> None:
    results.save(Results(made.environment, made.rows + sweep(made).rows), tmp_path / "r.json")
    code = f"""
import sys, types
package = types.ModuleType("onepass")
package.__path__ = [{str(Path(results.__file__).parents[2])!r}]
sys.modules["onepass"] = package
from onepass.tools.bench.plot import draw
from onepass.tools.bench.results import load
for folder in ("a", "b"):
    paths = draw([load("r.json")], folder)
print(*[p.name for p in paths])
assert "torch" not in sys.modules and "onepass.tools.bench.timing" not in sys.modules, "imported"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = ("sweep-softmax-forward-float32", "tiny-softmax-forward-bfloat16", "tiny-softmax-forward-float32")
    assert sorted(done.stdout.split()) == sorted(f"{n}.{end}" for n in names for end in ("png", "svg"))
    for name in done.stdout.split():
        first, second = (tmp_path / folder / name for folder in ("a", "b"))
        assert first.stat().st_size > 5000
        assert first.read_bytes() == second.read_bytes(), f"{name} differs from run to run"
        if name.endswith("png"):
            assert first.read_bytes().startswith(b"\x89PNG")


def test_a_newer_file_is_drawn_over_an_older_one(made: Results, tmp_path: Path) -> None:
    from onepass.tools.bench.plot import draw

    old, new = sweep(made), sweep(made)
    old = Results(old.environment | {"date": "2020-01-01T00:00:00+00:00"}, [replace(r, gbps=1.0) for r in old.rows])
    both = [p for p in draw([new, old], tmp_path / "both") if p.suffix == ".svg"]
    alone = [p for p in draw([new], tmp_path / "alone") if p.suffix == ".svg"]
    assert [p.read_bytes() for p in both] == [p.read_bytes() for p in alone]
    other = Results(new.environment | {"device": "Other/GPU"}, [replace(r, threads=None) for r in new.rows])
    names = [p.name for p in draw([new, other], tmp_path / "two") if p.suffix == ".svg"]
    assert len(names) == 2
    assert "sweep-softmax-forward-float32-Other-GPU.svg" in names


def test_many_providers_and_cases_still_make_one_page(made: Results, tmp_path: Path) -> None:
    from onepass.tools.bench.plot import draw

    row = next(r for r in made.rows if r.ok)
    rows = [
        replace(row, case=f"case {c}", provider=name, copy_fraction=3.0 if c == 0 else 0.5, dtype="float32")
        for c in range(24)
        for name in ("onepass", "torch", "naive", "a", "b", "copy")
    ]
    png, svg = draw([Results(made.environment, rows)], tmp_path)
    width, height = (int.from_bytes(png.read_bytes()[i : i + 4]) for i in (16, 20))
    assert 1200 <= width <= 1500
    assert height <= 1600
    assert svg.stat().st_size > 5000


# The gallery's rungs: a style each


def test_every_rung_has_a_style_and_a_label_of_its_own() -> None:
    from onepass.tools.bench import figures

    names = ["onepass", "torch", "torch-compile", "liger", "onepass-triton", "onepass-cuda", *VARIANTS]
    assert len({figures._style(name, names)[0] for name in names}) == len(names)
    assert len({figures._label(name) for name in names}) == len(names)
    assert not set(figures._STYLE) & set(figures._RUNGS)
    assert {"naive", *figures._RUNGS} == set(VARIANTS)


def test_pictures_of_the_whole_gallery_are_drawn(made: Results, tmp_path: Path) -> None:
    from onepass.tools.bench.plot import draw

    suites = {"sweep": (256, 512, 1024), "named": (256, 300), "many": tuple(range(200, 209))}  # curves, bars, markers
    row = next(r for r in made.rows if r.ok)
    rows = []
    for suite, sizes in suites.items():
        for n in sizes:
            for i, name in enumerate(("copy", "onepass", "torch", *VARIANTS), 1):
                one = replace(
                    row, suite=suite, case=f"N {n}", shape=[64, n] if suite == "sweep" else [1, 64, n], dim=-1
                )
                rows.append(replace(one, provider=name, gbps=1000 / i, copy_fraction=1 / i, dtype="float32"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as matplotlib warns where a legend leaves no room
        drawn = draw([Results(made.environment, rows)], tmp_path)
    sizes = {}
    for path in drawn:
        if path.suffix == ".png":
            sizes[path.name.split("-")[0]] = [int.from_bytes(path.read_bytes()[i : i + 4], "big") for i in (16, 20)]
    assert set(sizes) == set(suites)
    assert sizes["sweep"] == [1568, 992]
    assert all(sizes[suite][0] == 1376 and 600 < sizes[suite][1] < 1400 for suite in ("named", "many"))
