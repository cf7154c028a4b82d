"""The disk cache of compiled kernels, without a GPU: what it holds, whom it trusts, and what a kernel from it costs."""

import functools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.scripts import Forks
from lib.warmup import needs_nvrtc
from onepass import native

pytestmark = needs_nvrtc
F32 = torch.float32
KIND = ("softmax", F32, F32)
COMPUTE = 90

# Compiles one kernel, or reads it, in a process of its own: prints both counts, and whether NVRTC was opened for it.
ONE = """
import os, torch
from onepass import native
kind = "softmax", torch.float32, torch.float32
{before}
native.compile_kernel(*kind, next(iter(native.kernels_to_warm(*kind, -1, 90, [128]).values())), 90)
print(*native.counts(), "libnvrtc.so" in open("/proc/self/maps").read())
"""


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """A copy of NVRTC that can be changed, with what it opens itself beside it."""
    nvrtc = Path(native.status("compiler"))
    copy = tmp_path / "lib" / nvrtc.name
    copy.parent.mkdir()
    shutil.copy(nvrtc, copy)
    for other in nvrtc.parent.glob("libnvrtc-*"):
        (copy.parent / other.name).symlink_to(other)
    monkeypatch.setenv("ONEPASS_NVRTC", str(copy))
    return copy


@pytest.fixture
def start(cache: Path, processes: Forks, tmp_path: Path) -> Callable[..., list[str]]:
    """Makes `count` processes at once compile it, or read it, and gives what they say, or what is wrong."""

    def run(before: str = "", count: int = 1) -> list[str]:
        environment = {name: value for name, value in os.environ.items() if name.startswith("ONEPASS_")}
        ended = processes.run(tmp_path, ONE.format(before=before), count, **environment)
        return [done.out.strip() if done.status == 0 else done.errors for done in ended]

    return run


def counted(call: Callable[[], Any]) -> tuple[int, int]:
    """What a call adds to (compiled, read from disk)."""
    before = native.counts()
    call()
    return tuple(now - then for now, then in zip(native.counts(), before, strict=True))


@functools.cache
def kernel() -> native.Plan:
    return next(iter(native.kernels_to_warm(*KIND, -1, COMPUTE, [128]).values()))


def ask() -> tuple[int, int]:
    return counted(lambda: native.compile_kernel(*KIND, kernel(), COMPUTE))


def test_a_kernel_is_compiled_once_and_is_the_users_alone(cache):
    assert not native.is_kernel_cached(*KIND, kernel(), COMPUTE)
    assert [ask(), ask()] == [(1, 0), (0, 1)]
    assert native.is_kernel_cached(*KIND, kernel(), COMPUTE)
    assert not native.is_kernel_cached(*KIND, kernel(), COMPUTE + 10)
    assert cache.stat().st_mode & 0o777 == 0o700
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_damage_is_noticed_and_mended(cache):
    assert ask() == (1, 0)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (0, 35, 200, len(whole) - 1)]
    for damaged in (b"", whole[:100], whole[:-1], whole + b"\0", *flipped):
        file.write_bytes(damaged)
        assert ask() == (1, 0)
        assert file.read_bytes() == whole
        assert ask() == (0, 1)


def test_what_others_could_have_written_is_not_loaded(cache, tmp_path):
    ask()
    (file,) = cache.iterdir()
    file.chmod(0o620)
    assert ask() == (1, 0)
    assert file.stat().st_mode & 0o777 == 0o600  # a new file
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert ask() == (1, 0)
    assert not file.is_symlink()
    cache.chmod(0o777)
    with pytest.raises(RuntimeError, match="written by others"):
        native.status("cache")
    cache.chmod(0o700)
    assert ask() == (0, 1)


@pytest.mark.parametrize("folder", ["off", "{file}", "{file}/below"])
def test_without_a_cache_a_kernel_is_compiled_and_nothing_is_kept(folder, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setenv("ONEPASS_CACHE_DIR", folder.format(file=file))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(RuntimeError):
        native.status("cache")
    plan = (0, 32, 4, 4, 4, 1, 0, 0)
    for _ in range(2):
        assert counted(lambda: native.compile_kernel(*KIND, plan, COMPUTE, tmp_path / "kernel.cubin")) == (1, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "kernel.cubin"]


def test_the_cache_is_in_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("ONEPASS_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert native.status("cache") == str(tmp_path / ".cache" / "onepass")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert native.status("cache") == str(tmp_path / "xdg" / "onepass")
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "own"))
    assert native.status("cache") == str(tmp_path / "own")


@pytest.mark.slow
def test_processes_at_once_share_it(cache, start):
    answers = start(count=2)
    assert set(answers) <= {"1 0 True", "0 1 False"}, answers
    assert len(list(cache.iterdir())) == 1  # and nothing half written
    assert start() == ["0 1 False"]


def test_a_kernel_on_disk_takes_no_nvrtc(start, library):
    assert start() == ["1 0 True"]
    assert start() == ["0 1 False"]
    about = library.stat()
    with library.open("wb") as file:  # a file that would not load, with the size and the time of the one that did
        file.truncate(about.st_size)
    os.utime(library, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert start() == ["0 1 False"]
    os.utime(library)  # now it is another one, and the kernel has to be compiled
    assert "NVRTC not found" in start()[0]


def test_a_packaged_kernel_takes_neither_nvrtc_nor_a_cache(cache, start, tmp_path, monkeypatch):
    package = tmp_path / "onepass_kernels"
    (package / f"sm_{COMPUTE}").mkdir(parents=True)
    native.package_kernel(*KIND, kernel(), COMPUTE, package / f"sm_{COMPUTE}", "forward")
    (file,) = package.glob("*/*.cubin")
    for stored in cache.iterdir():
        stored.unlink()
    monkeypatch.setenv("ONEPASS_KERNELS", str(package))
    monkeypatch.setenv("ONEPASS_NVRTC", "/nowhere")
    file.chmod(0o664)  # whoever can write into the package is trusted
    assert native.is_kernel_cached(*KIND, kernel(), COMPUTE)
    assert not native.is_kernel_cached(*KIND, kernel(), COMPUTE + 10)
    assert start() == ["0 1 False"]
    assert not list(cache.iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    assert "NVRTC not found" in start()[0]


@pytest.mark.slow
def test_another_nvrtc_compiles_anew(cache, start, library):
    assert start() == ["1 0 True"]
    os.utime(library, ns=(0, 10**18))
    assert start() == ["1 0 True"]
    assert start() == ["0 1 False"]
    for file in cache.iterdir():
        file.unlink()
    # Another one from one moment to the next: what it compiles is filed under the one that was opened.
    touch = f"native.status('compiler'); os.utime({str(library)!r}, ns=(0, 11 * 10**17))"
    assert start(touch) == ["1 0 True"]
    assert start() == ["0 1 False"]


def test_a_kernel_from_disk_costs_little(cache):
    """Compared to its compilation on the same machine: 0.6 ms of some 400."""

    def timed(counts: tuple[int, int]) -> float:
        begin = time.perf_counter()
        assert ask() == counts
        return time.perf_counter() - begin

    compiled, times = timed((1, 0)), [timed((0, 1)) for _ in range(20)]
    assert min(times) < compiled / 50, (compiled, times)
