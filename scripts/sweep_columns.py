"""Times plans of columns on random shapes, on a GPU. scripts/fit_columns.py fits the planner's estimate to the times.

    python scripts/sweep_columns.py --seeds 2 3 --count 8 --out sweep.json.gz

The cases are drawn at random. Of each case it times the plan that the planner chooses, the plans that
the planner rates as the best, and some of the others, drawn at random. It prints the fraction of a copy's speed that
the planner's choice reaches, and the fastest plans. Plans that do not fit the call are passed over.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fit_columns import Problem, look_up

from onepass import native
from onepass._kernel_compiler import Kernel, compile_all
from onepass.native import Plan
from onepass.tools.bench.random_cases import MB, draw, log_uniform
from onepass.tools.bench.timing import Cuda, summarise


def draw_problems(seed: int, count: int, mb: tuple[float, float]) -> list[Problem]:
    """`count` shapes of each class of `onepass bench random`, of long columns, and of images, forward and backward."""
    moves = (mb[0] * MB, mb[1] * MB)
    cases = draw(seed, count, ["other-dim", "gradient-other-dim"], moves=moves)
    problems = [Problem(c.shape, c.dtypes[0], c.function, c.direction == "backward") for c in cases]
    rng = random.Random(seed)
    for i in range(4 * count):
        backward, dtype = i % 2 == 1, rng.choice(("float32", "bfloat16"))
        elements = int(moves[0] * (moves[1] / moves[0]) ** rng.random()) // (12 if backward else 8)
        if i % 4 < 2:
            n, b = log_uniform(rng, 20_000, 4_000_000), log_uniform(rng, 2, 200)
        else:
            n, b = log_uniform(rng, 8, 3000), log_uniform(rng, 3, 64) ** 2
        problems.append(Problem((max(1, elements // (n * b)), n, b), dtype, "softmax", backward))
    return problems


def choose(problems: list[Problem], best: int, others: int, seed: int) -> list[list[Plan]]:
    """Of each problem the planner's own plan, that of its rules, `best` of the best and `others` of the others."""
    chosen, rng = [], random.Random(seed)
    for known in look_up(problems):
        rules = list(known)[:2]
        ranked = sorted((plan for plan in known if plan not in rules), key=lambda plan: -known[plan].estimate)
        left = ranked[best:]
        plans = [*rules, *ranked[:best], *rng.sample(left, min(others, len(left)))]
        chosen.append([Plan(*plan) for plan in plans])
    return chosen


def measure(problem: Problem, plans: list[Plan], clock: Cuda) -> list[tuple[float, Plan]]:
    """The fraction of a copy's speed (of a gradient: of an addition's) that each plan reaches, to four digits."""
    dtype, number = getattr(torch, problem.dtype), native.FUNCTIONS.index(problem.function)
    x = torch.randn(problem.shape, device="cuda", dtype=dtype)
    g, out, ops = torch.randn_like(x), torch.empty_like(x), torch.ops.onepass
    if problem.backward:
        x = x.softmax(1) if problem.function == "softmax" else x.log_softmax(1)

    def launch(plan: Plan) -> None:
        if problem.backward:
            ops._softmax_backward_with_plan(g, x, None, number, [1], list(plan), out)
        else:
            ops._softmax_with_plan(x, number, [1], False, list(plan), out)

    def time(call: Any, count: int = 5) -> float:
        call()
        return summarise(clock.events(call, count, 1)).median

    limit = time(lambda: torch.add(x, g, out=out) if problem.backward else out.copy_(x), 9)
    parts = []
    for plan in plans:
        try:
            parts.append((round(limit / time(partial(launch, plan)), 4), plan))
        except RuntimeError:  # the call does not fit the plan
            torch.cuda.synchronize()
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2])
    parser.add_argument("--count", type=int, default=8, help="shapes per seed and class")
    parser.add_argument("--mb", type=float, nargs=2, default=(8, 640), help="what a case moves, at least and at most")
    parser.add_argument("--best", type=int, default=15, help="plans of a case, the best by the planner's estimate")
    parser.add_argument("--others", type=int, default=15, help="plans of a case besides")
    parser.add_argument("--out", type=Path, help="a .json.gz file for all times")
    given = parser.parse_args()
    problems = [problem for seed in given.seeds for problem in draw_problems(seed, given.count, given.mb)]
    plans = choose(problems, given.best, given.others, given.seeds[0])
    kernels = []
    for problem, tried in zip(problems, plans, strict=True):
        dtype, direction = getattr(torch, problem.dtype), "backward" if problem.backward else "forward"
        kernels += [Kernel(problem.function, dtype, dtype, direction, plan) for plan in tried]
    major, minor = torch.cuda.get_device_capability()
    print(f"{len(problems)} cases, {len(kernels)} plans")
    for _ in compile_all(kernels, 10 * major + minor, ignore_errors=True):
        pass
    clock, found = Cuda(torch.device("cuda", torch.cuda.current_device())), []
    for problem, tried in zip(problems, plans, strict=True):
        parts = measure(problem, tried, clock)
        found.append([*problem, parts])
        best = "; ".join(f"{part:.2f} {','.join(map(str, map(int, plan)))}" for part, plan in sorted(parts)[:-4:-1])
        print(f"{problem}: the planner's {parts[0][0]:.2f}; {best}")
    if given.out:
        given.out.write_bytes(gzip.compress(json.dumps(found, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main()
