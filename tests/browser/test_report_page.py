"""The page of `onepass report` in headless Chromium (`make test-browser`), made of the project's own results files."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.paths import RESULTS
from onepass.tools.bench import html_report, results

sync_api = pytest.importorskip("playwright.sync_api")

ROWS, BEFORE, AFTER = "rows-h200-2026-11-22.json", "seeds-h200-2026-11-24.json", "seeds-gallery-h200-2026-11-24.json"
RANDOM = "random-1000-h200-2026-11-26.json"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FRACTIONS = """name => document.getElementById("chart").data.find(trace => trace.name === name)?.y"""
SHADE = (
    """() => getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).reduce((sum, c) => sum + Number(c), 0)"""
)

Open = Callable[..., Any]


def load() -> dict[str, results.Results]:
    """Every results file there is; benchmarks/results has files of other kinds too."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        try:
            found[path.name] = results.load(path)
        except results.ResultsError:
            continue
    return found


FILES = load()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(html_report.page(FILES), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=program)
        yield made
        made.close()


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Open]:
    """Opens the page with a file selected. At the end nothing was requested, and the console is empty."""
    contexts, messages = [], []

    def opened(file: str = ROWS, more: str = "", width: int = 1280, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or messages.append(request.url))
        page.goto(f"{address}#file={file}{more}")
        page.wait_for_selector("#chart .main-svg")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert messages == []


def cells(page: Any, column: str) -> list[str]:
    """What the table of cases has in a column."""
    at = page.locator("#cases th").all_inner_texts().index(column) + 1
    return page.locator(f"#cases tbody td:nth-child({at})").all_inner_texts()


def numbers(page: Any, column: str) -> list[float]:
    return [float(text) for text in cells(page, column)]


def test_every_file_draws_at_every_width(visit: Open) -> None:
    for width in (1280, 390):
        page = visit(width=width)
        for name in FILES:
            page.evaluate("name => { location.hash = `file=${name}` }", name)
            page.wait_for_function("name => document.getElementById('file').value === name", arg=name)
            assert page.locator("#chart .scatterlayer .point, #chart .js-line").count() > 0, name
            assert page.locator("#cases tbody tr").count() > 0, name
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (name, width)
            assert page.locator("#environments dd").first.inner_text() == FILES[name].environment["device"]
        assert page.locator("#map .heatmaplayer image").count() == 1


def test_controls_change_what_is_shown(visit: Open) -> None:
    page = visit()
    first = page.evaluate(FRACTIONS, "onepass")
    assert page.locator("#title").inner_text() == "row-lengths, softmax, forward, f32"
    page.select_option("#dtype", "bf16")
    assert page.locator("#title").inner_text() == "row-lengths, softmax, forward, bf16"
    assert page.evaluate(FRACTIONS, "onepass") != first

    whole = len(cells(page, "case"))
    page.fill("#text", "n 10")
    assert 0 < len(cells(page, "case")) < whole
    assert all(name.startswith("N 10") for name in cells(page, "case"))
    page.fill("#text", "nothing like it")
    assert page.locator("#title").inner_text() == "No case fits"
    page.fill("#text", "")

    assert page.evaluate(FRACTIONS, "torch") is not None
    page.click("#providers [data-provider=torch]")
    assert page.evaluate(FRACTIONS, "torch") is None
    assert "torch" not in page.locator("#cases th").all_inner_texts()
    page.click("#providers [data-provider=torch]")
    assert page.evaluate(FRACTIONS, "torch") is not None

    assert page.locator("#chart .annotation").text_content() == "1.0 = a copy"
    page.select_option("#metric", "us")
    assert page.locator("#chart .annotation").count() == 0
    assert page.evaluate(FRACTIONS, "the limit") is not None
    page.select_option("#axis", "case")
    assert page.locator("#chart .ytick").count() == whole
    again = page.url
    page.goto("about:blank")
    page.goto(again)
    assert (page.input_value("#dtype"), page.input_value("#metric"), page.input_value("#axis")) == (
        "bf16",
        "us",
        "case",
    )


def test_the_table_sorts_by_any_column(visit: Open) -> None:
    page = visit(RANDOM)
    page.click("#cases [data-sort=n]")
    page.click("#more")
    assert numbers(page, "N") == sorted(numbers(page, "N"))
    assert len(numbers(page, "N")) == 200
    page.click("#cases [data-sort=n]")
    assert numbers(page, "N") == sorted(numbers(page, "N"), reverse=True)
    assert page.locator("#cases th[aria-sort=descending]").inner_text().startswith("N")
    page.click("#cases [data-sort='of onepass']")
    assert numbers(page, "onepass") == sorted(numbers(page, "onepass"))
    page.click("#cases [data-sort=case]")
    assert page.locator("#cases th[aria-sort=ascending]").inner_text() == "case"


def test_light_and_dark(visit: Open) -> None:
    for scheme, lighter in (("light", True), ("dark", False)):
        page = visit(color_scheme=scheme)
        assert (page.evaluate(SHADE) > 127) is lighter
        page.click("#theme")
        assert (page.evaluate(SHADE) > 127) is not lighter
        ground = page.evaluate("document.getElementById('chart').layout.plot_bgcolor")
        assert ground == ("#1b1f26" if lighter else "#ffffff")


def test_a_pointer_shows_numbers_and_zooms(visit: Open) -> None:
    page = visit()
    area = page.locator("#chart .nsewdrag").bounding_box()
    x, y = area["x"] + area["width"] / 2, area["y"] + area["height"] / 2
    page.mouse.move(x, y)
    label = page.locator("#chart .hoverlayer .legend")
    label.wait_for()
    assert "of the limit" in label.text_content()
    bounds = "document.getElementById('chart').layout.xaxis.range"
    whole = page.evaluate(bounds)
    page.mouse.down()
    page.mouse.move(x + 100, y + 100, steps=4)
    page.mouse.up()
    page.wait_for_function(f"{bounds}[0] > {whole[0]}")
    low, high = page.evaluate(bounds)
    assert whole[0] < low < high < whole[1]
    page.mouse.dblclick(x, y)
    page.wait_for_function(f"{bounds}[0] === {whole[0]} && {bounds}[1] === {whole[1]}")


def test_two_files_of_a_suite_are_compared(visit: Open) -> None:
    page = visit(AFTER)
    page.select_option("#base", BEFORE)
    assert page.input_value("#metric") == "change"
    us = {
        name: next(r.median_us for r in FILES[name].rows if r.provider == "onepass" and r.dtype == "float32")
        for name in (BEFORE, AFTER)
    }
    assert numbers(page, "onepass")[0] == pytest.approx(us[AFTER] / us[BEFORE], abs=0.006)
    assert page.locator("#chart .annotation").text_content() == "no change"
    assert BEFORE in page.locator("#about").inner_text()
    page.select_option("#file", ROWS)
    assert page.locator("#base").is_hidden()
    assert page.input_value("#metric") == "fraction"


def test_files_come_together(visit: Open) -> None:
    page = visit("", "&suite=tutorial")
    assert len(page.evaluate("document.getElementById('chart').data.filter(t => t.name.startsWith('onepass'))")) == 2
    assert set(cells(page, "file")) <= set(FILES)
    assert page.locator("#environments details").count() == len(FILES)


def test_a_page_of_one_file_has_no_choice_of_files(visit: Open, tmp_path: Path) -> None:
    path = tmp_path / "one.html"
    path.write_text(html_report.page({ROWS: FILES[ROWS]}), encoding="utf-8")
    page = visit()
    page.goto(path.as_uri())
    assert page.locator("#file").is_hidden()
    assert page.locator("#cases tbody tr").count() > 0
