"""Restored containers that run while their Podman says otherwise: found, and ended for whoever says so.

See runtime_shim/snapshot/restored_containers.py for how they come about. Each is asked for at the Podman that
had it restored. A container that Podman lists as running or paused is never named here, and none is ended but
by its ID or its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from gpusnap.engines import podman
from runtime_shim.errors import GpusnapError
from runtime_shim.snapshot import restored_containers
from runtime_shim.snapshot.records import journal
from runtime_shim.snapshot.recover_restore import Restore

__all__ = ["Unknown", "chosen", "end", "unknown"]

_PATIENCE = 15.0
"""Seconds for Podman's answer."""
_SHORT = 3.0
"""Where it is certain without one that Podman does not have it as running."""
# libpod/define/containerstate.go. In the others (initialized, removing, …) Podman itself is at work on it.
_AT_REST = ("created", "configured", "exited", "stopped")


@dataclass(frozen=True, slots=True)
class Unknown:
    """A container that runs without its Podman's knowledge."""

    container: str
    """Its ID."""
    processes: tuple[int, ...]
    """Its init."""
    why: str
    """What Podman says of it, and what ends it."""


def unknown(entries: Iterable[Restore]) -> tuple[tuple[Unknown, ...], tuple[str, ...]]:
    """Those of which Podman says, or is certain to say, that they do not run; a line for each unanswered."""
    found, lines = [], []
    for entry in entries:
        if entry.at_work or _is_busy(entry):
            continue
        try:
            why = _why(entry)
        except GpusnapError as error:
            lines.append(
                f"{entry.container}  {_runs(entry)}; whether Podman knows is open: {error.sentence()}"
            )
            continue
        if why is not None and restored_containers.lives(entry):
            ends = f"{_runs(entry)}, but {why}; to end it: gpusnap recover {entry.container}"
            found.append(Unknown(entry.container, entry.init[:1] if entry.init else (), ends))
    return tuple(found), tuple(lines)


def end(entry: Restore) -> str | None:
    """End one of these; None where Podman has it as running, and it was left alone. Raises GpusnapError."""
    return restored_containers.end(entry, partial(_why, entry))


def chosen(wanted: str, ids: Sequence[str]) -> str:
    """Which of these IDs is meant: by the ID, by its beginning, or by Podman's name; else what was given.

    Raises GpusnapError where several begin so.
    """
    found = sorted({each for each in ids if each.startswith(wanted)})
    if wanted in found:
        return wanted
    if len(found) > 1:
        more = " or ".join(found)
        raise GpusnapError(f"the IDs of several containers begin with {wanted}", hint=f"give more: {more}")
    if found:
        return found[0]
    named = podman.full_id(wanted, seconds=_PATIENCE) if ids else ""
    return named if named in ids else wanted


def _why(entry: Restore) -> str | None:
    """Why it runs without Podman's knowledge; None where Podman knows. Raises GpusnapError without an answer.

    Podman may give none where gpusnap-runtime was killed: it waits for conmon, which waits for what the
    container would say of the failure, and has the container's lock meanwhile.
    """
    seconds = _PATIENCE if entry.told else _SHORT
    try:
        status = podman.status(entry.container, command=entry.podman, seconds=seconds)
    except GpusnapError:
        if entry.told:
            raise
        return "gpusnap-runtime was killed before it could tell Podman"
    if not status:
        return "Podman knows no such container"
    return f"Podman has it as {status}" if status in _AT_REST else None


def _runs(entry: Restore) -> str:
    init = entry.init[0] if entry.init else 0
    return f"it was restored and runs under {os.path.basename(entry.command[0])} (process {init})"


def _is_busy(entry: Restore) -> bool:
    """Whether a gpusnap is at work on it."""
    try:
        with journal.held(entry.key):
            return False
    except GpusnapError:
        return True
