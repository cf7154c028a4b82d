"""A hook of MkDocs (`make docs`): adds pages from files of the repository outside of docs/, and included code.

The README is the first page. Files outside of docs/ that pages link to (results and sources) are copied beside the
pages. Included code is inserted into the pages. The results files of the H200 become one interactive page.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from onepass.tools.bench import html_report
from onepass.tools.bench.results import ResultsError, load

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from included_code import with_code  # noqa: E402

PAGES = {"README.md": "index.md", **{name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}}
REPORT = "h200.html"
_UP = re.compile(r"\]\((\.\./[^)#]+)")  # a link to another folder
_FROM_ROOT = re.compile(r"\]\(([^)#:]+)")


def _outside(link: str, page: str) -> str | None:
    """The file that a page of docs/ links to, as a path from the root of the repository; None if it is in docs/."""
    path = os.path.normpath(os.path.join("docs", os.path.dirname(page), link))
    return None if path.startswith("docs/") else path


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = [f for f in files if f.is_documentation_page()]
    linked = {_outside(link, f.src_uri) for f in pages for link in _UP.findall(f.content_string)} - {None}
    for name, page in PAGES.items():
        text = (ROOT / name).read_text()
        linked |= {link for link in _FROM_ROOT.findall(text) if not link.startswith("docs/")}
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    files.append(File.generated(config, REPORT, content=_report()))
    for link in sorted(linked - set(PAGES)):
        files.append(File.generated(config, link, abs_src_path=str(ROOT / link)))
    return files


def _report() -> str:
    """The page that `onepass report` makes. Files that are not from `onepass bench` are left out."""
    found = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*-h200-*.json")):
        with suppress(ResultsError):
            found[path.name] = load(path)
    return html_report.page(found)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    here = os.path.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        outside = _outside(found[1], page.file.src_uri)
        return found[0] if outside is None else f"]({os.path.relpath(outside, here or '.')}"

    return _UP.sub(link, with_code(markdown, ROOT / "docs" / here))
