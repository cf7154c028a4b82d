"""One run of `onepass bench`, from what was asked for to the files it leaves."""

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
from onepass.tools.bench.providers import COPY, Provider, pick, registry
from onepass.tools.bench.report import reporter
from onepass.tools.bench.results import STDOUT, Results, as_text, save
from onepass.tools.bench.run import DeviceLost, Runner
from onepass.tools.bench.rungs import RungProvider
from onepass.tools.bench.suites import CPU_FILL, SUITES
from onepass.tools.bench.table import BASELINE, lines, times_cell


@dataclass(frozen=True)
class Choices:
    """The options of `onepass bench`. Empty means: as the suites have it."""

    suites: tuple[str, ...] = ("models",)
    quick: bool = False
    device: str | None = None
    dtypes: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    direction: str | None = None
    match: str = ""
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    gallery: bool = False
    graph: bool = False
    seconds: float | None = None
    threads: int | None = None
    seed: int = 0
    json: str | None = None
    plot: str | None = None


def device_of(name: str | None) -> torch.device:
    """The device asked for, else a GPU, else the CPU. Raises ValueError for one that is not here."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}: take cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the benchmark has no clock for {device.type!r}: take cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not here: there are {torch.cuda.device_count()} GPUs")
    return device


def select(choices: Choices, device: torch.device) -> tuple[list[tuple[Case, str]], str]:
    """The (case, dtype) pairs to run, and a sentence on what they are. Raises ValueError where none is left."""
    for name in choices.suites:
        if name not in SUITES:
            raise ValueError(f"unknown suite {name!r}: there are {', '.join(SUITES)}")
    every = [case for name in dict.fromkeys(choices.suites) for case in SUITES[name].cases]
    cases = [c for c in every if choices.match.lower() in c.name.lower()]
    if not cases:
        raise ValueError(f"no case of {', '.join(choices.suites)} has {choices.match!r} in its name")
    if choices.quick:
        cases = [c for c in cases if device.type in c.quick]
        if not cases:
            raise ValueError(f"no case of the quick form on {device.type} has {choices.match!r} in its name")
    text = f"{', '.join(choices.suites)}: {len(cases)} cases"
    if len(cases) < len(every):
        form = f"the quick form on {device.type}" if choices.quick else f"those with {choices.match!r}"
        text = f"{', '.join(choices.suites)}: {len(cases)} of {len(every)} cases ({form})"
    most = CPU_FILL if choices.quick and device.type == "cpu" else None
    pairs: dict[tuple[Case, str], tuple[Case, str]] = {}
    for function in choices.functions or (None,):
        for case in cases:
            case = replace(case, function=function or case.function, direction=choices.direction or case.direction)
            for dtype in choices.dtypes or case.dtypes:
                made = case.at(dtype, most)
                # Some suites have a shape for two functions or directions, which one for all makes one case.
                one = case.fill or choices.functions or choices.direction
                key = replace(made, name="", quick=()) if one else made
                pairs.setdefault((key, dtype), (made, dtype))
    return list(pairs.values()), text


@contextlib.contextmanager
def aside(json: str | None) -> Iterator[TextIO]:
    """Gives stdout. Where that is for JSON, what is printed within goes to stderr."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if json == STDOUT else contextlib.nullcontext():
        yield stdout


def listed(device: torch.device) -> dict[str, Any]:
    """What `--list` prints, as data."""
    of = ("name", "label", "gallery", "quick")
    return {
        "device": str(device),
        "providers": [
            {key: getattr(p, key) for key in of} | {"not_here": p.unavailable(device), "as": p.redundant(device)}
            for p in registry().values()
        ],
        "suites": [{"name": s.name, "about": s.about, "cases": len(s.cases)} for s in SUITES.values()],
    }


def listing(device: torch.device) -> str:
    """What `--list` prints."""
    known = registry()
    text = [f"providers on {device}:"]
    text += [_listed(p, device) for p in known.values() if not p.gallery]
    text.append(f"  {COPY.name:<17} always run: the limit that the others are measured by")
    text.append("rungs of the gallery, raced with --gallery, or one by its name with --only:")
    text += [_listed(p, device) for p in known.values() if p.gallery]
    text.append("suites:")
    for suite in SUITES.values():
        dtypes = ", ".join(dict.fromkeys(d for c in suite.cases for d in c.dtypes))
        quick = sum(device.type in c.quick for c in suite.cases)
        text.append(f"  {suite.name:<17} {len(suite.cases)} cases, {quick} of them in the quick form; {dtypes}")
        text.append(f"  {'':<17} {suite.about}")
    return "\n".join(text)


def _listed(provider: Provider, device: torch.device) -> str:
    reason, redundant = provider.unavailable(device), provider.redundant(device)
    note = "" if reason is None else f" -- not here: {reason}"
    if reason is None and redundant:
        note = f" -- only when asked for: {redundant}"
    elif reason is None and not provider.quick:
        note = " -- not in the quick form"
    return f"  {provider.name:<17} {provider.label}{note}"


def bench(choices: Choices) -> int:
    """Runs, shows, writes. Returns the exit status: 1 where onepass was wrong or raised, 130 where it was broken off.

    Raises ValueError for a choice that cannot be met.
    """
    with aside(choices.json) as stdout:
        return _bench(choices, stdout)


def _bench(choices: Choices, stdout: TextIO) -> int:
    device = device_of(choices.device)
    if choices.threads is not None:
        torch.set_num_threads(choices.threads)
    pairs, text = select(choices, device)
    providers, left_out = pick(device, choices.only, choices.skip, choices.quick, choices.gallery)
    if choices.graph and device.type == "cpu":
        raise ValueError("--graph is the time in a CUDA graph: it needs a GPU")
    budget = timing.QUICK if choices.quick else timing.FULL
    if choices.seconds is not None:
        budget = budget.bounded(choices.seconds)
    forced = frozenset(choices.only)
    runner = Runner(device, providers, budget=budget, seed=choices.seed, forced=forced, graph=choices.graph)
    runner.results.environment["quick"] = choices.quick
    _introduce(runner.results, [text, f"providers: {', '.join(p.name for p in providers)}", *_without(left_out)])
    if not choices.gallery and not choices.only:
        print("  the gallery's rungs run with --gallery")
    print(flush=True)
    status = _race(runner, pairs)
    _keep(runner.results, choices.json, choices.plot, stdout)
    ours = [r for r in runner.results.rows if r.provider.startswith("onepass") and not r.ok]
    bad = [r for r in ours if (r.error or "").startswith(("wrong", "raised"))]
    return status or (1 if bad else 0)


def bench_rung(
    provider: RungProvider,
    case: Case,
    dtype: str,
    device: torch.device,
    alone: bool = False,
    seed: int = 0,
    json: str | None = None,
) -> int:
    """Checks and times one rung on one case, beside torch unless `alone`: what `onepass gallery run` does.

    `json` names the results file ("-": stdout), whose environment then holds the launch parameters that were given.
    Returns the exit status: 0 where the rung was timed, 1 where it was not, 130 where the run was broken off.
    """
    runner = Runner(device, [provider] if alone else [provider, registry()["torch"]], seed=seed, graph=True)
    runner.results.environment["quick"] = False
    if provider.launch:
        runner.results.environment["launch"] = {provider.name: provider.launch}
    given = ", ".join(f"{name} {value}" for name, value in provider.launch.items())
    with aside(json) as stdout:
        _introduce(runner.results, [f"{provider.name}: {provider.label}" + (f"; {given}" if given else "")])
        print(flush=True)
        status = _race(runner, [(case, dtype)])
        rows = runner.results.rows
        for times in filter(None, (times_cell(line, provider.name) for line in lines(rows))):
            print(
                f"{provider.name} is {times.replace('?', '')}x as fast as {BASELINE}{' (disturbed)' * ('?' in times)}"
            )
        _keep(runner.results, json, None, stdout)
    timed = any(row.provider == provider.name and row.ok for row in rows)
    return status or (0 if timed else 1)


def _race(runner: Runner, pairs: Sequence[tuple[Case, str]]) -> int:
    """Runs, and shows what goes on. Returns 1 where the GPU was lost, 130 where the run was broken off, else 0."""
    name = runner.results.environment["device"]
    show = reporter(len(pairs), f"{name}: microseconds, and the fraction of a copy's speed")
    runner.reporter = show
    status = 0
    try:
        with show:
            runner.run(pairs)
    except DeviceLost as error:
        show.say(f"stopped: {error}")
        status = 1
    except KeyboardInterrupt:
        show.say("stopped: what was measured until now is kept")
        status = 130
    if runner.results.rows:
        show.finish(runner.results.rows)
    return status


def _introduce(results: Results, said: Sequence[str]) -> None:
    e = results.environment
    where = f"{e['device']}, {e['threads']} threads, {e['isa']}" if e["device_type"] == "cpu" else e["device"]
    print(f"onepass {e['onepass']}, torch {e['torch']}, on {where}", *said, sep="\n")
    if e["device_type"] == "cpu" and e["load"] is not None and e["load"] > 0.5:
        print(f"  this machine is busy (a load of {e['load']} before the run): times on the CPU will be too long")


def _without(left_out: dict[str, str]) -> list[str]:
    """Who is left out, a line for each reason. An engine for another kind of device is not missed."""
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        if not reason.startswith("serves no"):
            names.setdefault(reason, []).append(name)
    return [f"  without {', '.join(those)}: {reason}" for reason, those in names.items()]


def _keep(results: Results, json: str | None, plot: str | None, stdout: TextIO) -> None:
    """Writes the results, to a file or to stdout, and the pictures, and says where they are."""
    if json == STDOUT:
        stdout.write(as_text(results))
    if not results.rows:
        return
    if json and json != STDOUT:
        save(results, json)
    if plot and any(r.ok for r in results.rows):
        try:
            from onepass.tools.bench.plot import draw
        except ImportError as error:
            print(f"no picture: {error.name} is not installed")
        else:
            for path in draw([results], Path(plot)):
                if path.suffix == ".png":
                    print(f"picture: {path}")
    if json != STDOUT:
        print(f"results: {json}" if json else "results: not kept (--json FILE keeps them)")
