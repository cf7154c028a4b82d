"""The site's pages that are files of the repository outside of docs/ (a hook of MkDocs, `make docs`).

The README is the first page. What pages link outside of docs/, results and sources, is copied beside the pages. The
results files of the H200 become one interactive page.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from onepass.tools.bench import html_report
from onepass.tools.bench.results import ResultsError, load

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", **{name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}}
REPORT = "h200.html"
_FROM_DOCS = re.compile(r"\]\(\.\./([^)#]+)")
_FROM_ROOT = re.compile(r"\]\(([^)#:]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    linked = {link for f in files if f.is_documentation_page() for link in _FROM_DOCS.findall(f.content_string)}
    for name, page in PAGES.items():
        text = (ROOT / name).read_text()
        linked |= {link for link in _FROM_ROOT.findall(text) if not link.startswith("docs/")}
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    files.append(File.generated(config, REPORT, content=_report()))
    for link in sorted(linked - set(PAGES)):
        files.append(File.generated(config, link, abs_src_path=str(ROOT / link)))
    return files


def _report() -> str:
    """The page of `onepass report`; other files than those of `onepass bench` are left out."""
    found = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*-h200-*.json")):
        with suppress(ResultsError):
            found[path.name] = load(path)
    return html_report.page(found)


def on_page_markdown(markdown: str, **_: object) -> str:
    return _FROM_DOCS.sub(r"](\1", markdown)
