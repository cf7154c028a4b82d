"""`onepass traffic`: the predictions, the command, ncu's report, ncu as a process, and the process that it watches."""

from __future__ import annotations

import ast
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import onepass
from lib.scripts import run_python
from lib.transcript import call, fake_terminal, replay, session
from onepass.tools.gallery import VARIANTS, ncu
from onepass.tools.gallery.ncu import Counts, Kernel, Measurement, NcuError, parse_report
from onepass.tools.gallery.traffic import FLOAT32, MINIMUM, Prediction, predict, predict_all
from onepass.tools.gallery.variants import Count, Traffic

M, N = 4096, 781
MN = M * N
__all__ = ["fake_terminal"]

OF_ROWS = [name for name, variant in VARIANTS.items() if variant.computes == "rows"]


def predicted(name: str, rows: int, n: int, dtype: torch.dtype = torch.float32, device: str = "h200") -> Prediction:
    return predict_all(onepass.explain((rows, n), dtype=dtype, device=device, bandwidth=1.0), [name])[name]


# Predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOAT32)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_naive_computes_in_float32(name: str, dtype: torch.dtype) -> None:
    line = predicted(name, M, N, dtype)
    assert (line.reads, line.writes) == (5 * MN + 2 * M, 3 * MN + 2 * M) == (16_003_072, 9_605_120)
    size = dtype.itemsize
    reads = size * (2 * MN) + 4 * (3 * MN + 2 * M)  # x twice; shifted, numerator twice, maximum, denominator
    writes = size * MN + 4 * (2 * MN + 2 * M)  # the result; shifted, numerator, maximum, denominator
    assert line.bytes == reads + writes == (102_432_768 if size == 4 else 83_238_912)
    assert line.ratio == 1 / line.copy_fraction == pytest.approx(4 + 2 / N if size == 4 else 6.5 + 4 / N)
    assert line.cached_bytes is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeated_reads_have_a_second_prediction_for_the_caches(dtype: torch.dtype) -> None:
    line = predict(Traffic(Count(3), Count(1)), MINIMUM, M, N, dtype, gbs=100.0)
    assert (line.ratio, line.cached_ratio) == (2.0, 1.0)
    assert line.cached_bytes == 2 * MN * dtype.itemsize
    assert (line.us, line.cached_us) == pytest.approx((line.bytes / 1e5, line.cached_bytes / 1e5))


@pytest.mark.parametrize("name", OF_ROWS)
def test_every_variant_is_predicted_by_its_header(name: str) -> None:
    line, header = predicted(name, 3, 100_000), VARIANTS[name].header  # longer rows than some of them take
    assert line.bytes == 4 * (line.reads + line.writes) == 4 * header.traffic.elements(3, 100_000)
    assert line.ratio == line.bytes / (2 * 4 * 300_000)
    assert (line.cached_ratio is None) == (header.cached is None)
    assert f"reads {line.reads_formula}, writes {line.writes_formula}" in header.traffic_text


@pytest.mark.parametrize(
    ("shape", "device", "twice"),
    [
        ((4096, 781), "h200", 0),
        ((64, 200_000), "h200", 0),
        ((2, 16 << 20), "h200", 5_930_496),  # of a row, what the chip does not hold
        ((64, 2049), "cpu", 0),
        ((3, 65536), "cpu", 0),
        ((3, 65537), "cpu", 65537),
    ],
)
def test_onepass_is_predicted_by_its_plan(shape: tuple[int, int], device: str, twice: int) -> None:
    """`twice` elements of a row are read twice."""
    line, plan = predicted("onepass", *shape, device=device), onepass.explain(shape, device=device, bandwidth=1.0)
    assert line.bytes == plan.bytes + 4 * shape[0] * twice
    assert line.cached_bytes == (plan.bytes if twice else None)
    assert device == "cpu" or plan.launch.get("read_again", 0) == twice
    plan = onepass.explain((8, 8), device="h200")
    assert list(predict_all(plan)) == ["minimum", *OF_ROWS, "onepass"]
    assert list(predict_all(plan, ["onepass", "naive"])) == ["minimum", "naive", "onepass"]


# The command -----------------------------------------------------------------------------------------------------


COUNTS = {
    "copy": Counts((Kernel("mul", 12_795_904, 0),)),
    "naive": Counts((Kernel("a", 40_000_000, 20_000_000), Kernel("b", 24_000_000, 18_383_232))),
    "torch": Counts((Kernel("c", None, 5),)),
    "onepass": Counts(()),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The command believes that GPU 2 is here, and that ncu counts on it; gives the arguments of the measurements."""
    asked: list[Any] = []

    def measure(*arguments: Any) -> Measurement:
        asked.append(arguments)
        counts = {name: COUNTS[name] for name in arguments[1] if name in COUNTS}
        return Measurement(counts, {name: "runs only on the CPU" for name in arguments[1] if name not in COUNTS})

    def explain(x: Any, device: Any, **options: Any) -> Any:
        return real(x, device="h200" if isinstance(device, torch.device) else device, **options)

    real = onepass.explain
    monkeypatch.setattr("onepass.explain", explain)
    monkeypatch.setattr("onepass.tools.bench.cli_run.parse_device", lambda name: torch.device("cuda", 2))
    monkeypatch.setattr(ncu, "find_ncu", lambda: "/opt/ncu")
    monkeypatch.setattr(ncu, "measure", measure)
    return asked


def test_commands_print_their_transcript() -> None:
    replay("traffic")


def test_measured_numbers_and_their_notes(gpu: list[Any]) -> None:
    replay("traffic-measured")
    names = ["copy", "naive", "cpu-online", "onepass"]
    assert gpu == [("/opt/ncu", names, M, N, "float16", 2), ("/opt/ncu", names[:3], M, N, "float32", 2)]
    data = json.loads(call("traffic", "8", "8", "--json").stdout)  # torch is measured if all are asked for
    assert [line["name"] for line in data["lines"]] == ["minimum", "copy", *OF_ROWS, "torch", "onepass"]
    assert data["lines"][-2]["predicted"] is None


@pytest.mark.parametrize("has_ncu", [True, False])
def test_a_failed_measurement_leaves_the_prediction(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch, has_ncu: bool
) -> None:
    def measure(*arguments: Any) -> Measurement:
        raise NcuError("this user may not read the GPU's counters")

    monkeypatch.setattr(ncu, "measure", measure)
    if not has_ncu:
        monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    text = session("traffic 8 8 --only naive")
    assert "\nnaive " in text
    assert "MB" not in text
    assert "exit status" not in text
    reason = "this user may not read the GPU's counters" if has_ncu else "no ncu (Nsight Compute) on the PATH"
    assert f"not measured: {reason}" in text


@pytest.mark.parametrize("width", [200, 80])
def test_a_terminal_of_any_width_shows_every_number(width: int, gpu: list[Any], fake_terminal: Any) -> None:
    screen = fake_terminal("onepass.tools.terminal", width)
    session("traffic 4096 781")
    assert max(map(len, screen.getvalue().splitlines())) <= width
    for part in ("16,003,072", "5MN + 2M", "102,432,768", "(1.00)", "4.00", "64.00", "38.38", "cpu-online", "n/a"):
        assert part in screen.getvalue(), part
    session("traffic 65536 262144")
    for part in ("549,756,862,464", "5MN + 2M", "64.00"):  # the first is naive's bytes
        assert part in screen.getvalue()
    assert ("85,899,476,992" in screen.getvalue()) == (width == 200)  # its reads, which have no room


@pytest.mark.gpu
def test_a_gpu_gives_the_time_of_a_copy() -> None:
    data = json.loads(call("traffic", "64", "1000", "--only", "naive", "--no-measure", "--json").stdout)
    assert data["device"] == torch.cuda.get_device_name()
    assert 10 < data["bandwidth_gbs"] < 50_000
    assert data["lines"][1]["predicted"]["us"] > 0
    assert data["lines"][1]["measured"] is None


HEAD = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
HEAD += '"Device","CC"'
METRICS = ',"dram__bytes_read.sum","dram__bytes_write.sum"'
UNITS = 11 * '"",'
MARK = "at::cuda::<unnamed>::spin_kernel(long)"
HEADER = "==PROF== Connected to process 4711 (/usr/bin/python3.12)\n"
FOOTER = "==PROF== Disconnected from process 4711\n"


def line(number: int, kernel: str, read: str, written: str) -> str:
    where = f'"{number}","4711","python3.12","127.0.0.1","{kernel}","1","7","(256, 1, 1)","(4096, 1, 1)","0","9.0"'
    return f'{where},"{read}","{written}"\n'


def text(*kernels: tuple[str, str, str], units: tuple[str, str] = ("byte", "byte")) -> str:
    rows = "".join(line(i, *kernel) for i, kernel in enumerate(kernels))
    return f'{HEADER}{HEAD}{METRICS}\n{UNITS}"{units[0]}","{units[1]}"\n{rows}{FOOTER}'


SPIN = (MARK, "1,024", "0")
NAIVE = (
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxOps<float>>>(T3)", "128", "1"),
    ("void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<sub>>(int, T3)", "129", "20"),
    ("void at::native::vectorized_elementwise_kernel<4, exp_kernel_cuda(at::TensorIteratorBase &)>(int)", "127", "21"),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, sum>>(T3)", "126", "2"),
    ("void at::native::elementwise_kernel<128, 2, div_true>(int, T3)", "13,500,000", "12,345,678"),
)


# The report of ncu


def test_kernels_are_split_into_contestants_by_the_marker() -> None:
    copy = ("void at::native::vectorized_elementwise_kernel<4, mul>(int)", "67,108,864", "50,000,000")
    stray, ours = ("stray", "5", "6"), ("onepass_kernel", "100", "90")  # kernels before the first marker are ignored
    found = parse_report(text(stray, SPIN, copy, SPIN, *NAIVE, SPIN, SPIN, ours), ["a", "naive", "b", "c"])
    assert list(found) == ["a", "naive", "b", "c"]
    assert found["a"].kernels == (Kernel(copy[0], 67_108_864, 50_000_000),)
    assert [k.name for k in found["naive"].kernels] == [name for name, _, _ in NAIVE]
    assert (found["naive"].read, found["naive"].written) == (13_500_510, 12_345_722)
    assert found["naive"].ratio(1_000) == pytest.approx(25_846.232)
    assert found["b"] == Counts(())
    assert (found["b"].read, found["b"].written, found["b"].ratio(8)) == (None, None, None)
    assert (found["c"].read, found["c"].written) == (100, 90)


def test_every_spelling_of_the_marker_is_known_and_a_repeated_head_is_no_kernel() -> None:
    for name in ("spin_kernel", "at::cuda::(anonymous namespace)::spin_kernel(long)", "_ZN2at4cuda11spin_kernelEl"):
        again = text((name, "0", "0"), ("k", "5", "6")) + text(SPIN, ("l", "7", "8")).removeprefix(HEADER)
        assert parse_report(again, ["one", "two"])["two"].kernels == (Kernel("l", 7, 8),)


@pytest.mark.parametrize(
    ("read", "written", "expected"),
    [
        ("12,799,488", "0", (12_799_488, 0)),
        ("1.28e+07", "32", (12_800_000, 32)),
        ("n/a", "64", (None, 64)),
        ("nan", "", (None, None)),
        ("(!) n/a", "3", (None, 3)),
    ],
)
def test_missing_counters(read: str, written: str, expected: tuple[int | None, int | None]) -> None:
    found = parse_report(text(SPIN, ("k", "5", "6"), ("l", read, written)), ["one"])["one"]
    assert (found.kernels[1].read, found.kernels[1].written) == expected
    assert (found.read is None, found.written is None) == tuple(number is None for number in expected)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("", "no Kernel Name"),
        (HEADER + "==WARNING== No kernels were profiled.\n" + FOOTER, "no Kernel Name"),
        (f"{HEAD}\n", "no dram__bytes_read.sum"),
        (text(SPIN, SPIN), "2 markers for 1 contestants"),
        (text(("k", "1", "2")), "0 markers for 1 contestants"),
        (text(SPIN, ("k", "1", "2"), units=("Mbyte", "byte")), "counts bytes in Mbyte and byte"),
    ],
)
def test_a_report_of_another_form_is_an_error(report: str, message: str) -> None:
    with pytest.raises(NcuError, match=message):
        parse_report(report, ["one"])


# ncu as a process


def script(folder: Path, body: str) -> str:
    """An executable that stands for ncu: Python, with the report's path in `log`, the target's command in `child`."""
    path = folder / "ncu"
    path.write_text(
        f"#!{sys.executable}\nimport sys, subprocess, time\nfrom pathlib import Path\n"
        'log = Path(sys.argv[sys.argv.index("--log-file") + 1])\n'
        f"child = sys.argv[sys.argv.index({sys.executable!r}):]\n{body}\n"
    )
    path.chmod(0o755)
    return str(path)


OUTPUT = json.dumps({"marked": ["copy", "naive"], "left_out": {"naive": "raised: x", "cpu-online": "CPU only"}})
REPORT = text(SPIN, ("mul", "40", "2"), SPIN, ("k", "1", "2"))


def measure(path: str, timeout: float = 60) -> ncu.Measurement:
    return ncu.measure(path, ["copy", "naive", "cpu-online"], 4096, 781, "float32", 1, timeout)


def test_measure_reads_the_report_and_the_output_of_the_target(tmp_path: Path) -> None:
    said = tmp_path / "said"
    body = f"log.write_text({REPORT!r})\nprint('noise')\nprint({OUTPUT!r})\n"
    found = measure(script(tmp_path, body + f"Path({str(said)!r}).write_text(repr((sys.argv, child)))"))
    assert found.counts == {"copy": Counts((Kernel("mul", 40, 2),))}
    assert found.left_out == {"naive": "raised: x", "cpu-online": "CPU only"}
    command, child = ast.literal_eval(said.read_text())
    target = ["-m", "onepass.tools.gallery.ncu", "copy", "naive", "cpu-online", "4096", "781", "float32", "1"]
    assert child == [sys.executable, *target]
    options = dict(itertools.pairwise(command))
    assert options["--metrics"] == "dram__bytes_read.sum,dram__bytes_write.sum"
    assert options["--profile-from-start"] == "off"
    assert options["--clock-control"] == "none"


DENIED = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the "
    "target device 0. For instructions on enabling permissions and to get more information see "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM\n"
)
FAILURES: dict[str, tuple[str, str]] = {
    "counters are denied": (
        f"log.write_text({HEADER + DENIED + FOOTER!r}); print({OUTPUT!r})",
        "this user may not read the GPU's counters; run as root",
    ),
    "ncu fails": (
        "log.write_text('==PROF== x\\n==ERROR== LibraryNotLoaded\\n'); sys.exit(9)",
        "ncu: LibraryNotLoaded",
    ),
    "nothing is profiled": (
        f"log.write_text('==WARNING== No kernels were profiled.\\n'); print({OUTPUT!r})",
        "ncu: No kernels were profiled.",
    ),
    "the target fails": (
        "log.write_text('==ERROR== The application returned an error code (1).\\n')\n"
        "sys.exit(subprocess.run([sys.executable, '-c', 'raise RuntimeError(\"out of memory\")']).returncode)",
        "RuntimeError: out of memory",
    ),
    "marks are missing": (f"log.write_text({text(SPIN)!r}); print({OUTPUT!r})", "1 markers for 2 contestants"),
    "silence": ("sys.exit(3)", "ncu ended with exit status 3"),
    "it is no program": ("", "cannot be run: Permission denied"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_is_one_line(tmp_path: Path, what: str) -> None:
    body, message = FAILURES[what]
    path = script(tmp_path, body)
    if not body:
        Path(path).chmod(0o644)
    with pytest.raises(NcuError) as caught:
        measure(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_process_that_takes_too_long_is_killed_with_its_child(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    sleeper = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    path = script(tmp_path, f"subprocess.run([sys.executable, '-c', {sleeper!r}, {str(pid)!r}])")
    began = time.monotonic()
    with pytest.raises(NcuError, match="was not done after 3 seconds"):
        measure(path, timeout=3)
    assert time.monotonic() - began < 30

    def gone() -> bool:  # or a zombie whose new parent has not waited for it yet
        try:
            return Path(f"/proc/{pid.read_text()}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    while not gone() and time.monotonic() - began < 30:  # a signal takes a while on a busy machine
        time.sleep(0.05)
    assert gone()


def test_ncu_is_found_on_the_path_and_else_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.setattr(ncu, "INSTALL_FOLDERS", (str(tmp_path / "cuda"), str(tmp_path / "opt" / "*")))
    assert ncu.find_ncu() is None
    for version in ("2024.3.2", "2025.10.0", "2025.3.1"):
        folder = tmp_path / "opt" / version
        folder.mkdir(parents=True)
        script(folder, "")
    assert ncu.find_ncu() == str(tmp_path / "opt" / "2025.10.0" / "ncu")
    on_path = script(tmp_path, "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ncu.find_ncu() == on_path


# The process that ncu watches


def test_calls_follow_their_markers_and_one_that_raises_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(5, 33)
    expected = {"copy": x, **dict.fromkeys(("torch", "onepass", "naive"), torch.softmax(x, 1))}
    for name, result in expected.items():
        ncu._find_call(name, x, out := torch.full_like(x, torch.nan))()
        torch.testing.assert_close(out, result)
    log: list[str] = []

    def softmax(*arguments: object, **options: object) -> None:
        log.append("torch")
        if "start" in log:
            raise RuntimeError("gone\nwith details")

    for target in ("torch.cuda.synchronize", "torch.cuda.profiler.start", "torch.cuda.profiler.stop"):
        monkeypatch.setattr(target, lambda name=target: log.append(name.rpartition(".")[2]))
    monkeypatch.setattr("torch.cuda._sleep", lambda cycles: log.append("mark"))
    monkeypatch.setattr("torch.softmax", softmax)
    monkeypatch.setattr("onepass.softmax", lambda x: None)
    monkeypatch.setattr(ncu, "WARMUP_CALLS", 1)
    printed = ncu.count_calls([*expected, "cuda-warp"], x)
    assert printed["marked"] == ["copy", "torch", "naive"]
    assert printed["left_out"].pop("onepass").endswith("unexpected keyword argument 'out'")
    assert printed["left_out"] == {"cuda-warp": "cannot run on cpu: runs only on NVIDIA GPUs", "torch": "gone"}
    begin = ["synchronize", "torch", "synchronize", "synchronize", "start"]
    assert log == [*begin, "mark", "synchronize", "mark", "torch", "mark", "synchronize", "stop"]


@pytest.mark.gpu
def test_the_target_marks_and_calls_on_a_gpu() -> None:
    names = ["copy", "torch", "onepass", "naive", "naive-jit", "cpu-online"]
    arguments = [*names, "64", "1000", "bfloat16", "0"]
    done = run_python("-m", "onepass.tools.gallery.ncu", *arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert "cpu-online" in result["left_out"]
    assert set(result["marked"]) | set(result["left_out"]) == set(names)
    assert {"copy", "torch", "onepass", "naive"} <= set(result["marked"]) - set(result["left_out"])


@pytest.mark.gpu
def test_the_counters_see_a_copy_as_a_copy_and_naive_as_five_kernels() -> None:
    path = ncu.find_ncu()
    if path is None:
        pytest.skip("no ncu here")
    rows, n = 8192, 8192  # 256 MiB: far more than stays in an L2
    try:
        found = ncu.measure(path, ["copy", "naive", "onepass"], rows, n, "float32")
    except NcuError as error:
        pytest.skip(str(error))
    least = 2 * 4 * rows * n
    for name, ratio in (("copy", 1), ("naive", 4), ("onepass", 1)):
        counted = found.counts[name].ratio(least)
        assert counted is not None
        assert 0.8 * ratio < counted < 1.15 * ratio, (name, counted)  # less: up to an L2 of writes is not counted
    assert len(found.counts["naive"].kernels) == 5
