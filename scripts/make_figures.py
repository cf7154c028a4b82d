"""Write the tables and the pictures of the docs from the results files that they cite (`make figures`).

A table stands in a page between `<!-- table: NAME -->` and `<!-- end -->`. `--check` writes nothing, and exits with
status 1 where a page's table is not what its file says. Every mean is a geometric one over all points of the file (of
one function, direction and dtype where the table says so) that both providers computed right.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean as geomean
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import course_tables  # noqa: E402
from result_files import (  # noqa: E402
    CPU,
    FILES,
    GPT,
    GPU,
    OTHERS,
    PHASES,
    PICTURES,
    RANDOM,
    RANDOM_COLUMNS,
    RANDOM_SCORES,
    README,
    RESULTS,
    SEGMENTS,
    SHARDED,
    link,
)

from onepass.tools.bench.random_report import class_groups, class_table, others_of, ratios_of, segment_groups  # noqa: E402
from onepass.tools.bench.report import lines, us_text  # noqa: E402
from onepass.tools.bench.results import Row, load  # noqa: E402
from onepass.tools.terminal import console, progress_bar  # noqa: E402

T = TypeVar("T")

PLOTS = ROOT / "docs" / "plots"
PAGES = (
    "README.md",
    *(
        f"docs/{page}.md"
        for page in ("columns", "cpu", "distributed", "gallery", "losses", "performance", "rows", "scores", "segments")
    ),
    *sorted(f"docs/course/{path.name}" for path in (ROOT / "docs" / "course").glob("*.md")),
)
NOISE = 0.03  # times that differ by less count as equal


def rows_of(key: str, function: str | None = None, direction: str | None = None) -> list[Row]:
    """The rows of a file, or only those of a function and a direction."""
    rows = [r for r in load(RESULTS / FILES[key]).rows if not r.disturbed]
    return [r for r in rows if function in (None, r.function) and direction in (None, r.direction)]


def gallery_results() -> course_tables.Results:
    course = [row for path in sorted(RESULTS.glob("course-*.json")) for row in load(path).rows]
    of_loops = [row for row in rows_of("gallery-powers-cpu") if row.provider.startswith("cpu-")]
    return course_tables.Results([*rows_of("gallery-powers"), *of_loops], course)


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body))


def ratios_to(rows: Sequence[Row], other: str) -> list[float]:
    """How many times as fast as `other` onepass is, at each point where both were right."""
    return [r for line in lines(rows) if (r := line.speedup(other)) is not None]


def mean(rows: Sequence[Row], other: str) -> float:
    return geomean(ratios_to(rows, other))


def times(rows: Sequence[Row], other: str) -> str:
    """How many times as fast as `other` onepass is: the mean, the least, and the number of points."""
    ratios = ratios_to(rows, other)
    return f"{geomean(ratios):.2f} (least {min(ratios):.2f}; {len(ratios)})" if ratios else "-"


def fractions(rows: Sequence[Row], provider: str = "onepass") -> list[float]:
    return [r.copy_fraction for r in rows if r.provider == provider and r.ok and r.copy_fraction]


def summary(workloads: Sequence[tuple[str, str, str | None, str | None]], others: Sequence[str]) -> str:
    """A line per workload: the fraction of the limit's speed, and how many times as fast as each other provider."""
    head = ["workload", "points", "of the limit (worst)", *(f"x {OTHERS[name]}" for name in others), "file"]
    body = []
    for label, key, function, direction in workloads:
        rows = rows_of(key, function, direction)
        of = fractions(rows)
        cells = [label, str(len(of)), f"{geomean(of):.3f} ({min(of):.2f})"]
        body.append([*cells, *(times(rows, name) for name in others), link(FILES[key])])
    return markdown(head, body)


def drawn() -> list[Row]:
    newer = [row for file in RANDOM_COLUMNS for row in load(RESULTS / file).rows]
    again = {row.suite for row in newer}
    rows = [row for file in RANDOM for row in load(RESULTS / file).rows if row.suite not in again] + newer
    return [row for row in rows if not row.disturbed]


def drawn_scores() -> list[Row]:
    return [row for file in RANDOM_SCORES for row in load(RESULTS / file).rows if not row.disturbed]


def random_classes(rows: Sequence[Row]) -> str:
    """A line per class of random shapes."""
    head, body = class_table(class_groups(rows), others_of(rows))
    return markdown([cell.replace("\n", " ") for cell in head], body)


def slower(rows: Sequence[Row], *others: str) -> str:
    """A line per random shape at which one of `others` was faster by more than the noise."""
    found = [(ratio, line, name) for line in lines(rows) for name in others if (ratio := line.speedup(name))]
    body = [
        [line.case, line.dtype, name, f"{ratio:.2f}"]
        for ratio, line, name in sorted(found, key=lambda each: each[0])
        if ratio < 1 - NOISE
    ]
    return markdown(["shape", "dtype", "faster", "speed of onepass"], body)


def scores() -> str:
    """A line per case: the fraction of the limit's speed, and how many times as fast as torch's steps, compiled or
    not."""
    body = []
    for line in lines(rows_of("scores")):
        values = line.fraction(), line.speedup("torch"), line.speedup("torch-compile")
        case = line.case.replace("softmax backward", "gradient")
        body.append([case, line.dtype, *(_ratio(value) for value in values)])
    return markdown(["case", "dtype", "of the limit", "x torch", "x torch.compile"], body)


def losses() -> str:
    """A line per case: the fraction of the limit's speed, and how many times as fast as other providers."""
    compiled = {(line.case, line.dtype): line.speedup("torch-compile") for line in lines(rows_of("losses-compile"))}
    body = []
    for line in lines(rows_of("losses")):
        ratios = *(line.speedup(other) for other in ("torch", "liger", "quack")), compiled[line.case, line.dtype]
        body.append([line.case, line.dtype, *(_ratio(value) for value in (line.fraction(), *ratios))])
    return markdown(["case", "dtype", "of the limit", "x torch", "x Liger", "x QuACK", "x torch.compile"], body)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def segments(key: str) -> str:
    """A line per named case, and a line per class of other cases with the mean and the least: the fraction of the
    limit's speed, and how many times as fast as the faster of PyTorch Geometric's two variants, compiled or not."""
    rows = [r for file in SEGMENTS[key] for r in load(RESULTS / file).rows if not r.disturbed]
    cases: list[tuple[str, str, dict[str, list[float]]]] = []
    for name, group in segment_groups(rows).items():
        if name.startswith("named"):
            text = [line.case.replace("softmax backward", "gradient") for line in group]
            cases += [(case, line.dtype, ratios_of([line])) for case, line in zip(text, group, strict=True)]
        else:
            cases.append((f"{name.replace('-', ', ')}, {len(group)} cases: mean (least)", "", ratios_of(group)))
    columns = {"of the limit": "the limit", "x PyG": "PyG's fastest", "x PyG compiled": "PyG's fastest compiled"}
    columns = {head: label for head, label in columns.items() if any(label in ratios for *_, ratios in cases)}

    def cell(values: Sequence[float]) -> str:
        return f"{geomean(values):.2f}" + f" ({min(values):.2f})" * (len(values) > 1) if values else "-"

    body = [[case, dtype, *(cell(of.get(label, ())) for label in columns.values())] for case, dtype, of in cases]
    return markdown(["case", "dtype", *columns], body)


def gpt() -> str:
    """A line per run of a small GPT: its losses, the time of a step and its memory."""
    body = []
    for file in GPT:
        record = json.loads((RESULTS / file).read_text())
        ms, mb = record["median_step_ms"], record["peak_step_mb"]
        for run, losses in record["losses"].items():
            cells = [f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{ms[run]:.0f}", f"{ms['torch'] / ms[run]:.2f}"]
            body.append([f"[{record['device']}](benchmarks/results/{file})", run, *cells, f"{mb[run]:.0f}"])
    return markdown(["device", "run", "first loss", "last loss", "ms a step", "x torch", "MB a step"], body)


def _named(row: Row) -> str:
    function = "" if row.function == "softmax" else f", {row.function}"
    return f"{row.case}{function}{', gradient' if row.direction == 'backward' else ''}"


def sharded(provider: str = "onepass", of: str = "sharded") -> str:
    """Each case on two GPUs and on four: its time over that of a copy of the shard, and how many times as fast as
    torch's function it is."""
    found: dict[str, dict[tuple[int, str], float]] = {}
    for ranks in SHARDED:
        for row in load(RESULTS / f"{of}-{ranks}-h200-2026-11-27.json").rows:
            if row.ok and row.median_us and not row.disturbed and row.dtype == "bfloat16":
                case = _named(row)
                found.setdefault(case, {})[ranks, row.provider] = row.median_us
    body = []
    for case, us in found.items():
        cells = [case]
        for ranks in SHARDED:
            own, copy = us.get((ranks, provider)), us.get((ranks, "copy"))
            torchs = us.get((ranks, "dtensor")) or us.get((ranks, "loss_parallel"))
            cells += [us_text(own), f"{own / copy:.2f}"] if own and copy else ["-", "-"]
            cells.append(f"{torchs / own:.1f}" if own and torchs else "-")
        if set(cells[1:]) != {"-"}:
            body.append(cells)
    head = [f"{ranks} GPUs: {of}" for ranks in SHARDED for of in ("us", "times a copy", "x torch")]
    return markdown(["rows x columns", *head], body)


def phases() -> str:
    """Each phase on one GPU: the fraction of the limit's speed, by dtype."""
    found: dict[str, dict[str, str]] = {}
    for row in load(RESULTS / PHASES).rows:
        if row.ok and row.provider == "onepass" and row.copy_fraction:
            found.setdefault(_named(row), {})[row.dtype] = f"{row.copy_fraction:.2f}"
    dtypes = ("bfloat16", "float32")
    return markdown(["phase", *dtypes], [[case, *(of.get(d, "-") for d in dtypes)] for case, of in found.items()])


def random_on_cpus() -> str:
    """A line per file, over all its random shapes."""
    body = []
    for isa, named in (("avx512", "AVX-512"), ("avx2", "AVX2")):
        for threads in (1, 2):
            file = f"random-cpu-xeon-{isa}-{threads}t-2026-11-26.json"
            rows = load(RESULTS / file).rows
            head, (*_, cells) = class_table(class_groups(rows), others_of(rows))
            body.append([link(file, f"{named}, {threads} of 2 cores"), *cells[1:]])
    return markdown([cell.replace("\n", " ").replace("class", "CPU") for cell in head], body)


def readme() -> str:
    """The README's table, which has only means."""
    body = []
    for label, key, function, direction in README:
        rows = rows_of(key, function, direction)
        of = fractions(rows)
        cells = [f"{mean(rows, name):.1f}" for name in ("torch", "torch-compile")]
        body.append([link(FILES[key], label), f"{geomean(of):.2f} ({min(of):.2f})", *cells])
    return markdown(["workload", "of the limit (worst)", "x torch", "x torch.compile"], body)


def columns() -> str:
    """Each point of the suite `columns`: the fraction of the limit's speed, by direction and dtype."""
    kinds = [(way, dtype) for way in ("forward", "backward") for dtype in ("float32", "bfloat16")]
    found: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows_of("columns"):
        if row.provider == "onepass" and row.copy_fraction:
            case = row.case.removeprefix("softmax backward, ")
            found.setdefault(case, {})[row.direction, row.dtype] = row
    head = ["input"] + [f"{'softmax' if way == 'forward' else 'gradient'}, {dtype}" for way, dtype in kinds]
    body = [[case, *(f"{of[kind].copy_fraction:.2f}" for kind in kinds)] for case, of in found.items()]
    return markdown(head, body)


def gallery_means() -> str:
    rows = rows_of("gallery-seeds")
    names = {r.provider for r in rows} - {"copy"}
    means = sorted(((geomean(fractions(rows, n)), n) for n in names if fractions(rows, n)), reverse=True)
    return markdown([name for _, name in means], [[f"{mean:.2f}" for mean, _ in means]])


def gallery_powers() -> str:
    rows = rows_of("gallery-powers")
    names = ["copy", *dict.fromkeys(r.provider for r in rows if r.provider != "copy")]
    found = {(r.shape[1], r.provider): r for r in rows if r.ok}
    lengths = sorted({n for n, _ in found})
    gbps = lambda n, name: f"{found[n, name].gbps:.0f}" if (n, name) in found else "-"  # noqa: E731
    return markdown(["", *map(str, lengths)], [[name, *(gbps(n, name) for n in lengths)] for name in names])


# The tables of the two tutorials, by N: speed of persistent Triton over torch in the newer one; of Triton with a
# program per row over torch and over TorchScript in the older one.
_PUBLISHED = {
    256: ("0.70", "0.92", "2.7"),
    512: ("0.81", "1.00", "2.7"),
    768: ("0.86", "1.04", "2.7"),
    1024: ("0.89", "", ""),
    1152: ("1.79", "", ""),
    2048: ("1.33", "", ""),
    4096: ("1.06", "", ""),
    8192: ("0.97", "", ""),
    12160: ("0.94", "1.06", "3.4"),
    12288: ("1.03", "1.16", "3.4"),
    12672: ("1.04", "1.15", "3.5"),
}
_RATIOS = (("triton-persistent", "torch"), ("triton-row", "torch"), ("triton-row", "naive-jit"))


def gallery_published() -> str:
    """The ratios of the published tables, each followed by ours."""
    us = {(r.shape[1], r.provider): r.median_us for r in rows_of("gallery-seeds") if r.ok and r.median_us}
    whose = ("newer tutorial", "older tutorial", "older tutorial")
    head = ["N"]
    for tutorial, (ours, other) in zip(whose, _RATIOS, strict=True):
        head += [f"{tutorial}: `{ours}` over `{other}`", "here"]
    body = []
    for n, published in _PUBLISHED.items():
        here = [f"{us[n, other] / us[n, ours]:.2f}" for ours, other in _RATIOS]
        body.append([str(n), *(cell for pair in zip(published, here, strict=True) for cell in pair)])
    return markdown(head, body)


def few() -> str:
    """Microseconds of each point of the suite `few-long-rows`."""
    names = ["copy", "onepass", "quack", "torch-compile", "torch"]
    rows = {(r.case, r.dtype, r.provider): r for r in rows_of("few")}
    body = []
    for case, dtype in dict.fromkeys(key[:2] for key in rows):
        of = [rows.get((case, dtype, name)) for name in names]
        body.append([case, dtype, *(us_text(r.median_us) if r and r.ok and r.median_us else "-" for r in of)])
    return markdown(["rows", "dtype", *(OTHERS.get(name, name) for name in names)], body)


def call() -> str:
    """CPU time of a call on 128 x 128, onepass's and torch's, from the files of `scripts/time_call.py`."""
    body = []
    for file in ("call-h200-2026-11-22.json", "call-backward-h200-2026-11-22.json"):
        functions = json.loads((RESULTS / file).read_text())["functions"]
        for name in (n.removeprefix("onepass.") for n in functions if n.startswith("onepass.")):
            if f"torch.{name}" not in functions:
                continue
            ours, torchs = (functions[f"{who}.{name}"]["median_us"] for who in ("onepass", "torch"))
            if name not in (cells[0] for cells in body):
                body.append([name, us_text(ours), us_text(torchs), f"{ours / torchs:.2f}", link(file)])
    return markdown(["call on 128 x 128", "onepass us", "torch us", "ratio", "file"], body)


TABLES: dict[str, Callable[[], str]] = {
    "readme": readme,
    "gpu": lambda: summary(GPU, ("torch", "torch-compile", "liger", "quack")),
    "cpu": lambda: summary(CPU, ("torch",)),
    "call": call,
    "random": lambda: random_classes(drawn()),
    "random-slower": lambda: slower(drawn(), "torch", "torch-compile"),
    "random-cpu": random_on_cpus,
    "gpt": gpt,
    "losses": losses,
    "scores": scores,
    "scores-random": lambda: random_classes(drawn_scores()),
    "scores-slower": lambda: slower(drawn_scores(), "torch", "torch-compile"),
    **{key: partial(segments, key) for key in SEGMENTS},
    "columns": columns,
    "sharded": sharded,
    "sharded-kernel": partial(sharded, "onepass-kernel", "sharded-kernel"),
    "sharded-phases": phases,
    "few": few,
    "gallery-means": gallery_means,
    "gallery-powers": gallery_powers,
    "gallery-published": gallery_published,
    **dict(course_tables.tables(gallery_results(), markdown)),
}
_PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rewritten(page: Path) -> str:
    """The page's text with new tables."""
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)

    def make(place: re.Match[str]) -> str:
        return f"{place[1]}{TABLES[place[2]]().replace('(benchmarks/', f'({up}benchmarks/')}\n{place[3]}"

    return _PLACE.sub(make, page.read_text())


def shown(work: Sequence[T], what: str) -> Iterator[T]:
    """Yields each item, with a progress bar on a terminal."""
    with progress_bar(console(sys.stderr), transient=True) as bar:
        yield from bar.track(work, description=what)


def draw() -> None:
    """Draws the pictures, with the file names that the docs use."""
    import tempfile

    from draw_course import draw as draw_course
    from draw_masks import draw as draw_masks
    from draw_ranks import draw as draw_ranks
    from make_notebook import main as make_notebook

    from onepass.tools.bench.plots import draw as draw_files

    make_notebook()
    draw_course(ROOT / "docs" / "course" / "pictures")
    draw_masks(PLOTS)
    draw_ranks(PLOTS)
    pictures = [([FILES[key]], wanted) for key, wanted in PICTURES.items()]
    for key, files in SEGMENTS.items():
        curves = "segments-sweep-forward-softmax-forward"
        pictures.append((files, {f"{curves}-{dtype}": f"{key}-{dtype}" for dtype in ("float32", "bfloat16")}))
    for files, wanted in shown(pictures, "pictures"):
        with tempfile.TemporaryDirectory() as folder:
            for path in draw_files([load(RESULTS / file) for file in files], folder):
                if path.suffix == ".png" and path.stem in wanted:
                    path.replace(PLOTS / f"{wanted[path.stem]}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where a table is not its file's")
    check = parser.parse_args().check
    stale = []
    for page in shown([ROOT / name for name in PAGES], "pages"):
        text = rewritten(page)
        if text != page.read_text():
            stale.append(page.name)
            if not check:
                page.write_text(text)
    if check:
        sys.exit(f"make figures: the tables of {', '.join(stale)} are not what the files say" if stale else 0)
    draw()


if __name__ == "__main__":
    main()
