"""The site's pages that are files of the repository outside of docs/ (a hook of MkDocs, `make docs`).

The README is the first page and the changelog is one. What the docs link outside of docs/, results and sources, is
copied beside the pages.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {file.src_uri: file.content_string for file in files if file.is_documentation_page()}
    pages["index.md"] = re.sub(r"\]\(docs/", "](", (ROOT / "README.md").read_text())
    pages["CHANGELOG.md"] = (ROOT / "CHANGELOG.md").read_text()
    linked = {link for text in pages.values() for link in _OUTSIDE.findall(text)}
    linked |= set(re.findall(r"\]\((benchmarks/[^)#]+)", pages["index.md"]))
    for name in ("index.md", "CHANGELOG.md"):
        files.append(File.generated(config, name, content=pages[name]))
    for link in sorted(linked - {"CHANGELOG.md", "README.md"}):
        files.append(File.generated(config, link, abs_src_path=str(ROOT / link)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    return _OUTSIDE.sub(r"](\1", markdown)
