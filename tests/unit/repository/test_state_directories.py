"""Unit tests do not use the state of this host's gpusnap: tests/unit/conftest.py gives them directories."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import gpusnap

_DIRECTORIES = ("/run/gpusnap", "/var/lib/gpusnap")


def names(value: object) -> bool:
    return isinstance(value, str) and value.startswith(_DIRECTORIES)


def of_this_host() -> Iterator[str]:
    """Names of modules' constants, and of functions with defaults, that are directories of this host."""
    for found in pkgutil.walk_packages(gpusnap.__path__, "gpusnap."):
        for name, value in vars(importlib.import_module(found.name)).items():
            is_ours = inspect.isfunction(value) and value.__module__ == found.name
            parameters = inspect.signature(value).parameters.values() if is_ours else ()
            if any(map(names, (value, *(each.default for each in parameters)))):
                yield f"{found.name}.{name}"


def test_state_directories() -> None:
    """Add a constant that this finds to _STATE_DIRECTORIES. A default of a parameter cannot be redirected.

    The settings' own defaults are not looked at: a test with a store has one of its own (`host_store`).
    """
    assert list(of_this_host()) == []
