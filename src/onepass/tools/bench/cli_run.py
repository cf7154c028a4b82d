"""One run of `onepass bench`, from its options to the files that it writes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from onepass.tools.bench import timing
from onepass.tools.bench.cases import Case
from onepass.tools.bench.progress import make_progress
from onepass.tools.bench.providers import COPY, Provider, registry, select_providers
from onepass.tools.bench.providers.gallery import GalleryProvider
from onepass.tools.bench.results import STDOUT, Results, as_text, save
from onepass.tools.bench.runner import DeviceLost, Runner
from onepass.tools.bench.suites import CPU_FILL, SUITES
from onepass.tools.bench.text_table import BASELINE, OURS, lines, speedup_cell


@dataclass(frozen=True)
class Options:
    """The options of `onepass bench`. An empty value leaves the choice to the suites."""

    suites: tuple[str, ...] = ("models",)
    quick: bool = False
    device: str | None = None
    dtypes: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    direction: str | None = None
    pattern: str = ""
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    gallery: bool = False
    graph: bool = False
    seconds: float | None = None
    threads: int | None = None
    seed: int = 0
    json: str | None = None
    plot: str | None = None


def parse_device(name: str | None) -> torch.device:
    """The device of this name; by default a GPU, else the CPU. Raises ValueError if it does not exist here."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}: take cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the benchmark has no clock for {device.type!r}: take cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not available: there are {torch.cuda.device_count()} GPUs")
    return device


def select_cases(options: Options, device: torch.device) -> tuple[list[tuple[Case, str]], str]:
    """The (case, dtype) pairs to run, and a sentence that describes them. Raises ValueError if there are none."""
    for name in options.suites:
        if name not in SUITES:
            raise ValueError(f"unknown suite {name!r}: there are {', '.join(SUITES)}")
    names = ", ".join(options.suites)
    every = [case for name in dict.fromkeys(options.suites) for case in SUITES[name].cases]
    cases = [c for c in every if options.pattern.lower() in c.name.lower()]
    if not cases:
        raise ValueError(f"no case of {names} has {options.pattern!r} in its name")
    if options.quick:
        cases = [c for c in cases if device.type in c.quick]
        if not cases:
            raise ValueError(f"no case that --quick runs on {device.type} has {options.pattern!r} in its name")
    text = f"{names}: {len(cases)} cases"
    if len(cases) < len(every):
        why = f"--quick on {device.type}" if options.quick else f"those with {options.pattern!r}"
        text = f"{names}: {len(cases)} of {len(every)} cases ({why})"
    max_fill = CPU_FILL if options.quick and device.type == "cpu" else None
    pairs: dict[tuple[Case, str], tuple[Case, str]] = {}
    for function in options.functions or (None,):
        for case in cases:
            case = replace(case, function=function or case.function, direction=options.direction or case.direction)
            for dtype in options.dtypes or case.dtypes:
                sized = case.at(dtype, max_fill)
                # Some suites have a shape for two functions or directions; choosing one makes these the same case.
                merge = case.fill or options.functions or options.direction
                key = replace(sized, name="", quick=()) if merge else sized
                pairs.setdefault((key, dtype), (sized, dtype))
    return list(pairs.values()), text


@contextlib.contextmanager
def messages_on_stderr(json: str | None) -> Iterator[TextIO]:
    """Yields stdout. If the JSON goes there, everything that is printed within goes to stderr."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if json == STDOUT else contextlib.nullcontext():
        yield stdout


def list_data(device: torch.device) -> dict[str, Any]:
    """What `--list --json` prints."""
    fields = ("name", "label", "gallery", "quick")
    return {
        "device": str(device),
        "providers": [
            {name: getattr(p, name) for name in fields}
            | {"unavailable": p.unavailable(device), "redundant": p.redundant(device)}
            for p in registry().values()
        ],
        "suites": [{"name": s.name, "about": s.about, "cases": len(s.cases)} for s in SUITES.values()],
    }


def list_text(device: torch.device) -> str:
    """What `--list` prints."""
    known = registry().values()
    text = [f"providers on {device}:", *(_list_line(p, device) for p in known if not p.gallery)]
    text.append(f"  {COPY.name:<17} runs always: the others are measured by it")
    text.append("variants of the gallery, which run with --gallery, or one by its name with --only:")
    text += [*(_list_line(p, device) for p in known if p.gallery), "suites:"]
    for suite in SUITES.values():
        dtypes = ", ".join(dict.fromkeys(d for c in suite.cases for d in c.dtypes))
        quick = sum(device.type in c.quick for c in suite.cases)
        text.append(f"  {suite.name:<17} {len(suite.cases)} cases, {quick} of them with --quick; {dtypes}")
        text.append(f"  {'':<17} {suite.about}")
    return "\n".join(text)


def _list_line(provider: Provider, device: torch.device) -> str:
    unavailable, redundant = provider.unavailable(device), provider.redundant(device)
    note = ""
    if unavailable is not None:
        note = f" -- not available: {unavailable}"
    elif redundant:
        note = f" -- only with --only: {redundant}"
    elif not provider.quick:
        note = " -- not part of --quick"
    return f"  {provider.name:<17} {provider.label}{note}"


def bench(options: Options) -> int:
    """Runs, shows and writes. Returns the exit status: 1 if onepass was wrong or raised, 130 if it was interrupted.

    Raises ValueError for an option that cannot be met.
    """
    device = parse_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    pairs, text = select_cases(options, device)
    providers, excluded = select_providers(device, options.only, options.skip, options.quick, options.gallery)
    if options.graph and device.type == "cpu":
        raise ValueError("--graph is the time in a CUDA graph and needs a GPU")
    budget = timing.QUICK if options.quick else timing.FULL
    if options.seconds is not None:
        budget = budget.limit(options.seconds)
    named = frozenset(options.only)
    with messages_on_stderr(options.json) as stdout:
        runner = Runner(device, providers, budget=budget, seed=options.seed, named=named, graph=options.graph)
        runner.results.environment["quick"] = options.quick
        head = [text, f"providers: {', '.join(p.name for p in providers)}", *_exclusions(excluded)]
        hint = [] if options.gallery or options.only else ["  --gallery adds the variants of the gallery"]
        _print_head(runner.results, [*head, *hint])
        status = _run(runner, pairs)
        _write(runner.results, options.json, options.plot, stdout)
    bad = [r for r in runner.results.rows if r.provider.startswith(OURS) and not r.ok]
    return status or int(any((r.error or "").startswith(("wrong", "raised")) for r in bad))


def bench_variant(
    provider: GalleryProvider,
    case: Case,
    dtype: str,
    device: torch.device,
    baseline: bool = True,
    seed: int = 0,
    json: str | None = None,
) -> int:
    """Checks and times one variant of the gallery on one case, as `onepass gallery run` does.

    `baseline` times torch beside it. `json` names the results file ("-" is stdout), whose environment has the launch
    parameters. Returns the exit status: 0 if the variant was timed, 1 if it was not, 130 if the run was interrupted.
    """
    providers = [provider, registry()[BASELINE]] if baseline else [provider]
    runner = Runner(device, providers, seed=seed, graph=True)
    runner.results.environment["quick"] = False
    if provider.launch:
        runner.results.environment["launch"] = {provider.name: provider.launch}
    launch = ", ".join(f"{name} {value}" for name, value in provider.launch.items())
    with messages_on_stderr(json) as stdout:
        _print_head(runner.results, [f"{provider.name}: {provider.label}" + (f"; {launch}" if launch else "")])
        status = _run(runner, [(case, dtype)])
        rows = runner.results.rows
        for speedup in filter(None, (speedup_cell(line, provider.name) for line in lines(rows))):
            disturbed = " (disturbed)" * ("?" in speedup)
            print(f"{provider.name} is {speedup.removesuffix('?')}x as fast as {BASELINE}{disturbed}")
        _write(runner.results, json, None, stdout)
    timed = any(row.provider == provider.name and row.ok for row in rows)
    return status or (0 if timed else 1)


def _run(runner: Runner, pairs: Sequence[tuple[Case, str]]) -> int:
    """Runs with a progress display. Returns 1 if the GPU was lost, 130 if the run was interrupted, else 0."""
    name = runner.results.environment["device"]
    progress = runner.progress = make_progress(len(pairs), f"{name}: microseconds, and the fraction of a copy's speed")
    status = 0
    try:
        with progress:
            runner.run(pairs)
    except DeviceLost as error:
        progress.say(f"stopped: {error}")
        status = 1
    except KeyboardInterrupt:
        progress.say("stopped: what was measured so far is kept")
        status = 130
    if runner.results.rows:
        progress.finish(runner.results.rows)
    return status


def _print_head(results: Results, text: Sequence[str]) -> None:
    e = results.environment
    where = f"{e['device']}, {e['threads']} threads, {e['isa']}" if e["device_type"] == "cpu" else e["device"]
    print(f"onepass {e['onepass']}, torch {e['torch']}, on {where}", *text, sep="\n")
    if e["device_type"] == "cpu" and e["load"] is not None and e["load"] > 0.5:
        print(f"  this machine is busy (a load of {e['load']} before the run): times on the CPU will be too long")
    print(flush=True)


def _exclusions(excluded: dict[str, str]) -> list[str]:
    """The excluded providers, a line per reason, without engines for another kind of device."""
    names: dict[str, list[str]] = {}
    for name, reason in excluded.items():
        if not reason.startswith("does not support"):
            names.setdefault(reason, []).append(name)
    return [f"  without {', '.join(those)}: {reason}" for reason, those in names.items()]


def _write(results: Results, json: str | None, plot: str | None, stdout: TextIO) -> None:
    """Writes the results, to a file or to stdout, and the plots, and prints their paths."""
    if json == STDOUT:
        stdout.write(as_text(results))
    if not results.rows:
        return
    if json and json != STDOUT:
        save(results, json)
    if plot and any(r.ok for r in results.rows):
        try:
            from onepass.tools.bench.plots import draw
        except ImportError as error:
            print(f"no plot: {error.name} is not installed")
        else:
            for path in draw([results], Path(plot)):
                if path.suffix == ".png":
                    print(f"plot: {path}")
    if json != STDOUT:
        print(f"results: {json}" if json else "results: not saved (--json FILE saves them)")
