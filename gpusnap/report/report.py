"""`gpusnap report`: collects the facts for a bug report in one text."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from gpusnap.base.user_errors import convert_errors
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints.list import Row
from gpusnap.checkpoints.locator import InStore, default_store, open_store
from gpusnap.checkpoints.statistics import measure_stopped, statistics
from gpusnap.doctor import container as of_container
from gpusnap.doctor import host
from gpusnap.doctor.base import subject
from gpusnap.doctor.base.check import Check
from gpusnap.doctor.base.sources import ask, text
from gpusnap.doctor.versions import versions
from gpusnap.engines import podman
from gpusnap.oci.base.dataclass import list_fields
from gpusnap.oci.registry.credentials import list_files
from gpusnap.oci.store.tags import by_age
from gpusnap.report.mask import known_secrets, mask
from gpusnap.runtime_shim.base.errors import GpusnapError, printable, reason
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.gpu import find_driver
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.runtime.find import SETTINGS_FILE

_LINES = 200
_WIDEST = 2000
_LARGEST = 1 << 20
# CRIU's, in Podman's directory of the container. Not ctr.log: the program's output is private.
_LOGS = ("dump.log", "restore.log")
_JOURNAL = ("-t", "gpusnap", "-t", "gpusnap-runtime", "-t", "podman")
_DEADLINE = 20.0


def report(what: InStore | None, *, container: str = "", without: str = "") -> str:
    """Return the report about the host and, if given, a checkpoint; without secrets, without escapes.

    `container`: a name or ID for Podman, if there is no checkpoint. `without`: why there is none.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    parts: list[tuple[str, Callable[[], Iterator[str]]]] = [
        ("versions", _versions),
        ("settings", _settings),
        ("doctor", _doctor),
        ("store", _store),
    ]
    if what is not None:
        parts.append(("checkpoint", lambda: _checkpoint(what)))
        container = _container_of(what)
    elif without:
        parts.append(("checkpoint", lambda: iter([without])))
    if container:
        parts += [("container", lambda: _container(container)), ("logs of CRIU", lambda: _logs(container))]
    parts.append(("journal", _journal))
    lines = [f"gpusnap report, {now}", "Review it before you share it.", ""]
    for title, lines_of in parts:
        lines += [f"== {title} ==", *_collect_lines(lines_of), ""]
    secrets = known_secrets(auth_files=(path for path, _ in list_files()))
    # Cut afterwards: half a secret would not be recognised.
    masked = mask("\n".join(lines), secrets).split("\n")
    return "\n".join(printable(line[:_WIDEST]) for line in masked) + "\n"


def _collect_lines(lines_of: Callable[[], Iterator[str]]) -> list[str]:
    """Return the lines of a part; an error is the last line."""
    found: list[str] = []
    try:
        found.extend(lines_of())
    except Exception as error:  # reports are written about hosts on which something does not work
        found.append(f"not available: {type(error).__name__}: {error}")
    return found


def _versions() -> Iterator[str]:
    for part in versions().parts():
        yield f"{part.name}: {part.version or part.fault} {part.path} {part.note}".rstrip()


def _settings() -> Iterator[str]:
    found = text("/", SETTINGS_FILE)
    if found is None:
        yield f"{SETTINGS_FILE} does not exist, or cannot be read"
        return
    lines = [line for line in found.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    yield from lines or [f"{SETTINGS_FILE} sets nothing: all have their defaults"]


def _doctor() -> Iterator[str]:
    yield from map(_check, host.checks())


def _check(check: Check) -> str:
    return f"{check.verdict:<8} {check.name}: {check.says} {check.code}".rstrip()


def _store() -> Iterator[str]:
    """Yield lines about this host's store; if it cannot be read, what exists, and the error."""
    store = default_store()
    try:
        with convert_errors():
            entries = open_store(store).entries()
    except GpusnapError as error:
        yield error.sentence()
        try:
            names = sorted(os.listdir(store.path))
        except OSError as why:
            yield f"{store.path}: {reason(why)}"
            return
        yield f"{store.path} has: {', '.join(names)}" if names else f"{store.path} is empty"
        return
    yield f"{store.path}, entries in its index: {len(entries)}"


def _checkpoint(what: InStore) -> Iterator[str]:
    with kept.hold_artifact(what) as (store, found):
        yield f"{found.root.digest} in {store.path}, {human(found.size)}"
        for key, value in sorted(found.artifact.annotations.items()):
            if not key.startswith("io.gpusnap.label."):
                yield f"{key} = {value}"
        if found.record is None:
            yield "without GPU state"
            return
        yield from _record(found.record)


def _record(record: Manifest) -> Iterator[str]:
    for name in list_fields(record.host):
        yield f"host {name} = {getattr(record.host, name)}"
    for gpu in record.gpus:
        yield f"GPU {gpu.index}: {gpu.model}, {human(gpu.memory_used)} of {human(gpu.memory_total)} used"
    for process in record.processes:
        # Not its arguments: they may contain passwords.
        yield f"process {process.pid} {process.name}: {human(sum(used for _, used in process.gpus))}"
    figures = statistics(record)
    yield (
        f"memory {human(figures.size)}, {human(figures.zero)} zero, {figures.blobs} blobs of "
        f"{human(figures.stored)}, pages {record.pages}"
    )
    yield f"pause = {measure_stopped(record.timing)} s"
    for step in record.timing:
        yield f"{step.start:9.3f} {step.seconds:9.3f}  {step.name} {step.note}".rstrip()


def _container_of(what: InStore) -> str:
    """Return the ID of a checkpoint's container; empty if unknown."""
    try:
        with kept.hold_artifact(what) as (_, found):
            return found.artifact.annotations.get("io.gpusnap.container.id", "")
    except Exception:  # as in `_collect_lines`: the part about the checkpoint reports it
        return ""


def _container(container: str) -> Iterator[str]:
    """Yield Podman's description, and, if the container runs, what would prevent a checkpoint."""
    found = podman.inspect_container(container)
    yield f"{found.name} {found.id}, {found.status}, runtime {found.runtime}"
    if found.status == "running":
        yield from map(_check, of_container.checks(subject.find(found.id), find_driver()))


def _logs(container: str) -> Iterator[str]:
    """Yield the ends of CRIU's logs, if Podman still has the container."""
    folder = os.path.dirname(podman.inspect_container(container).checkpoint_path)
    for name in _LOGS:
        yield f"-- {name}"
        yield from _tail(os.path.join(folder, name))


def _tail(path: str) -> Iterator[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LARGEST))
            data = file.read(_LARGEST)
    except OSError:
        yield "not there"
        return
    yield from data.decode("utf-8", "replace").splitlines()[-_LINES:]


def _journal() -> Iterator[str]:
    done = ask(
        ["journalctl", "--no-pager", "--quiet", "--boot", f"--lines={_LINES}", *_JOURNAL], seconds=_DEADLINE
    )
    if done is None or done.code:
        yield "journalctl cannot be run, or has no messages"
        return
    # Podman logs much that is not about checkpoints.
    wanted = re.compile(r"gpusnap|checkpoint|restore|criu", re.I)
    yield from (line for line in done.out.splitlines() if wanted.search(line))


def newest(rows: tuple[Row, ...]) -> Row | None:
    """Return the newest complete checkpoint of a store."""
    found = [row for row in rows if row.kind == "checkpoint" and row.created]
    return max(found, key=lambda row: by_age(row.created), default=None)
