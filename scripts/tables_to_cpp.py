"""Make the tables that `onepass tune --out FILE.json` wrote the built-in ones: rewrites what is between the marks in
src/onepass/csrc/plan/tables_h200.h.

python scripts/tables_to_cpp.py FILE.json [--to tables_h200.h]
"""

import argparse
import os
from pathlib import Path

from onepass.native import TIERS, set_tables
from onepass.tables import ANY, NAMES, TableFile, read

HEADER = Path(__file__).parent.parent / "src/onepass/csrc/plan/tables_h200.h"
BEGIN, END = "  // begin: ", "  // end"


def entry_text(limit: int, tier: int, *numbers: int) -> str:
    """An entry as C++.

    >>> entry_text(24, 0, 2, 0, 1, 0)
    '{24, kWarp, 2, 0, 1, 0}'
    """
    name = "kUseWriteTable" if tier < 0 else "k" + TIERS[tier].title().replace("-", "")
    return f"{{{', '.join(map(str, ['kAnyLength' if limit == ANY else limit, name, *numbers]))}}}"


def wrapped(entries: list[str]) -> list[str]:
    """Lines with as many entries as fit 120 columns."""
    lines: list[str] = []
    for entry in entries:
        if lines and len(lines[-1]) + len(entry) < 119:
            lines[-1] += f" {entry},"
        else:
            lines.append(f"          {entry},")
    return lines


def lines_of(stored: TableFile) -> list[str]:
    """The marks and the lines between them."""
    date = stored.date[:10]
    lines = [f"{BEGIN}{stored.gpu}, {date}", "  static const Tables tables = {"]
    lines.append(f'      "built in, measured on {stored.gpu}, {date}",')
    for name in NAMES:
        lines += [f"      {{  // {name}", *wrapped([entry_text(*entry) for entry in stored.tables[name]]), "      },"]
    return [*lines, "  };", END]


def rewritten(text: str, stored: TableFile) -> str:
    """The header with these tables. ValueError if it does not have each mark once, in order."""
    lines = text.splitlines()
    begins = [at for at, line in enumerate(lines) if line.startswith(BEGIN)]
    ends = [at for at, line in enumerate(lines) if line == END]
    if len(begins) != 1 or len(ends) != 1 or ends < begins:
        raise ValueError(f"no header with the marks {BEGIN.strip()!r} and {END.strip()!r}")
    return "\n".join([*lines[: begins[0]], *lines_of(stored), *lines[ends[0] + 1 :]]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--to", type=Path, default=HEADER, help="the header (default: %(default)s)")
    options = parser.parse_args()
    try:
        stored = read(options.file)
        set_tables(stored.gpu, stored.origin, stored.tables)  # the engine raises an error for invalid entries
        if not stored.gpu.isprintable() or '"' in stored.gpu or "\\" in stored.gpu:
            raise ValueError(f"a GPU has a plain name, got {stored.gpu!r}")
        text = rewritten(options.to.read_text(encoding="utf-8"), stored)
    except (ValueError, OSError, RuntimeError) as error:
        parser.error(str(error).removeprefix("onepass: "))
    aside = options.to.with_name(f".{options.to.name}.new")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, options.to)
    count = sum(map(len, stored.tables.values()))
    print(f"{options.to}: {count} entries of {stored.gpu}; `make setup` builds them in")


if __name__ == "__main__":
    main()
