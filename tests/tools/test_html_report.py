"""The page of `onepass report`, as text; tests/browser has what it does in a browser."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lib.bench import bad, file, row
from lib.paths import RESULTS
from lib.transcript import call, session
from onepass.tools.bench import html_report, results

pytest.importorskip("plotly")
PARTS = sorted((Path(html_report.__file__).parent / "page").iterdir())
KINDS = [f"{name}-h200" for name in ("models", "random-1000", "rows", "slide")] + ["segments-h200-sweep"]


class Elements(HTMLParser):
    """The attributes of all elements, and the text of scripts by their ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: dict[str | None, str] = {}
        self.inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag == "script":
            self.inside = dict(attrs).get("id") or f"script {len(self.scripts)}"

    def handle_endtag(self, tag: str) -> None:
        self.inside = None if tag == "script" else self.inside

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data


def test_the_page_holds_the_data_of_all_files_and_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = [row(2.0, 0.1, provider=p, shape=[8, n], case=f"N {n}") for n in (16, 32, 64) for p in ("copy", "onepass")]
    results.save(file(*sweep, bad(case="</script><b>", provider="torch", shape=[])), tmp_path / "a.json")
    results.save(
        file(row(4.0, disturbed="by tests"), row(2.0, provider="copy", direction="backward")), tmp_path / "b.json"
    )
    monkeypatch.chdir(tmp_path)
    assert session("report a.json b.json -o out/r.html").splitlines()[1:] == ["out/r.html"]
    found = Elements(Path("out/r.html").read_text())

    links = [value for name, value in found.attributes if name in ("src", "href", "srcset", "data", "action")]
    assert links == ["data:,"]
    assert not re.search(r"url\(|@import|https?://", "".join(p.read_text() for p in PARTS))
    assert len(found.scripts) == 3  # the data, Plotly's, the page's: none ended early
    data = json.loads(found.scripts["data"])
    first, second = data["files"]
    assert (first["name"], second["name"]) == ("a.json", "b.json")
    assert first["environment"]["device"] == "H200"
    assert [(g["suite"], g["axis"], g["about"]) for g in first["groups"]] == [
        ("models", "N, the length of a row", "8 rows")
    ]
    assert first["lines"][1][:7] == [0, "N 32", "8x32", 8, 32, 32, 0]
    assert first["lines"][1][7]["onepass"] == [2.0, 1.9, 2.1, 1.0, None, None, ""]
    assert first["lines"][3][1] == "</script><b>"
    assert first["lines"][3][7]["torch"][-1] == "wrong"
    assert second["lines"][0][7]["onepass"][-1] == "disturbed"
    assert [group["limit"] for group in second["groups"]] == ["copy", "add"]
    assert data["providers"]["onepass"] == ["onepass", "#0072B2", "circle"]


def test_every_kind_of_file_has_an_axis_that_fits() -> None:
    axes = {}
    for path in (path for kind in KINDS for path in RESULTS.glob(f"{kind}-2026*.json")):
        data = html_report._file(path.name, results.load(path))
        axes |= {(group["suite"], group["drawn"]): group["axis"] for group in data["groups"]}
        assert all(x is None or x > 0 for *_, x, _, _ in data["lines"])
        assert all(m * n > 0 for _, _, _, m, n, *_ in data["lines"])
    assert axes["row-lengths", False] == "N, the length of a row"
    assert axes["slide/other-dim-b", False] == "the length that moves"
    assert axes["segments/sweep-forward", False] == "mean length of a segment"
    assert {axis for (_, drawn), axis in axes.items() if drawn} == {""} == {axes["models", False]}


def test_segments_are_as_long_as_their_mean() -> None:
    made = row(case="20000 items, 100 segments, Zipf", shape=[20000, 8], dim=0, suite="segments/named-forward")
    assert html_report._rows_and_length(made) == (800, 200)


def test_other_files_and_a_missing_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results.save(file(row()), "right.json")
    results.save(file(bad()), "bad.json")
    Path("call.json").write_text('{"date": "2026-11-22"}')
    Path("sweep.txt").write_text("M 1 N 2\n")
    for name, words in (
        ("call.json", "call.json: schema None is not known, this version reads schemas 1 to 4"),
        ("sweep.txt", "sweep.txt: not JSON (line 1: Expecting value)"),
        ("bad.json", "nothing to show: no timed row in bad.json"),
        ("none.json", "none.json: No such file or directory"),
    ):
        done = call("report", "right.json", name)
        assert (done.exit_code, done.stderr) == (2, f"onepass: {words}\n")
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    done = call("report", "right.json")
    assert done.stderr == "onepass: the page needs plotly, which is not installed: pip install 'onepass[report]'\n"
    assert not Path("report.html").exists()
