"""The butterfly exchange: what each lane receives, what the merges leave in it, and how the command prints it."""

import doctest
import importlib
import io
import re

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from onepass.tools.cli import Commands
from onepass.tools.gallery.shuffle import OPS, butterfly, sentence

MODULE = importlib.import_module("onepass.tools.cli.gallery")  # the attribute of that name may be the command
LANES = (2, 4, 8, 16, 32)

# What a kernel of 32 threads prints that exchanges lane numbers, as published: `id` receives, `max` merges.
RECEIVED = {
    16: "16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
    8: "8 9 10 11 12 13 14 15 0 1 2 3 4 5 6 7 24 25 26 27 28 29 30 31 16 17 18 19 20 21 22 23",
    4: "4 5 6 7 0 1 2 3 12 13 14 15 8 9 10 11 20 21 22 23 16 17 18 19 28 29 30 31 24 25 26 27",
    2: "2 3 0 1 6 7 4 5 10 11 8 9 14 15 12 13 18 19 16 17 22 23 20 21 26 27 24 25 30 31 28 29",
    1: "1 0 3 2 5 4 7 6 9 8 11 10 13 12 15 14 17 16 19 18 21 20 23 22 25 24 27 26 29 28 31 30",
}
LARGEST = {16: [*range(16, 32)] * 2, 8: [*range(24, 32)] * 4, 4: [28, 29, 30, 31] * 8, 2: [30, 31] * 16, 1: [31] * 32}


def test_the_examples_run() -> None:
    done = doctest.testmod(importlib.import_module("onepass.tools.gallery.shuffle"))
    assert done.attempted >= 4
    assert not done.failed


def test_the_published_exchange() -> None:
    assert butterfly(range(32), "id") == [(mask, [int(v) for v in text.split()]) for mask, text in RECEIVED.items()]
    assert butterfly(range(32), "max") == list(LARGEST.items())


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("op", "merge"), [("max", max), ("sum", sum)])
def test_every_lane_ends_with_all_of_any_values(lanes: int, op: str, merge) -> None:
    values = [(7 * lane) % 13 - 40 for lane in range(lanes)]
    steps = butterfly(values, op)
    assert [mask for mask, _ in steps] == [2**i for i in reversed(range(lanes.bit_length() - 1))]
    assert steps[-1][1] == [merge(values)] * lanes
    for mask, held in steps:  # after mask m a lane has merged the lanes that have its number below the bit m
        assert held == [merge(values[lane % mask :: mask]) for lane in range(lanes)]


@pytest.mark.parametrize("lanes", LANES)
def test_id_pairs_lanes_that_differ_in_one_bit(lanes: int) -> None:
    values = [10 * lane for lane in range(lanes)]
    for mask, received in butterfly(values, "id"):
        partner = [value // 10 for value in received]
        assert all(abs(lane - other) == mask for lane, other in enumerate(partner))
        assert [partner[other] for other in partner] == list(range(lanes))


@pytest.mark.parametrize("lanes", [0, 1, 3, 31, 64])
def test_another_number_of_lanes_is_refused(lanes: int) -> None:
    with pytest.raises(ValueError, match=rf"takes 2, 4, 8, 16 or 32 lanes, got {lanes}$"):
        butterfly(range(lanes), "max")


def test_another_op_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("op must be one of max, sum, id; got 'min'")):
        butterfly([1, 2], "min")


@pytest.mark.parametrize(
    ("lanes", "op", "text"),
    [
        (32, "max", "After 5 exchanges all 32 lanes hold 31, the largest."),
        (32, "sum", "After 5 exchanges all 32 lanes hold 496, the sum."),
        (2, "sum", "After 1 exchange all 2 lanes hold 1, the sum."),
        (8, "id", "lane ^ mask: with mask 4 the halves swap, with mask 1 the neighbours swap."),
        (2, "id", "lane ^ mask: with mask 1 the neighbours swap."),
    ],
)
def test_the_last_sentence(lanes: int, op: str, text: str) -> None:
    assert op in OPS
    assert sentence(range(lanes), op).endswith(text)


# The command


def call(*arguments: str) -> Result:
    return CliRunner().invoke(Commands(commands={"gallery": MODULE.gallery}), ("gallery", "shuffle", *arguments))


def test_the_exchange_on_a_pipe() -> None:
    result = call()
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    lines = result.output.splitlines()
    assert lines[0].split() == ["lane", *map(str, range(32))]
    for line, (mask, held) in zip(lines[1:6], LARGEST.items(), strict=True):
        assert line.split() == [f"mask={mask}:", *map(str, held)]
    assert lines[6:] == ["", "After 5 exchanges all 32 lanes hold 31, the largest."]


@pytest.mark.parametrize(("op", "width"), [("max", 104), ("id", 104), ("sum", 136)])
@pytest.mark.parametrize("lanes", LANES)
def test_lanes_are_aligned_and_fit(op: str, width: int, lanes: int) -> None:
    lines = call("--op", op, "--lanes", str(lanes)).output.splitlines()
    table = lines[: lines.index("")]
    assert len(table) == lanes.bit_length()
    assert len(table[0]) <= width
    ends = [[found.end() for found in re.finditer(r"\d+(?= |$)", line[8:])] for line in table]
    assert all(at == ends[0] and len(at) == lanes for at in ends)
    assert lines[-1] == sentence(range(lanes), op)


def test_a_terminal_colours_the_halves_that_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = Console(file=file, width=10, force_terminal=True, color_system="standard", highlight=False)
    monkeypatch.setattr(MODULE, "terminal", lambda: console)
    call("--lanes", "4", "--op", "id")
    text = file.getvalue()
    assert [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in text.splitlines()] == [
        ["lane", "0", "1", "2", "3"],
        ["mask=2:", "2", "3", "0", "1"],
        ["mask=1:", "1", "0", "3", "2"],
    ]
    low, high = "\x1b[1;36m", "\x1b[1;35m"
    assert re.findall(r"\x1b\[1;\d+m", text) == [low, low, high, high, low, high, low, high]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "min"), "'min' is not one of 'max', 'sum', 'id'"),
        (("--lanes", "64"), "'64' is not one of '32', "),
        (("--lanes", "1"), "'1' is not one of '32', "),
        (("16",), "unexpected extra argument"),
    ],
)
def test_wrong_input_is_told_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
