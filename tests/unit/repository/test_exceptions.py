"""Errors that a child process raises for its parent: pickle changes nothing of them."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Iterator

import pytest

import gpusnap
from gpusnap.oci.base.errors import OciError
from gpusnap.runtime_shim.base.errors import AlreadyPaused, GpusnapError, OtherNamespace


def _list_classes(base: type[Exception]) -> Iterator[type[Exception]]:
    yield base
    for each in base.__subclasses__():
        yield from _list_classes(each)


def list_errors() -> list[type[Exception]]:
    """All classes of gpusnap's errors: those of the tests are not in its modules."""
    for module in pkgutil.walk_packages(gpusnap.__path__, "gpusnap."):
        importlib.import_module(module.name)
    found = {each for base in (GpusnapError, OciError) for each in _list_classes(base)}
    ours = (each for each in found if each.__module__.startswith("gpusnap."))
    return sorted(ours, key=lambda each: (each.__module__, each.__qualname__))


def make(kind: type[Exception]) -> Exception:
    """One with a value for every parameter of its constructor."""
    positional, named = [], {}
    for name, each in inspect.signature(kind).parameters.items():
        value = 7 if "int" in str(each.annotation) else f"the {name}"
        if each.kind is each.KEYWORD_ONLY:
            named[name] = value
        else:
            positional.append(value)
    return kind(*positional, **named)


def test_through_a_child_process() -> None:
    """Each comes back with its message, hint, code and whatever else it has."""
    kinds = list_errors()
    assert {AlreadyPaused, OtherNamespace} <= set(kinds)
    for kind in kinds:
        error = make(kind)
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(again) is kind
            assert str(again) == str(error)
            assert again.args == error.args
            assert vars(again) == vars(error)


@pytest.mark.parametrize("kind", [AlreadyPaused, OtherNamespace])
def test_a_message_of_a_constructor(kind: type[GpusnapError]) -> None:
    """It is worded once, and a hint that was added since stays."""
    error = kind("c0ffee")
    error.add_hint("try again")
    again = pickle.loads(pickle.dumps(error))
    assert again.sentence() == error.sentence()
    assert str(again).count("c0ffee") == 1
