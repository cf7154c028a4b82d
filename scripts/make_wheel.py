"""Make the wheel and the source distribution in dist, and check them: one wheel for every Python and torch >= 2.10.

The wheel is checked against manylinux_2_28 (by auditwheel) and against torch's stable ABI, for its size, and by a few
calls in an environment that has only the wheel and torch.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parent.parent
BUILD, DIST = ROOT / "build" / "wheel", ROOT / "dist"
PLATFORM = "manylinux_2_28_x86_64"
MOST = 5_000_000  # the most bytes of the wheel
MOST_LIBRARY = 4_000_000  # the most bytes of the native core in the wheel, compressed
TORCH = ("libtorch_cpu.so", "libc10.so")
UNVERSIONED = ("VER_NDX_LOCAL", "VER_NDX_GLOBAL")
SYSTEM = ("libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-")

SMOKE = """
import onepass, sys, torch
assert onepass.__file__.startswith(sys.argv[1]), onepass.__file__
x = torch.randn(64, 1000, requires_grad=True)
y = onepass.softmax(x, dim=-1)
torch.testing.assert_close(y, torch.softmax(x, dim=-1))
y.square().sum().backward()
torch.testing.assert_close(onepass.logsumexp(x.half(), dim=0), torch.logsumexp(x.half(), dim=0))
"""


def run(*command: object, **options: object) -> None:
    subprocess.run([str(word) for word in command], check=True, cwd=ROOT, **options)


def stop(words: str) -> None:
    sys.exit(f"wheel: {words}")


def build() -> Path:
    shutil.rmtree(BUILD, ignore_errors=True)
    plain = BUILD / "plain"
    environment = {name: value for name, value in os.environ.items() if name != "ONEPASS_CPU_SETS"}
    base = ("--build-base", BUILD / "base")
    command = ("-W", "ignore", "setup.py", "-q", "build", *base, "bdist_wheel", "-d", plain)
    run(sys.executable, *command, env=environment)
    (wheel,) = plain.glob("*.whl")
    excluded = [word for library in TORCH for word in ("--exclude", library)]
    # Its error message names symbols that are too new.
    repair = ("-m", "auditwheel", "repair", "-z", "9", "--plat", PLATFORM, "--only-plat", "--strip", *excluded)
    run(sys.executable, *repair, "-w", BUILD / "audited", wheel)
    (audited,) = (BUILD / "audited").glob("*.whl")
    if not audited.name.endswith(f"-py3-none-{PLATFORM}.whl"):
        stop(f"the tag is py3-none-{PLATFORM}, got {audited.name}")
    return audited


def symbols(library: Path) -> tuple[list[str], set[str], set[str]]:
    """(needed libraries, imported symbols without a version, exported symbols) of a library."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
        versions = elf.get_section_by_name(".gnu.version")
        taken, given = set(), set()
        for number, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            if symbol["st_shndx"] != "SHN_UNDEF":
                given.add(symbol.name)
            elif symbol["st_info"]["bind"] == "STB_GLOBAL" and versions.get_symbol(number)["ndx"] in UNVERSIONED:
                taken.add(symbol.name)
        return needed, taken, given


def check(wheel: Path) -> None:
    if wheel.stat().st_size > MOST:
        stop(f"the wheel has at most {MOST} bytes, got {wheel.stat().st_size}")
    library = zipfile.ZipFile(wheel).getinfo("onepass/_native.so")
    if library.compress_size >= MOST_LIBRARY:
        stop(f"the native core has less than {MOST_LIBRARY} bytes in the wheel, got {library.compress_size}")
    site = BUILD / "site"
    pip = ("-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--target", site)
    run(sys.executable, *pip, wheel)
    needed, taken, _ = symbols(site / "onepass" / "_native.so")
    if others := [name for name in needed if name not in TORCH and not name.startswith(SYSTEM)]:
        stop(f"the native core needs {', '.join(others)}, which are neither torch's nor the system's")
    from torch.utils.cpp_extension import library_paths

    exported = set().union(*(symbols(Path(library_paths()[0]) / name)[2] for name in TORCH))
    if foreign := sorted(name for name in taken if not name.startswith(("aoti_torch_", "torch_"))):
        stop(f"the native core takes from torch what its stable ABI does not promise: {', '.join(foreign)}")
    if absent := sorted(taken - exported):
        stop(f"this torch lacks {', '.join(absent)}")
    here = os.environ | {"PYTHONPATH": str(site)}
    run(sys.executable, "-c", SMOKE, site, env=here)
    for command in (["--version"], ["gallery", "list"]):
        run(sys.executable, "-m", "onepass", *command, env=here, stdout=subprocess.DEVNULL)
    sizes = f"{wheel.stat().st_size} bytes; _native.so {library.compress_size}, unpacked {library.file_size}"
    print(f"wheel: {wheel.name}, {sizes}; {len(taken)} of torch's symbols")


def main() -> None:
    wheel = build()
    check(wheel)
    DIST.mkdir(exist_ok=True)
    shutil.copy(wheel, DIST)
    run(sys.executable, "setup.py", "-q", "sdist", "-d", DIST)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        stop(f"`{' '.join(error.cmd)}` failed")
