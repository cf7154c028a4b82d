"""Python processes that tests start, and the project's scripts as modules."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .paths import ROOT


def run_python(*arguments: Any, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs this Python with arguments (`-c`, code; or a script), and more environment variables."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout)


def python_output(code: str, **options: Any) -> str:
    """The output of `code`, which must not fail."""
    done = run_python("-c", code, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


class Done(NamedTuple):
    status: int  # below 0: the signal that ended it
    out: str
    errors: str


# Reads a folder, code, environment and a number of processes to run it there, and answers with their exit statuses.
FORKS = """
for line in sys.stdin:
    folder, code, environment, count = json.loads(line)
    children = []
    for number in range(count):
        children.append(os.fork())
        if not children[-1]:
            signal.alarm(600)
            for stream, name in ((1, "out"), (2, "errors")):
                os.dup2(os.open(f"{folder}/{name}{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            os.chdir(folder)
            os.environ.update(environment)
            sys.path.insert(0, folder)
            exec(code, {"__name__": "__main__"})
            sys.exit()
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], flush=True)
"""


class Forks:
    """Runs Python in forks of one process that has already imported some modules: importing torch takes 2 s."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def run(self, folder: Path, code: str, count: int = 1, **environment: str) -> list[Done]:
        """Runs code `count` times in parallel, in `folder`, which is also the first folder on its module path."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps([str(folder), code, environment, count]) + "\n")
        self.process.stdin.flush()
        statuses = json.loads(self.process.stdout.readline())
        said = [[(folder / f"{name}{number}").read_text() for name in ("out", "errors")] for number in range(count)]
        return [Done(status, *texts) for status, texts in zip(statuses, said, strict=True)]


@contextmanager
def forks(imported: str, **environment: str) -> Iterator[Forks]:
    command = [sys.executable, "-c", f"import json, os, signal, sys, {imported}\n{FORKS}"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **environment}, **pipes) as process:
        yield Forks(process)


def load_script(name: str) -> ModuleType:
    """One of the project's scripts as a module of that name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
