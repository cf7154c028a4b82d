"""What a run shows, and the plots of its files."""

import io
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lib.bench import CASE, bad, file, row
from lib.scripts import python_output
from lib.transcript import assert_snapshot
from onepass.tools.bench import report, results, styles
from onepass.tools.bench.cases import SUITES
from onepass.tools.bench.plots import _name_ends, draw, plt
from onepass.tools.bench.progress import Progress
from onepass.tools.bench.results import Row
from onepass.tools.gallery import VARIANTS

GRAPH = [
    row(10.0, provider="copy", graph_us=8.0, gbps=80.0, copy_fraction=1.0),
    row(11.0, graph_us=10.0, copy_fraction=0.9, call_us=17.0),
    row(40.0, provider="torch", graph_error="RuntimeError: capturing", copy_fraction=0.25),
    row(None, None, provider="naive", ok=False, error="wrong: error 1.0"),
]
DISTURBED = [
    row(10.0, provider="copy", copy_fraction=1.0, threads=2),
    row(20.0, copy_fraction=0.5, threads=2),
    row(40.0, provider="torch", copy_fraction=0.25, threads=2),
    row(10.0, provider="copy", case="odd", copy_fraction=1.0, gbps=80.0, disturbed="so", threads=2),
    row(1.0, case="odd", copy_fraction=10.0, disturbed="so", threads=2),
    row(40.0, case="odd", provider="torch", copy_fraction=0.25, disturbed="so", threads=2),
]


LOGSUMEXP = [
    row(us, case=case, function="logsumexp", input_copy_us=100.0, copy_fraction=0.9, gbps=1.0)
    for case, us in (("a", 50.0), ("logsumexp, b", 72.0))
]


def shown(*rows: Row) -> str:
    out = io.StringIO()
    progress = Progress(len(rows), "title", Console(file=out, width=1000))
    with progress:
        for key in dict.fromkeys(r.key() for r in rows):
            progress.start_case(CASE, "float32")
            progress.finish_case([r for r in rows if r.key() == key])
        progress.finish(rows)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def test_a_run_shows_graphs_disturbed_times_and_a_logsumexp_beside_a_copy_of_its_input() -> None:
    assert_snapshot("runs", "\n\n".join(shown(*rows) for rows in (GRAPH, DISTURBED, LOGSUMEXP)))


def test_means_of_several_cases() -> None:
    large = {"case": "c", "shape": [2, 8_000_000]}  # not a small input
    rows = [row(5.0, provider="copy", case=case) for case in "ab"] + [row(7.0, case="a"), row(9.0, case="b")]
    rows += [row(28.0, provider="torch", case="a"), row(18.0, provider="torch", case="b")]
    rows += [row(5.0, provider="copy", **large), row(50.0, **large)]
    over_copy = "inputs under 64 MB, us more than the copy: onepass"
    assert report.summary(rows) == [
        "onepass is 2.83x as fast as torch (geometric mean of 2, 2.00x to 4.00x)",
        f"{over_copy} 3.0 (at most 4.0), torch 18.0 (at most 23.0)",
    ]
    assert report.summary(rows[:3]) == [f"{over_copy} 2.0 (at most 2.0)"]
    assert not any(over_copy in text for text in report.summary([replace(r, threads=2) for r in rows]))
    assert [line.fastest() for line in report.lines(rows)] == ["onepass"] * 3


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, height=30, force_terminal=True, color_system=None)


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_table_fits_the_terminal(width: int) -> None:
    def table(rows: list[Row], **options: Any) -> str:
        console = terminal(width)
        with console.capture() as caught:
            console.print(report.show_table(rows, console, **options))
        assert all(len(line) <= width for line in caught.get().splitlines())
        return caught.get()

    long = [replace(r, case=f"4K attention, 128 queries, {r.shape}", median_us=r.median_us and 123456.7) for r in GRAPH]
    for text, graph in ((table(long), 4), (table([replace(r, graph_us=None, graph_error=None) for r in long]), 0)):
        assert ("shape" in text) == (width == 160)
        assert (text.count("graph"), "8.00" in text) == (graph, graph > 0)
        assert text.count("WRONG") == 1
        assert "…" not in text
        assert all(part in text for part in ("onepass", "torch", "f32", "attention", "queries"))
    assert "17.0" in table(long, calls=True)


def test_a_terminal_shows_the_last_lines_above_a_bar() -> None:
    console = terminal(100)
    screen: Any = console.file
    with Progress(41, "title", console) as progress:
        progress.start_case(CASE, "float32")
        progress.status("timing [x]")
        for i in range(40):
            progress.finish_case([replace(r, case=f"case {i}") for r in GRAPH])
        drawn = screen.getvalue().split("case 38")[-1]
        assert ("case 39" in drawn, "case 1 " in drawn, "40/41" in drawn) == (True, False, True)
        progress.retry(1)
        progress.finish(GRAPH)
    for part in ("tiny 4x33, f32", "timing", "title", "1 of them are timed again", "call time", "shortest call"):
        assert part in screen.getvalue()


def sweep(**fields: Any) -> list[Row]:
    rows = []
    for n in (256, 1024, 4096):
        for i, name in enumerate(("copy", "onepass", "torch", "mine"), 1):
            us = n * 0.01 * i
            rows.append(row(us, provider=name, suite="sweep", case=f"64x{n}", shape=[64, n], bytes=512 * n))
            rows[-1] = replace(rows[-1], **{"gbps": 512 * n / us * 1e-3, "copy_fraction": 1 / i, **fields})
    return rows


def svgs(paths: list[Path]) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in paths if path.suffix == ".svg"}


def png_size(path: Path) -> tuple[int, ...]:
    return tuple(int.from_bytes(path.read_bytes()[i : i + 4], "big") for i in (16, 20))


def test_plots_are_drawn_without_a_clock_or_torch_and_are_the_same_each_time(tmp_path: Path) -> None:
    results.save(file(*sweep(), *GRAPH, torch="2.0", commit="abcdef0123"), tmp_path / "r.json")
    code = f"""
import os, sys, types
os.chdir({str(tmp_path)!r})
package = sys.modules["onepass"] = types.ModuleType("onepass")
package.__path__ = [{str(Path(results.__file__).parents[2])!r}]
from onepass.tools.bench.plots import draw
from onepass.tools.bench.results import load
for folder in ("a", "b"):
    paths = draw([load("r.json")], folder)
print(*[p.name for p in paths])
assert "torch" not in sys.modules and "onepass.tools.bench.timing" not in sys.modules, "imported"
"""
    drawn = python_output(code).split()
    names = ("models-softmax-forward-float32", "sweep-softmax-forward-float32")
    assert sorted(drawn) == [f"{n}.{end}" for n in names for end in ("png", "svg")]
    for name in drawn:
        first, second = ((tmp_path / folder / name).read_bytes() for folder in ("a", "b"))
        assert len(first) > 5000
        assert first == second, f"{name} differs from run to run"
        assert name.endswith("svg") or first.startswith(b"\x89PNG")


def test_a_newer_file_replaces_an_older_one_and_devices_have_plots_of_their_own(tmp_path: Path) -> None:
    old, new = file(*sweep(gbps=1.0), date="2020-01-01"), file(*sweep())
    assert svgs(draw([new, old], tmp_path / "both")) == svgs(draw([new], tmp_path / "new"))
    assert sorted(svgs(draw([new, file(*sweep(threads=2), device="Other/CPU")], tmp_path / "two"))) == [
        "sweep-softmax-forward-float32-H200.svg",
        "sweep-softmax-forward-float32-Other-CPU-2-threads.svg",
    ]
    assert draw([file(*DISTURBED[3:])], tmp_path) == []  # all are disturbed
    assert len(draw([file(*DISTURBED)], tmp_path)) == 2


def test_the_whole_gallery_and_many_cases_fit_on_a_page_with_a_style_per_variant(tmp_path: Path) -> None:
    names = ["onepass", "torch", "torch-compile", "liger", "onepass-triton", "onepass-cuda", *VARIANTS]
    looks = [styles.style(name) for name in names]
    assert len({label for label, _, _ in looks}) == len({colour for _, colour, _ in looks}) == len(names)
    assert {"naive", *styles.GALLERY_STYLES} == set(VARIANTS)
    many = [
        row(provider=name, case=f"case {c}", copy_fraction=3.0 if c == 0 else 0.5)
        for c in range(24)
        for name in ("onepass", "torch", "naive", "a", "b", "copy")
    ]
    sizes = {"sweep": (256, 512, 1024), "named": (256, 300), "many": tuple(range(200, 209))}  # curves, bars, markers
    rows = [
        row(provider=name, suite=suite, case=f"N {n}", shape=[64, n] if suite == "sweep" else [1, 64, n])
        for suite, lengths in sizes.items()
        for n in lengths
        for name in ("copy", "onepass", "torch", *VARIANTS)
    ]
    rows = [replace(r, gbps=1000 / (i % 14 + 1), copy_fraction=1 / (i % 14 + 1)) for i, r in enumerate(rows)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns if a legend leaves no room
        paths = draw([file(*rows, *many)], tmp_path)
    drawn = {path.name.split("-")[0]: png_size(path) for path in paths if path.suffix == ".png"}
    assert set(drawn) == {*sizes, "models"}
    assert drawn["sweep"] == (1568, 992)
    assert all(drawn[suite][0] == 1376 and 600 < drawn[suite][1] < 1400 for suite in ("named", "many"))
    assert 1200 <= drawn["models"][0] <= 1500
    assert drawn["models"][1] <= 1600


def test_curves_over_lengths_have_gaps_and_names_that_do_not_touch(tmp_path: Path) -> None:
    fractions = {"copy": 1.0, "onepass": 0.99, "torch": 0.5, "liger": 0.5, "quack": 0.98, "naive": 0.01}
    rows = [
        replace(row(provider=name, suite="lengths", case=case.name, shape=[1, case.shape[1]]), median_us=1 / fraction)
        for case in SUITES["lengths"].cases
        for name, fraction in fractions.items()
        if not (name == "quack" and case.shape[1] % 8)
    ]
    paths = draw(
        [file(*rows, bad("unsupported: odd", provider="quack", suite="lengths", case="drawn, N 27", shape=[1, 27]))],
        tmp_path,
    )
    assert [png_size(path) for path in paths if path.suffix == ".png"] == [(1376, 768)]
    axes = plt.subplots()[1]
    _name_ends(axes, fractions, list(fractions)[1:])
    places = {text.get_text(): text.xyann[1] for text in axes.texts}
    assert next(iter(places)) == "naive PyTorch"
    heights = list(places.values())
    assert min(b - a for a, b in pairwise(heights)) > 0.045 * axes.get_ylim()[1]
    assert all(abs(places[styles.style(name)[0]] - of) < 0.06 for name, of in fractions.items())
    plt.close("all")
