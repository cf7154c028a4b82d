"""One run of `onepass bench`, from what was asked for to the files it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from onepass.bench import timing
from onepass.bench.cases import SUITES, Case
from onepass.bench.providers import COPY, Provider, pick, registry
from onepass.bench.report import reporter
from onepass.bench.results import Results, save
from onepass.bench.run import DeviceLost, Runner


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
    pairs = []
    for function in choices.functions or (None,):
        for case in cases:
            case = replace(case, function=function or case.function, direction=choices.direction or case.direction)
            pairs += [(case, dtype) for dtype in choices.dtypes or case.dtypes]
    return pairs, text


def listing(device: torch.device) -> str:
    """What `--list` prints."""
    text = [f"providers on {device}:"]
    for name, provider in registry().items():
        reason, redundant = provider.unavailable(device), provider.redundant(device)
        note = "" if reason is None else f" -- not here: {reason}"
        if reason is None and redundant:
            note = f" -- only when asked for: {redundant}"
        elif reason is None and not provider.quick:
            note = " -- not in the quick form"
        text.append(f"  {name:<15} {provider.label}{note}")
    text.append(f"  {COPY.name:<15} always run: the limit that the others are measured by")
    text.append("suites:")
    for suite in SUITES.values():
        dtypes = ", ".join(dict.fromkeys(d for c in suite.cases for d in c.dtypes))
        quick = sum(device.type in c.quick for c in suite.cases)
        text.append(f"  {suite.name:<15} {len(suite.cases)} cases, {quick} of them in the quick form; {dtypes}")
        text.append(f"  {'':<15} {suite.about}")
    return "\n".join(text)


def bench(choices: Choices) -> int:
    """Runs, shows, writes. Returns the exit status: 1 where onepass was wrong or raised, 130 where it was broken off.

    Raises ValueError for a choice that cannot be met.
    """
    device = device_of(choices.device)
    if choices.threads is not None:
        torch.set_num_threads(choices.threads)
    pairs, text = select(choices, device)
    providers, left_out = pick(device, choices.only, choices.skip, choices.quick)
    runner = Runner(
        device,
        providers,
        budget=timing.QUICK if choices.quick else timing.FULL,
        seed=choices.seed,
        forced=frozenset(choices.only),
    )
    runner.results.environment["quick"] = choices.quick
    _introduce(runner.results, text, providers, left_out)
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
    rows = runner.results.rows
    if rows:
        show.finish(rows)
        _keep(runner.results, choices)
    ours = [r for r in rows if r.provider.startswith("onepass") and not r.ok]
    bad = [r for r in ours if (r.error or "").startswith(("wrong", "raised"))]
    return status or (1 if bad else 0)


def _introduce(results: Results, text: str, providers: Sequence[Provider], left_out: dict[str, str]) -> None:
    e = results.environment
    version = f"onepass {e['onepass']}"
    where = f"{e['device']}, {e['threads']} threads" if e["device_type"] == "cpu" else e["device"]
    print(f"{version}, torch {e['torch']}, on {where}")
    print(text)
    print(f"providers: {', '.join(p.name for p in providers)}")
    for name, reason in left_out.items():
        if not reason.startswith("serves no"):
            print(f"  without {name}: {reason}")
    if e["device_type"] == "cpu" and e["load"] is not None and e["load"] > 0.5:
        print(f"  this machine is busy (a load of {e['load']} before the run): times on the CPU will be too long")
    print(flush=True)


def _keep(results: Results, choices: Choices) -> None:
    """Writes the results file and the pictures, and says where they are."""
    if choices.json:
        save(results, choices.json)
    if choices.plot and any(r.ok for r in results.rows):
        try:
            from onepass.bench.plot import draw
        except ImportError as error:
            print(f"no picture: {error.name} is not installed")
        else:
            for path in draw([results], Path(choices.plot)):
                if path.suffix == ".png":
                    print(f"picture: {path}")
    print(f"results: {choices.json}" if choices.json else "results: not kept (--json FILE keeps them)")
