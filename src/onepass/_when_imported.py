"""Something to do when a module is imported, so that it need not be imported for it."""

import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

__all__ = ["when_imported"]


class _Finder:
    """Finds one module as Python does, and calls `then` when its code has run."""

    def __init__(self, name: str, then: Callable[[Any], object]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == self._name else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _act(self._then, module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _act(then: Callable[[Any], object], module: Any) -> None:
    try:
        then(module)
    except (AttributeError, ImportError) as error:  # nobody's import is to fail by it
        warnings.warn(f"onepass does not know this {module.__name__}: {error}", stacklevel=2)


def when_imported(name: str, then: Callable[[Any], object]) -> None:
    """Calls `then(module)` once: now where the module is imported, else when it is. A name that `then` misses in the
    module is a warning."""
    if name in sys.modules:
        _act(then, sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))
