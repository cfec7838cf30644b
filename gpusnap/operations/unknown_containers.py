"""Finds restored containers that run although Podman says otherwise, and ends them on request.

runtime_shim/snapshot/recovery/restored_containers.py explains how this happens. For each container, gpusnap
asks the Podman that restored it. It never names a container that Podman lists as running or paused, and ends
one only by its ID or its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial

from gpusnap.engines import podman
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.files import exists
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.recovery import restored_containers
from gpusnap.runtime_shim.snapshot.restoring.record import Restore

_PATIENCE = 15.0
"""Seconds for Podman's answer."""
_SHORT = 3.0
"""Seconds if Podman certainly does not list it as running, whatever the answer is."""
# The length of a prefix of a random ID that nobody takes for a name.
_SURE = 12
# libpod/define/containerstate.go. In the other states (initialized, removing, …), Podman itself is at work.
_AT_REST = ("created", "configured", "exited", "stopped")


@dataclass(frozen=True, slots=True)
class UnknownContainer:
    """A container that runs without its Podman's knowledge."""

    container: str
    """Its ID."""
    processes: tuple[int, ...]
    """The PID of its init."""
    why: str
    """What Podman says about it, and the command that ends it."""


def list_unknown(entries: Iterable[Restore]) -> tuple[tuple[UnknownContainer, ...], tuple[str, ...]]:
    """Return the containers that do not run by Podman's answer, and a line for each unanswered question."""
    found, lines = [], []
    for entry in entries:
        if entry.at_work or _is_busy(entry):
            continue
        try:
            why = _explain_unknown(entry)
        except GpusnapError as error:
            lines.append(
                f"{entry.container}  {_runs(entry)}; cannot determine whether Podman knows it: "
                f"{error.sentence()}"
            )
            continue
        if why is not None and restored_containers.is_alive(entry):
            ends = f"{_runs(entry)}, but {why}{_gone(entry)}; to end it: gpusnap recover {entry.container}"
            found.append(UnknownContainer(entry.container, entry.init[:1] if entry.init else (), ends))
    return tuple(found), tuple(lines)


def end_container(entry: Restore) -> str | None:
    """End one of these; None if Podman lists it as running, and it was left alone. Raises GpusnapError."""
    return restored_containers.end_container(entry, partial(_explain_unknown, entry))


def choose_id(wanted: str, ids: Sequence[str]) -> str:
    """Choose one of these IDs by the ID, by Podman's name, or by a prefix; else return `wanted`.

    As in Podman, a name has priority over a prefix of another container's ID (`db` may be both). IDs of other
    engines may be any names, so a prefix of one does not select it. Raises GpusnapError if several IDs have
    the prefix, or if a few digits may be a name that Podman does not report.
    """
    if wanted in ids or not wanted or not ids:
        return wanted
    found = sorted({each for each in ids if podman.RANDOM_ID.fullmatch(each) and each.startswith(wanted)})
    try:
        named = podman.full_id(wanted, seconds=_PATIENCE)
    except GpusnapError as error:
        if found and len(wanted) < _SURE:
            raise GpusnapError(
                f"cannot determine whether a container has the name {wanted}: {error}",
                hint=f"give the ID: {found[0]}",
                code=error.code,
            ) from error
        named = ""
    if named:
        return named if named in ids else wanted
    if len(found) > 1:
        more = " or ".join(found)
        raise GpusnapError(f"the IDs of several containers begin with {wanted}", hint=f"give more: {more}")
    return found[0] if found else wanted


def _explain_unknown(entry: Restore) -> str | None:
    """Say why it runs without Podman's knowledge; None if Podman knows. Raises GpusnapError if unanswered.

    Podman may not answer if gpusnap-runtime was killed: it waits for conmon, which waits for the container's
    report of the failure, and holds the container's lock meanwhile.
    """
    seconds = _PATIENCE if entry.told else _SHORT
    try:
        status = podman.status(entry.container, command=entry.podman, seconds=seconds)
    except GpusnapError:
        if entry.told:
            raise
        return "gpusnap-runtime was killed before it could report it to Podman"
    if not status:
        return "Podman knows no such container"
    return f"Podman lists it as {status}" if status in _AT_REST else None


def _gone(entry: Restore) -> str:
    """Return a clause about a removed image: Podman removes it before it records that the container runs.

    Source: libpod/container_internal_common.go, restore.
    """
    try:
        if exists(os.path.join(entry.image, "inventory.img")):
            return ""
    except OSError:
        return ""
    return (
        "; Podman has removed its checkpoint, so ending the container loses its work unless "
        "another copy exists"
    )


def _runs(entry: Restore) -> str:
    init = entry.init[0] if entry.init else 0
    return f"it was restored and runs under {os.path.basename(entry.command[0])} (process {init})"


def _is_busy(entry: Restore) -> bool:
    """Return whether a gpusnap process is working on it."""
    try:
        with journal.hold(entry.key, patience=0):
            return False
    except GpusnapError:
        return True
