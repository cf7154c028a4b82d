"""One run of `onepass bench`, from its options to the files that it writes."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

import onepass
from onepass.tools.bench import losses, random_cases, score_cases, segment_cases, segments, sharded_cases, timing
from onepass.tools.bench.cases import CPU_FILL, SUITES, Case
from onepass.tools.bench.correctness import Checker, make_inputs
from onepass.tools.bench.gallery_providers import GalleryProvider, Learned
from onepass.tools.bench.progress import Progress
from onepass.tools.bench.provider import COPY
from onepass.tools.bench.registry import registry, select_providers
from onepass.tools.bench.report import BASELINE, OURS, lines
from onepass.tools.bench.results import STDOUT, Results, as_text, save
from onepass.tools.bench.runner import DeviceLost, Runner
from onepass.tools.gallery import Variant
from onepass.tools.terminal import console


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
    count: int = 20
    classes: tuple[str, ...] = ()
    mb: tuple[float, float] | None = None
    compile: int = 0
    ranks: int | None = None
    json: str | None = None
    plot: str | None = None

    def sizes(self, device: torch.device) -> tuple[float, float]:
        """The least and the most MB that drawn shapes move."""
        small = {score_cases.SUITE, segment_cases.SUITE} & {*self.suites}
        return self.mb or (score_cases.MOVES[device.type] if small else (8.0, 640.0))

    def world_size(self, device: torch.device) -> int:
        """The ranks of a sharded run: by default all GPUs, or two processes of a CPU."""
        if device.index is not None:
            raise ValueError(f"sharded takes GPUs from the first on: --device cuda, got {device}")
        here = torch.cuda.device_count()
        if device.type == "cuda" and (self.ranks or 1) > here:
            raise ValueError(f"--ranks {self.ranks} needs as many GPUs: there are {here} GPUs")
        return self.ranks or (here if device.type == "cuda" else 2)


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
        if name not in SUITES and name not in random_cases.ABOUT:
            raise ValueError(f"unknown suite {name!r}: there are {', '.join([*SUITES, *random_cases.ABOUT])}")
    names = ", ".join(options.suites)
    every = [case for name in dict.fromkeys(options.suites) for case in _make_cases(name, options, device)]
    cases = [c for c in every if options.pattern.lower() in c.name.lower()]
    cases = [c for c in cases if device.type in c.quick or not options.quick]
    if not cases:
        quick = f" that --quick runs on {device.type}" if options.quick else ""
        raise ValueError(f"no case of {names}{quick} has {options.pattern!r} in its name")
    text = f"{names}: {len(cases)} cases"
    if len(cases) < len(every):
        why = f"--quick on {device.type}" if options.quick else f"those with {options.pattern!r}"
        text = f"{names}: {len(cases)} of {len(every)} cases ({why})"
    max_fill = CPU_FILL if options.quick and device.type == "cpu" else None
    pairs: dict[tuple[Case, str], tuple[Case, str]] = {}
    for function in options.functions or (None,):
        for case in cases:
            case = replace(case, function=function or case.function, direction=options.direction or case.direction)
            # A shape that was made from the options has one of the chosen dtypes already.
            for dtype in case.dtypes if "/" in case.suite else options.dtypes or case.dtypes:
                sized = case.at(dtype, max_fill)
                # Some suites have a shape for two functions or directions. If the options choose one, both cases are
                # the same.
                merge = case.fill or options.functions or options.direction
                key = replace(sized, name="", quick=()) if merge else sized
                pairs.setdefault((key, dtype), (sized, dtype))
    return list(pairs.values()), text


def _make_cases(suite: str, options: Options, device: torch.device) -> Sequence[Case]:
    """The cases of a suite. `random`, `slide`, `scores` and `segments` are made from the options."""
    least, most = (int(mb * random_cases.MB) for mb in options.sizes(device))
    if most < 2 * least:
        raise ValueError(f"--mb takes two sizes of which the second is at least twice the first, got {options.mb}")
    if suite == "slide":
        return random_cases.slide(options.classes, options.dtypes, min(most, random_cases.SLIDE_BYTES))
    if suite in SUITES:
        return SUITES[suite].cases
    if suite == losses.SUITE:
        return losses.cases(device.type, options.dtypes)
    if options.functions or options.direction:
        raise ValueError(f"{suite} takes --classes, which have their functions and directions")
    choice = (options.seed, options.count, options.classes, options.dtypes)
    if suite == sharded_cases.SUITE:
        return sharded_cases.make(options.classes, options.dtypes, device.type, options.world_size(device))
    if suite == segment_cases.SUITE:
        every = segment_cases.make(*choice, (least, most), device.type)
        compiled = segments.compiled_names()
        return random_cases.spread_compile(every, options.compile, compiled) if options.compile else every
    if suite == score_cases.SUITE:
        named, drawn = score_cases.make(*choice, (least, most), device.type)
        return [*named, *(random_cases.spread_compile(drawn, options.compile) if options.compile else drawn)]
    cases = random_cases.draw(*choice, (least, most))
    return random_cases.spread_compile(cases, options.compile)


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
        "suites": [
            {
                "name": suite.name,
                "about": suite.about,
                "cases": len(suite.cases),
                "quick": sum(device.type in c.quick for c in suite.cases),
                "dtypes": [*dict.fromkeys(d for c in suite.cases for d in c.dtypes)],
            }
            for suite in SUITES.values()
        ],
        "made": random_cases.ABOUT,
    }


def list_text(data: dict[str, Any]) -> str:
    """What `--list` prints."""

    def line(p: dict[str, Any]) -> str:
        note = "" if p["quick"] else " -- not part of --quick"
        note = f" -- only with --only: {p['redundant']}" if p["redundant"] else note
        note = f" -- not available: {p['unavailable']}" if p["unavailable"] else note
        return f"  {p['name']:<17} {p['label']}{note}"

    own, gallery = ([line(p) for p in data["providers"] if p["gallery"] == of] for of in (False, True))
    text = [f"providers on {data['device']}:", *own]
    text.append(f"  {COPY.name:<17} runs always: the others are measured by it")
    text.append("variants of the gallery, which run with --gallery, or one by its name with --only:")
    text += [*gallery, "suites:"]
    for suite in data["suites"]:
        count = f"{suite['cases']} cases, {suite['quick']} of them with --quick"
        text.append(f"  {suite['name']:<17} {count}; {', '.join(suite['dtypes'])}")
        text.append(f"  {'':<17} {suite['about']}")
    text += [f"  {name:<17} {about}" for name, about in data["made"].items()]
    return "\n".join(text)


def bench(options: Options) -> int:
    """Runs, shows and writes. Returns the exit status: 1 if onepass was wrong or raised, 130 if it was interrupted.

    Raises ValueError for an option that cannot be met.
    """
    device = parse_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    pairs, text = select_cases(options, device)
    made = set(options.suites) <= set(random_cases.ABOUT)
    own = losses.SUITE, segment_cases.SUITE, sharded_cases.SUITE
    alone = next((name for name in options.suites if name in own), None)
    if alone and set(options.suites) != {alone}:
        raise ValueError(f"{alone} runs alone, got {', '.join(options.suites)}")
    of_losses, of_segments, of_ranks = (alone == name for name in own)
    if options.ranks and not of_ranks:
        raise ValueError("--ranks is an option of sharded")
    only, known = options.only, segments.providers(options.compile > 0) if of_segments else None
    if of_ranks:
        from onepass.tools.bench import sharded  # imports DTensor, which takes a second

        known = sharded.providers()
        text += f", {options.world_size(device)} ranks"
    if known is None:
        only = only or (losses.available(device) if of_losses else (OURS, BASELINE) * made)
        with_compile = options.compile > 0 or (score_cases.SUITE in options.suites and not options.only)
        only += ("torch-compile",) * (made and with_compile)
    providers, excluded = select_providers(device, only, options.skip, options.quick, options.gallery, known)
    for provider in [p for p in providers if p.gallery and p.name not in only]:
        if all(provider.unsupported(case, dtype) is not None for case, dtype in pairs):
            providers.remove(provider)
            excluded[provider.name] = "supports none of the cases"
    if options.graph and device.type == "cpu":
        raise ValueError("--graph is the time in a CUDA graph and needs a GPU")
    if options.graph and of_ranks:
        raise ValueError("sharded has no times in a CUDA graph")
    head = [text, f"providers: {', '.join(p.name for p in providers)}"]
    for reason in dict.fromkeys(excluded.values()):
        if not reason.startswith("does not support"):  # an engine for another kind of device
            head.append(f"  without {', '.join(n for n, why in excluded.items() if why == reason)}: {reason}")
    head += [] if options.gallery or only or known else ["  --gallery adds the variants of the gallery"]
    budget = timing.QUICK if options.quick else timing.FULL
    budget = budget if options.seconds is None else budget.limit(options.seconds)
    run: dict[str, Any] = {"budget": budget, "seed": options.seed, "graph": options.graph}
    run["kernels_only"] = made and not (of_segments and device.type == "cuda")
    about = {"quick": options.quick} | (
        {"count": options.count, "mb": [*options.sizes(device)]} if made and not of_ranks else {}
    )
    with messages_on_stderr(options.json) as stdout:
        if of_losses:
            runner: Runner = losses.LossRunner(device, losses.with_losses(providers), **run)
        elif of_segments:
            runner = segments.SegmentRunner(device, providers, **run)
        elif of_ranks:
            runner = sharded.ShardedRunner(device, providers, options.world_size(device), **run)
        else:
            runner = Runner(device, providers, named=frozenset(options.only), **run)
        status = _run(runner, pairs, head, about)
        _write(runner.results, options.json, options.plot, stdout)
    ours = (row for row in runner.results.rows if row.provider.startswith(OURS))
    return status or int(any((row.error or "").startswith(("wrong", "raised")) for row in ours))


def bench_variant(
    provider: GalleryProvider,
    case: Case,
    dtype: str,
    device: torch.device,
    baseline: bool = True,
    seed: int = 0,
    json: str | None = None,
) -> int:
    """Checks and times one variant of the gallery on one case, beside torch if `baseline`: `onepass gallery run`.

    The environment of the results has the launch parameters. Returns the exit status: 1 if the variant was not timed,
    130 if the run was interrupted.
    """
    launch = ", ".join(f"{name} {value}" for name, value in provider.launch.items())
    about: dict[str, Any] = {"quick": False} | ({"launch": {provider.name: provider.launch}} if launch else {})
    head = f"{provider.name}: {provider.label}" + (f"; {launch}" if launch else "")
    with messages_on_stderr(json) as stdout:
        runner = Runner(device, [provider, *[registry()[BASELINE]] * baseline], seed=seed, graph=True)
        status = _run(runner, [(case, dtype)], [head], about)
        for speedup in filter(None, (line.speedup_text(provider.name) for line in lines(runner.results.rows))):
            disturbed = " (disturbed)" * ("?" in speedup)
            print(f"{provider.name} is {speedup.removesuffix('?')}x as fast as {BASELINE}{disturbed}")
        _write(runner.results, json, None, stdout)
    return status or int(not any(row.provider == provider.name and row.ok for row in runner.results.rows))


def bench_learned(provider: Learned, case: Case, dtype: str, device: torch.device, seed: int = 0) -> int:
    """Times a learner's softmax beside a copy, the CUDA variants of the gallery, torch and onepass: the ladder."""
    known = registry()
    cuda = [p for p in known.values() if p.name.startswith("cuda-") and not p.unavailable(device)]
    ladder = [p for p in cuda if p.unsupported(case, dtype) is None]
    runner = Runner(device, [provider, *ladder, known[BASELINE], known[OURS]], seed=seed)
    status = _run(runner, [(case, dtype)], [f"{provider.name}: {provider.label}"], {"quick": False})
    return status or int(not any(row.provider == provider.name and row.ok for row in runner.results.rows))


def emulate_variant(variant: Variant, case: Case, dtype: str, seed: int, launch: dict[str, int]) -> int:
    """Checks a CUDA variant on one case without a GPU: `onepass gallery run --emulate`. Returns the exit status."""
    inputs = make_inputs(case, dtype, torch.device("cpu"), seed)
    checker = Checker(inputs, seed)
    x = inputs.x if inputs.grad is None else onepass.softmax(inputs.x, -1)
    begin = time.monotonic()
    try:
        wrong = checker.check(variant.emulate(x, inputs.grad, out=inputs.out, **launch))
    except RuntimeError as error:
        wrong = f"raised: {error}"
    took = f"emulated on the CPU in {time.monotonic() - begin:.1f} s, which says nothing of its speed on a GPU"
    print(f"{variant.name}: {f'wrong: {wrong}' if wrong else 'right'} on {case.name} {dtype} ({took})")
    return int(wrong is not None)


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """A context in which the signal that `timeout` sends interrupts a run as Ctrl+C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(runner: Runner, pairs: Sequence[tuple[Case, str]], head: Sequence[str], about: dict[str, Any]) -> int:
    """Runs with a progress display. Returns 1 if the GPU was lost, 130 if the run was interrupted, else 0."""
    e = runner.results.environment
    e.update(about)
    where = f"{e['device']}, {e['threads']} threads, {e['isa']}" if e["device_type"] == "cpu" else e["device"]
    print(f"onepass {e['onepass']}, torch {e['torch']}, on {where}", *head, sep="\n")
    if e["device_type"] == "cpu" and e["load"] > 0.5:
        print(f"  this machine is busy (a load of {e['load']} before the run): times on the CPU will be too long")
    print(flush=True)
    title = f"{e['device']}: microseconds, and the fraction of a copy's speed"
    progress = runner.progress = Progress(len(pairs), title, console())
    status = 0
    try:
        with progress, _sigterm_interrupts():
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


def _write(results: Results, json: str | None, plot: str | None, stdout: TextIO) -> None:
    """Writes the results, to a file or to stdout, and the plots, and prints their paths."""
    if json == STDOUT:
        stdout.write(as_text(results))
    elif json and results.rows:
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
    if json != STDOUT and results.rows:
        print(f"results: {json}" if json else "results: not saved (--json FILE saves them)")
