"""The side-by-side table of `onepass profile`, from events made here."""

import doctest
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from onepass.tools.bench import profile_table
from onepass.tools.bench.profile_table import OUTSIDE, Event, Line, cells, line, plain, records, short, show


def fake(name: str, where: DeviceType, us: float, self_us: float = 0.0, annotation: bool = False) -> Any:
    """An event as torch has it, with what is read of it."""
    span = SimpleNamespace(elapsed_us=lambda: us)
    return SimpleNamespace(
        name=name, device_type=where, time_range=span, self_cpu_time_total=self_us, is_user_annotation=annotation
    )


LONG = "void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem<4, float, float, float>(float*, float const*)"


def gpu_events(name: str, kernels: list[tuple[str, float]], host: float) -> list[Event]:
    """A call on a GPU: its annotation on both sides, a launch a kernel, the kernels."""
    on, off = DeviceType.CUDA, DeviceType.CPU
    events = [fake(name, off, host, host - len(kernels), annotation=True)]
    events += [fake("cudaLaunchKernel", off, 1.0, 1.0) for _ in kernels]
    events += [fake(kernel, on, us) for kernel, us in kernels]
    return records([*events, fake(name, on, sum(us for _, us in kernels) + 5.0, annotation=True)])


def two() -> list[Line]:
    torchs = gpu_events("torch", [(LONG, 50.0)], 20.0)
    ours = [*gpu_events("onepass", [("onepass_kernel", 30.0), ("Memset (Device)", 2.0)], 12.5)] * 2
    return [line("torch", torchs, 1), line("onepass", ours, 2)]


def test_a_line_counts_kernels_and_adds_times() -> None:
    torchs, ours = two()
    assert torchs == Line("torch", 1.0, 50.0, LONG, 1.0, 20.0, OUTSIDE)
    assert ours == Line("onepass", 1.0, 32.0, "onepass_kernel", 2.0, 12.5, OUTSIDE)  # a Memset is no kernel, but time


def test_the_slowest_kernel_is_the_one_with_the_longest_sum() -> None:
    events = gpu_events("naive", [("exp", 7.0), ("sum", 4.0), ("sum", 4.0)], 90.0)
    assert line("naive", events, 1).kernel == "sum"
    assert line("naive", events, 1).kernels == 3


def test_an_annotation_on_the_device_is_no_kernel_whatever_torch_calls_it() -> None:
    events = records(
        [
            fake("mine", DeviceType.CPU, 9.0, 9.0, annotation=True),
            fake("mine", DeviceType.CUDA, 99.0),
            fake("k", DeviceType.CUDA, 4.0),
        ]
    )
    assert line("mine", events, 1).kernels == 1
    assert line("mine", events, 1).device_us == 4.0


def test_the_slowest_operator_is_by_self_time() -> None:
    events = records(
        [
            fake("mine", DeviceType.CPU, 100.0, 10.0, annotation=True),
            fake("aten::softmax", DeviceType.CPU, 90.0, 20.0),
            fake("aten::_softmax", DeviceType.CPU, 70.0, 70.0),
        ]
    )
    made = line("mine", events, 1)
    assert (made.operator, made.operators, made.host_us, made.kernel) == ("aten::_softmax", 2, 100.0, "")


def test_the_table_of_a_gpu() -> None:
    assert plain(two(), gpu=True, width=100).splitlines() == [
        "contestant  kernels  device us  host us  of torch's  slowest kernel",
        "----------  -------  ---------  -------  ----------  -----------------------------------------------",
        f"torch             1       50.0     20.0        1.00  {short(LONG, 47)}",
        "onepass           1       32.0     12.5        0.64  onepass_kernel",
    ]


def test_the_table_of_a_cpu_compares_host_times() -> None:
    heads, rows = cells(two(), gpu=False)
    assert heads == ["contestant", "operators", "host us", "of torch's", "slowest operator"]
    assert rows == [["torch", "1", "20.0", "1.00", OUTSIDE], ["onepass", "2", "12.5", "0.62", OUTSIDE]]


def test_without_torchs_time_nothing_is_compared_with_it() -> None:
    torchs, ours = two()
    assert [row[4] for row in cells([ours], gpu=True)[1]] == ["-"]
    unseen = Line("torch", 0.0, 0.0, "", 1.0, 20.0, OUTSIDE)  # the profiler recorded no kernel
    assert cells([unseen, ours], gpu=True)[1][0] == ["torch", "0", "-", "20.0", "-", "-"]
    assert cells([torchs, ours], gpu=True)[1][1][4] == "0.64"


@pytest.mark.parametrize("width", [5, 20, 21, 40, 200])
def test_a_name_is_shortened_to_fit(width: int) -> None:
    made = short(LONG, width)
    assert len(made) <= width
    assert made[0] == "c"
    assert made[-1] == ")"
    assert ("..." in made) == (width < 200)
    assert short("onepass_kernel", 14) == "onepass_kernel"


@pytest.mark.parametrize("width", [80, 120])
def test_on_a_terminal_the_table_fits(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(two(), True)
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    rows = {row.split()[0]: row for row in shown.splitlines() if row.split()}
    assert all(len(row) <= width for row in shown.splitlines())
    assert rows["torch"].split()[1:5] == ["1", "50.0", "20.0", "1.00"]
    assert rows["onepass"].split()[1:] == ["1", "32.0", "12.5", "0.64", "onepass_kernel"]


def test_examples() -> None:
    result = doctest.testmod(profile_table)
    assert result.attempted == 5
    assert not result.failed
