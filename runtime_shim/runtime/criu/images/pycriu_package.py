"""CRIU's own Python package, pycriu: finds it, and imports its modules that decode images.

It is not on PyPI. Distributions have it beside CRIU (Debian: python3-pycriu, Fedora: python3-criu), and
`make install` of CRIU's sources puts it below /usr/local. An environment of pipx does not see those
directories. So if this Python has no pycriu of its own, the system's is imported from there, with the
system's protobuf, whose release must fit the one that pycriu's modules were generated for.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.errors import Interrupted, Refused, printable

_NAMES = ("pycriu", "google.protobuf")
_HINT = "install the package python3-pycriu (Debian, Ubuntu) or python3-criu (Fedora)"


@dataclass(frozen=True, slots=True)
class Pycriu:
    """The parts of it that gpusnap uses."""

    pb: Any
    """The module with the classes of all messages, by their names in CRIU's images/*.proto."""
    payloads: Mapping[int, Callable[[bytes], Any]]
    """The decoder of the messages of an image, by the image's magic number."""
    accelerated: bool
    """Whether protobuf decodes in C; in Python it takes about thirty times as long."""


def is_there(root: str = "/") -> bool:
    """Whether it can be found; only `load` imports it. `root`: of another host."""
    places = [os.path.join(root, each.lstrip("/")) for each in directories()]
    return not [*_not_found(("", *places) if root == "/" else places)]


def make_missing_error(what: str) -> Refused:
    """The error if it is missing; `what` cannot be done without it."""
    return Refused(f"CRIU's Python package pycriu is not installed, and {what}", hint=_HINT, code="GPS-517")


@functools.cache
def load() -> Pycriu:
    """Import it: 0.07 s of computing with protobuf in C, 0.2 s without (docs/how-it-works.md).

    Raises Refused if it is missing, or if its modules and protobuf do not fit each other.
    """
    with _extend_path(directories() if [*_not_found(("",))] else ()), warnings.catch_warnings():
        # Warnings of protobuf about Python and its own releases: stderr may be the container's log.
        warnings.simplefilter("ignore")
        try:
            from google.protobuf.internal import api_implementation
            from pycriu.images import images, magic, pb  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            if is_there():
                raise _make_broken_error(error) from error
            raise make_missing_error("CRIU's images cannot be read without it") from error
        except Interrupted:
            raise
        except Exception as error:  # protobuf refuses code that was generated for another release of it
            raise _make_broken_error(error) from error
    payloads = {
        number: handler.payload.FromString
        for number, name in magic.by_val.items()
        if getattr(handler := images.handlers.get(name), "payload", None) is not None
    }
    return Pycriu(pb, payloads, api_implementation.Type() != "python")


def directories() -> Sequence[str]:
    """Return where distributions and `make install` put packages for every Python, and for this version."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return (
        "/usr/lib/python3/dist-packages",
        f"/usr/lib/{version}/site-packages",
        f"/usr/lib64/{version}/site-packages",
        f"/usr/local/lib/{version}/dist-packages",
        f"/usr/local/lib/{version}/site-packages",
    )


def _not_found(places: Sequence[str]) -> Iterator[str]:
    """Yield the packages that are in none of the places; an empty place means this Python's own path."""
    for name in _NAMES:
        if not any(_is_in(place, name) for place in places):
            yield name


def _is_in(place: str, name: str) -> bool:
    if place:
        return os.path.isdir(os.path.join(place, *name.split(".")))
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@contextmanager
def _extend_path(places: Sequence[str]) -> Iterator[None]:
    """Make Python also search there, last; afterwards restore its path.

    pycriu adds its own directory to the path, whose modules have names such as `images` and `magic`.
    """
    before = set(sys.path)
    sys.path.extend(places)
    try:
        yield
    finally:
        sys.path[:] = [each for each in sys.path if each in before]


def _make_broken_error(error: Exception) -> Refused:
    said = printable(" ".join(str(error).split()))[:300]
    return Refused(
        f"CRIU's Python package pycriu cannot be imported by {sys.executable}: {said}",
        hint="install pycriu and protobuf (python3-pycriu, python3-protobuf) from the same distribution",
    )
