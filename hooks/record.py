"""The record of a container's GPUs, /run/gpusnap/containers/ID/gpus.json; the schema is gpus.schema.json.

Written at createRuntime. It says what the container was given, not what it uses: only the driver knows that.
A restored container has one only if the runtime runs createRuntime hooks again, as runc does.
"""

from __future__ import annotations

from datetime import UTC, datetime

from gpusnap.hooks.documents import HookError, check_schema, encode, parse, read_file
from gpusnap.hooks.record_directories import check_id, open_directory
from gpusnap.oci.base.dataclass import asdict, dataclass
from gpusnap.oci.base.files import replace
from gpusnap.runtime_shim.base.errors import reason

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
    container = check_id(record.container)
    values = asdict(record)
    document = {
        "version": _VERSION,
        **values,
        "devices": list(values["devices"]),
        "cdi": list(record.cdi),
    }
    check_schema(document, "gpus", f"the record of container {container}")
    data = encode(document) + b"\n"
    try:
        try:
            _write(container, data)
        except FileNotFoundError:
            # poststop of an earlier container of that ID has just removed the directory.
            _write(container, data)
    except OSError as error:
        raise HookError(
            f"the record of container {container} cannot be written: {reason(error)}", code="GPS-908"
        ) from error


def _write(container: str, data: bytes) -> None:
    with open_directory(container, make=True) as directory:
        replace(NAME, data, directory, sync=False)


def read(container: str) -> Record | None:
    """Read the record of a container by its full ID, None without one. Raises HookError if it is broken."""
    what = f"the record of container {check_id(container)}"
    try:
        with open_directory(container) as directory:
            document = parse(read_file(NAME, _LIMIT, directory=directory), what)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HookError(f"{what} cannot be read: {reason(error)}", code="GPS-908") from error
    check_schema(document, "gpus", what)
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
