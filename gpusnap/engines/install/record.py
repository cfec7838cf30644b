"""The record of the files that `gpusnap install` put on a host: /etc/gpusnap/installed.json.

    {"version": 1, "gpusnap": "0.1.0",
     "entries": [{"path", "part", "states": [STATE, …]}, …],
     "folders": [PATH, …]}

A STATE describes a path: "sha256:HEX MODE" for a file, "link:TARGET" for a symbolic link.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from gpusnap.engines.install.files import check_inside, join_root, put_file
from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.json_text import parse_json
from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.base.errors import GpusnapError, advise, reason

RECORD = "/etc/gpusnap/installed.json"

_VERSION = 1
_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A path in the record."""

    path: str
    part: str
    """The part of the installation: runtime, settings, podman, containerd, crio."""
    states: tuple[str, ...]
    """The states in which it is ours: several only during an installation, or after a killed one."""


@dataclass(frozen=True, slots=True)
class Record:
    """What was installed on this host."""

    entries: tuple[Entry, ...] = ()
    folders: tuple[str, ...] = ()
    """The folders that were made for it, each before its contents."""
    version: str = __version__
    """The version of the gpusnap that wrote it."""

    def entry(self, path: str) -> Entry | None:
        return next((each for each in self.entries if each.path == path), None)


def load(root: str = "/") -> Record:
    """Read the record of a host; an empty one if there is none. Raises GpusnapError if it is damaged."""
    check_inside(root, RECORD)
    path = join_root(root, RECORD)
    try:
        with open(path, "rb") as file:
            data = file.read(_LIMIT + 1)
    except FileNotFoundError:
        return Record()
    except OSError as error:
        raise GpusnapError(
            f"the record {path} cannot be read: {reason(error)}",
            hint=advise(error) or "run it as root",
            code="GPS-005",
        ) from error
    try:
        return _decode(parse_json(data))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise GpusnapError(
            f"the installation record {path} is damaged: {error!r}",
            hint="inspect it; if it is removed, gpusnap install --force writes a new one",
        ) from error


def _decode(document: Any) -> Record:
    if document["version"] != _VERSION:
        raise ValueError(f"version {document['version']!r}, but this gpusnap supports only {_VERSION}")
    entries = tuple(
        Entry(_path(each["path"]), str(each["part"]), tuple(map(str, each["states"])))
        for each in document["entries"]
    )
    return Record(entries, tuple(map(_path, document["folders"])), str(document["gpusnap"]))


def _path(value: Any) -> str:
    """Check a path of a record, by which root removes files: absolute, and without a step up."""
    if not isinstance(value, str) or not value.startswith("/") or os.path.normpath(value) != value:
        raise ValueError(f"{value!r} is not a normalised absolute path")
    return value


def save(record: Record, root: str, before: Record) -> None:
    """Write the record if it has changed. Raises GpusnapError."""
    if replace(record, version=before.version) == before and before.version == __version__:
        return
    entries = [{"path": e.path, "part": e.part, "states": list(e.states)} for e in record.entries]
    document: Mapping[str, Any] = {
        "version": _VERSION,
        "gpusnap": __version__,
        "entries": entries,
        "folders": list(record.folders),
    }
    path = join_root(root, RECORD)
    try:
        put_file(path, json.dumps(document, indent=1).encode() + b"\n", 0o644)
    except OSError as error:
        raise GpusnapError(
            f"the record {path} cannot be written: {reason(error)}",
            hint=advise(error) or "run it as root",
            code="GPS-005",
        ) from error
