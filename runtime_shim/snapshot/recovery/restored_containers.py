"""Restored containers that Podman may not know of: it was killed, or it got an error.

conmon and gpusnap-runtime continue when Podman is killed, and the container runs with its GPU memory. Podman
then says that it does not run, or does not know its ID, and `podman rm` does not end it. The same happens if
gpusnap-runtime is killed when everything is done but not yet reported. So gpusnap-runtime records each
container that it restored for a Podman (journal.RESTORED), so that later commands can ask that Podman. The
file alone is no reason to end a container: it may have worked for hours.

A file counts while the container's init lives, identified by PID and start time. Other files are removed
whenever gpusnap restores, checkpoints or recovers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from gpusnap.oci.base.dataclass import replace
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.journal import RESTORED
from gpusnap.runtime_shim.snapshot.recovery import restore as recover_restore
from gpusnap.runtime_shim.snapshot.restoring import record as restore_record
from gpusnap.runtime_shim.snapshot.restoring.record import Restore

_ENDING = 30.0  # seconds that a killed container may take to end


def list_living() -> tuple[Restore, ...]:
    """Return those that still run, by container. If a file cannot be read, only print a note.

    No process depends on these files. Raises GpusnapError if the directory cannot be read.
    """
    found = []
    for key in journal.list_noted(RESTORED):
        try:
            entry = restore_record.read(key, RESTORED)
        except GpusnapError as error:
            note(f"the record of a restored container is ignored: {error.sentence()}", code="GPS-023")
            continue
        if entry is not None and is_alive(entry):
            found.append(entry)
    return tuple(found)


def is_alive(entry: Restore) -> bool:
    """Whether the container that was restored then still runs, and is not about to end."""
    return entry.init is not None and proc.is_still_running(*entry.init)


def is_on_file(key: str, init: int) -> bool:
    """Whether Podman had the container with this init process restored; False if that cannot be read."""
    try:
        entry = restore_record.read(key, RESTORED)
    except GpusnapError:
        return False
    return entry is not None and is_alive(entry) and entry.init is not None and entry.init[0] == init


def record_report(key: str) -> None:
    """Record that the engine now gets the result. This must not fail: without room, the file is removed."""
    try:
        entry = restore_record.read(key, RESTORED)
        if entry is not None:
            restore_record.write(replace(entry, told=True), RESTORED)
    except GpusnapError:
        with suppress(OSError):
            journal.drop(key, RESTORED)


def sweep() -> None:
    """Remove the files of containers that have ended. What cannot be read or removed stays."""
    with suppress(GpusnapError):
        for key in journal.list_noted(RESTORED):
            with suppress(GpusnapError, OSError):
                _sweep(key)


def _sweep(key: str) -> None:
    entry = restore_record.read(key, RESTORED)
    if entry is None or (entry.init is not None and proc.is_same(*entry.init)):
        return
    with journal.hold(key, patience=0):  # meanwhile a restore of it may write the next one
        if restore_record.read(key, RESTORED) == entry:
            journal.drop(key, RESTORED)


def end_container(entry: Restore, unknown: Callable[[], str | None]) -> str | None:
    """End such a container, and check that nothing is left of it; return what was done, in words.

    `unknown` asks its Podman. If it returns None, Podman knows the container, which is not ended, and None is
    returned. Raises GpusnapError, also if another gpusnap is working on it.
    """
    with journal.hold(entry.key):
        if restore_record.read(entry.key, RESTORED) != entry or not is_alive(entry):
            return "it has exited"
        if entry.at_work:
            raise GpusnapError(
                f"gpusnap (process {entry.owner[0]}) has not reported container {entry.container} to "
                "Podman yet",
                hint="wait for it",
                code="GPS-020",
            )
        why = unknown()
        if why is None:
            return None
        if not is_alive(entry):
            return "it has exited"
        _check(entry)
        recover_restore.remove(entry)
        _wait_for_end(entry)
        journal.drop(entry.key, RESTORED)
    return f"it was killed: {why}"


def _check(entry: Restore) -> None:
    """Raise ContainerError if the runtime has another container with this ID."""
    try:
        found = containers.find(entry.command, entry.container)
    except ContainerError as error:
        if recover_restore.is_missing(error):
            return
        raise
    if entry.init is None or found.pid not in (0, entry.init[0]):
        raise ContainerError(
            f"container {entry.container} is now another one: its init is process {found.pid}",
            code="GPS-030",
        )


def _wait_for_end(entry: Restore) -> None:
    assert entry.init is not None
    deadline = time.monotonic() + _ENDING
    while proc.is_same(*entry.init):
        if time.monotonic() > deadline:
            raise GpusnapError(
                f"container {entry.container} was killed but does not exit: process {entry.init[0]}",
                hint=f"check /proc/{entry.init[0]}/stack for what it waits for",
                code="GPS-025",
            )
        time.sleep(0.02)
