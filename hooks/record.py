"""The record of a container's GPUs, /run/gpusnap/containers/ID/gpus.json; the schema is gpus.schema.json.

Written at createRuntime. It says what the container was given, not what it uses: only the driver knows that.
A restored container has one only if the runtime runs createRuntime hooks again, as runc does.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from datetime import UTC, datetime

from gpusnap.hooks import place, schema
from gpusnap.hooks.document import parse, text
from gpusnap.hooks.errors import HookError
from gpusnap.hooks.file import read_file
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.errors import reason

NAME = "gpus.json"
_VERSION = 1
_LIMIT = 4 << 20


@dataclass(frozen=True, slots=True)
class Node:
    """A device node, as the container sees it."""

    path: str
    major: int
    minor: int


@dataclass(frozen=True, slots=True)
class Record:
    """The GPUs that a container was given."""

    container: str
    """Full ID."""
    created: str
    """RFC 3339, UTC."""
    pid: int
    """The PID of its init, in the runtime's PID namespace; 0 if the runtime did not report it."""
    bundle: str
    driver: str
    """The version in the names of the mounted libraries; empty if none is mounted."""
    devices: tuple[Node, ...]
    cdi: tuple[str, ...]
    """CDI devices by name, if an annotation lists them."""
    visible: str
    """NVIDIA_VISIBLE_DEVICES."""


def format_now() -> str:
    """Return the time for `Record.created`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write(record: Record) -> None:
    """Write a record, in one step and readable only for root. Raises HookError."""
    container = place.check_id(record.container)
    values = asdict(record)
    document = {
        "version": _VERSION,
        **values,
        "devices": list(values["devices"]),
        "cdi": list(record.cdi),
    }
    schema.check(document, "gpus", f"the record of container {container}")
    try:
        with place.open_folder(container, make=True) as folder:
            _write(text(document) + b"\n", folder)
    except OSError as error:
        raise HookError(
            f"the record of container {container} cannot be written: {reason(error)}", code="GPS-908"
        ) from error


def _write(data: bytes, folder: int) -> None:
    pending = f".{NAME}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        os.unlink(pending, dir_fd=folder)
    try:
        with os.fdopen(os.open(pending, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(data)
        os.replace(pending, NAME, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(pending, dir_fd=folder)
        raise


def read(container: str) -> Record | None:
    """Read the record of a container by its full ID, None without one. Raises HookError if it is broken."""
    what = f"the record of container {place.check_id(container)}"
    try:
        with place.open_folder(container) as folder:
            document = parse(read_file(NAME, _LIMIT, folder=folder), what)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HookError(f"{what} cannot be read: {reason(error)}", code="GPS-908") from error
    schema.check(document, "gpus", what)
    if document["container"] != container:
        raise HookError(f"{what} belongs to container {document['container']}", code="GPS-908")
    return Record(
        container=container,
        created=document["created"],
        pid=int(document["pid"]),
        bundle=document["bundle"],
        driver=document["driver"],
        devices=tuple(Node(d["path"], int(d["major"]), int(d["minor"])) for d in document["devices"]),
        cdi=tuple(document["cdi"]),
        visible=document["visible"],
    )
