"""The examples of the public modules run, and give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import onepass

PUBLIC = [
    "onepass.functional",
    "onepass.nn",
    "onepass.reference",
    "onepass.settings",
    "onepass.validation",
    "onepass._engines",
    "onepass._explain",
    "onepass._state",
    "onepass._warmup",
]


def _module(name: str):
    return importlib.import_module(name)


@pytest.mark.parametrize("name", PUBLIC)
def test_examples(name):
    result = doctest.testmod(_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("name", [n for n in onepass.__all__ if callable(getattr(onepass, n)) and n != "Explanation"])
def test_every_public_function_has_an_example(name):
    assert ">>> " in (getattr(onepass, name).__doc__ or "")


def test_other_modules_examples_run_too():
    for info in pkgutil.walk_packages(onepass.__path__, "onepass."):
        name = info.name
        if name in PUBLIC or name.endswith(("__main__", "._native")):
            continue
        try:
            module = _module(name)
        except ImportError as error:  # what a plain install may lack
            if (error.name or "").partition(".")[0] not in ("click", "rich", "matplotlib", "triton", "numpy"):
                raise
        else:
            assert not doctest.testmod(module).failed, name
