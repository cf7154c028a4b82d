"""Fits the estimate by which the planner compares plans of columns to measured times.

    python scripts/fit_columns.py sweep.json.gz ... [--blank] [--check] [--write]

The files are those of scripts/sweep_columns.py. The estimate is a network of two hidden layers whose inputs are the
features in src/onepass/csrc/plan/column_speed.h. The loss is the speed that is lost by choices: a softmax over the
plans of a case by their estimates is what would be chosen, and its mean speed is compared with the fastest plan's. A
smaller part of the loss is the error of the logarithm of the speed. With --check a tenth of the cases at a time is left
out and chosen for. With --write the weights go to src/onepass/csrc/plan/column_weights.h.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass import native

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "src" / "onepass" / "csrc"
WEIGHTS = CORE / "plan" / "column_weights.h"
HIDDEN = (24, 12)
STEPS, RATE, DECAY, NOISE, SHARPNESS, OF_ERRORS = 800, 0.01, 0.3, 0.05, 8.0, 5.0


class Problem(NamedTuple):
    """A softmax over the middle dim of a contiguous tensor, or its gradient."""

    shape: Sequence[int]
    dtype: str
    function: str
    backward: bool


@cache
def _program() -> Path:
    program = Path(tempfile.mkdtemp()) / "column_plans"
    sources = [ROOT / "scripts" / "column_plans.cpp", CORE / "plan" / "tables.cpp"]
    subprocess.run(["g++", "-std=c++17", "-O1", f"-I{CORE}", *sources, "-o", program], check=True)
    return program


class Known(NamedTuple):
    estimate: float
    features: list[float]


def look_up(problems: Sequence[Problem], plans: Sequence[Sequence[Any]] | None = None) -> Iterator[dict[Any, Known]]:
    """What the planner knows of plans of each problem. Without plans: of its own choice, then of all candidates."""
    lines = []
    for i, (shape, dtype, function, backward) in enumerate(problems):
        numbers = native.DTYPES.index(getattr(torch, dtype)), native.FUNCTIONS.index(function), int(backward)
        given = [",".join(str(int(n)) for n in plan) for plan in plans[i]] if plans else []
        lines.append(" ".join(map(str, [*shape, *numbers, *given])))
    out = subprocess.run([_program()], input="\n".join(lines), text=True, check=True, stdout=subprocess.PIPE).stdout
    for line in out.splitlines():
        known = {}
        for word in line.split():
            plan, estimate, features = word.split(":")
            known[tuple(map(int, plan.split(",")))] = Known(float(estimate), list(map(float, features.split(",")[:-1])))
        yield known


class Estimate:
    """A network with the range of its inputs."""

    def __init__(self, x: Tensor) -> None:
        self.low, self.high, self.mean = x.amin(0), x.amax(0), x.mean(0)
        self.scale = 1 / x.std(0).clamp(min=0.05)
        sizes = [x.size(1), *HIDDEN, 1]
        self.layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
        self.net = nn.Sequential(*(part for layer in self.layers for part in (layer, nn.ReLU())))[:-1]

    def scaled(self, x: Tensor) -> Tensor:
        return (x.clamp(self.low, self.high) - self.mean) * self.scale

    def __call__(self, x: Tensor) -> Tensor:
        """(plans) logarithms of speeds."""
        y: Tensor = self.net(self.scaled(x))[:, 0]
        return y


class Data(NamedTuple):
    x: Tensor  # (plans, features)
    loss: Tensor  # (plans) logarithm of the speed over the best one's of the case
    case: Tensor  # (plans)

    def part(self, taken: Tensor) -> Data:
        """Of the cases that are taken."""
        plans = taken[self.case]
        return Data(self.x[plans], self.loss[plans], self.case[plans].unique(return_inverse=True)[1])


def read_cases(files: Sequence[Path]) -> list[Any]:
    """The fields of a Problem, then (fraction of a copy's speed, plan) of each plan that was timed."""
    return [case for file in files for case in json.loads(gzip.decompress(file.read_bytes())) if case[-1]]


def problems_and_plans(cases: Sequence[Any]) -> tuple[list[Problem], list[list[Any]]]:
    return [Problem(*case[:-1]) for case in cases], [[plan for _, plan in case[-1]] for case in cases]


def data_of(cases: Sequence[Any]) -> Data:
    x, loss, case = [], [], []
    for i, ((*_, parts), known) in enumerate(zip(cases, look_up(*problems_and_plans(cases)), strict=True)):
        best = max(part for part, _ in parts)
        for part, plan in parts:
            x.append(known[tuple(map(int, plan))].features)
            loss.append(math.log(max(part, 1e-3) / best))
            case.append(i)
    return Data(torch.tensor(x), torch.tensor(loss), torch.tensor(case))


def fit(data: Data, seed: int = 0) -> Estimate:
    torch.manual_seed(seed)
    made, cases = Estimate(data.x), int(data.case.max()) + 1
    scaled, weight = made.scaled(data.x), (2 * data.loss).exp()

    def total(t: Tensor) -> Tensor:
        return torch.zeros(cases).index_add(0, data.case, t)

    optimizer = torch.optim.AdamW(made.net.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        y = made.net(scaled + NOISE * torch.randn_like(scaled))[:, 0]
        highest = torch.full((cases,), -math.inf).scatter_reduce(0, data.case, y.detach(), "amax")
        chosen = (SHARPNESS * (y - highest[data.case])).exp()
        lost = -(total(chosen * data.loss.exp()) / total(chosen)).log().mean()
        offset = total(weight * (y - data.loss)) / total(weight)  # an estimate has no scale
        error = (weight * (y - data.loss - offset[data.case]) ** 2).sum() / weight.sum()
        optimizer.zero_grad()
        (lost + OF_ERRORS * error).backward()
        optimizer.step()
        schedule.step()
    return made


@torch.no_grad()
def reached(made: Estimate, data: Data) -> Tensor:
    """(cases) the speed of the chosen plan over the best one's."""
    y, speeds = made(data.x), []
    for case in range(int(data.case.max()) + 1):
        plans = (data.case == case).nonzero()[:, 0]
        speeds.append(data.loss[plans[y[plans].argmax()]].exp())
    return torch.stack(speeds)


def show(what: str, speeds: Tensor) -> None:
    print(f"{what}: mean {speeds.mean():.3f}, p10 {speeds.quantile(0.1):.3f}, worst {speeds.min():.3f}", flush=True)


def number(value: float) -> str:
    text = f"{value:.4g}"
    return text if text.lstrip("-").isdigit() else f"{text}f"


@torch.no_grad()
def text_of(made: Estimate | None, cases: int = 0) -> str:
    """The header. Without an estimate it has no weights."""
    sizes = [("kSpeedRange", "kSpeedFeatures", "4"), ("kSpeedFirst", HIDDEN[0], "kSpeedFeatures + 1")]
    sizes += [("kSpeedSecond", HIDDEN[1], f"{HIDDEN[0]} + 1"), ("kSpeedOut", 1, f"{HIDDEN[1]} + 1")]
    tables = [[]] * len(sizes)
    if made:
        tables = [torch.stack([made.low, made.high, made.mean, made.scale], 1).tolist()]
        tables += [torch.cat([layer.weight, layer.bias[:, None]], 1).tolist() for layer in made.layers]
    lines = [
        "// column_weights.h: the weights of the network in column_speed.h, which scripts/fit_columns.py wrote,",
        f"// fitted to {cases} cases (NVIDIA H200).",
        '#pragma once\n\n#include "column_features.h"\n\nnamespace onepass {\n\n// clang-format off',
        "// kSpeedRange: of each feature its least and largest value, its mean, and a factor. The others: of each",
        "// output of a layer the weights of its inputs, and what is added.",
    ]
    for (name, rows, columns), table in zip(sizes, tables, strict=True):
        lines.append(f"constexpr float {name}[{rows}][{columns}] = {{")
        lines += [f"    {{{', '.join(map(number, row))}}}," for row in table] + ["};"]
    return "\n".join([*lines, "// clang-format on\n\n}  // namespace onepass\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--blank", action="store_true", help="begin with no weights, after a change of the features")
    parser.add_argument("--check", action="store_true", help="choose for cases that were left out")
    parser.add_argument("--write", action="store_true", help=f"write {WEIGHTS.name}")
    given = parser.parse_args()
    if given.blank:
        WEIGHTS.write_text(text_of(None))
    data = data_of(read_cases(given.files))
    first = torch.cat([torch.ones(1, dtype=torch.bool), data.case.diff() > 0])
    cases = int(first.sum())
    show(f"{cases} cases, {len(data.x)} plans; the planner that was measured", data.loss[first].exp())
    if given.check:
        tenth = torch.randperm(cases, generator=torch.Generator().manual_seed(0)) % 10
        left_out = [reached(fit(data.part(tenth != k)), data.part(tenth == k)) for k in range(10)]
        show("cases that were left out", torch.cat(left_out))
    if given.write:
        made = fit(data)
        show("all cases", reached(made, data))
        WEIGHTS.write_text(text_of(made, cases))


if __name__ == "__main__":
    main()
