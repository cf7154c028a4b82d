"""Calls a function when a module is imported, without importing the module."""

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
    except (AttributeError, ImportError) as error:  # the import of the module must not fail because of `then`
        warnings.warn(f"onepass does not know this {module.__name__}: {error}", stacklevel=2)


def when_imported(name: str, then: Callable[[Any], object]) -> None:
    """Calls `then(module)` once: now if the module is imported already, else when it is imported. If a name that `then`
    needs is missing in the module, it warns."""
    if name in sys.modules:
        _act(then, sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))
