"""Commands of containers that a killed gpusnap has not run: after a checkpoint, a suspend or a restore.

`gpusnap recover` runs them, when it has recovered the container itself. Nothing is due any more in one that
has ended or was started anew; and a resume runs the command of one that is suspended.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from gpusnap.base.user_errors import NotFound
from gpusnap.container_hooks import commands, pairs
from gpusnap.container_hooks.pairs import CHECKPOINT, SUSPEND, OpenPair
from gpusnap.engines import podman
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.shim import overrides
from gpusnap.runtime_shim.snapshot.records import journal, suspensions

# Seconds for Podman to describe a container. A checkpoint of it may be in progress.
_PATIENCE = 15.0


@dataclass(frozen=True, slots=True)
class DueCommand:
    """A command that a killed gpusnap has not run."""

    opened: OpenPair
    found: podman.Container
    later: str = ""
    """What runs it, if it cannot be run now."""

    @property
    def container(self) -> str:
        """The ID of the container."""
        return self.opened.container

    @property
    def why(self) -> str:
        """What has happened, and what runs the command."""
        return f"gpusnap was killed before its command {self.opened.pair.after}: " + (
            self.later or "gpusnap recover runs it"
        )


def list_due(unreadable: dict[str, GpusnapError]) -> tuple[DueCommand, ...]:
    """Return the commands that are due. Of those for which this is not known, the errors are added to
    `unreadable`, by container.
    """
    found: list[DueCommand] = []
    for opened in pairs.list_open(unreadable):
        try:
            due = None if opened.at_work else _look(opened)
        except GpusnapError as error:
            unreadable[opened.key] = error
            continue
        if due is not None:
            found.append(due)
    return tuple(found)


def run(due: DueCommand) -> str:
    """Run a command that is due; return what was done, in words. Raises GpusnapError; it is still due then.

    Nothing is done if something else is due now, or first.
    """
    pair = due.opened.pair
    with overrides.keep_commands_alone(due.container):
        opened = pairs.read(due.container, pair)
        now = None if opened is None or opened.at_work else _look(opened)
        if now is None:
            return f"its command {pair.after} is no longer due"
        if now.later:
            return now.why
        if _is_to_be_recovered(due.container):
            return f"its command {pair.after} is due when it is recovered: run gpusnap recover again then"
        try:
            commands.run_due(now.found, pair)
        except GpusnapError as error:
            path = pairs.get_path(due.container, pair)
            error.add_hint(f"gpusnap recover runs it again, until {path} is removed")
            raise
    return f"its command {pair.after} was run, which a killed gpusnap had not done"


def run_all(container: str) -> None:
    """Run what is due in a container, by its ID; what fails, or cannot be run now, is left to `recover`."""
    with suppress(GpusnapError):
        for opened in pairs.list_open({}):
            if opened.container == container and not opened.at_work and (due := _look(opened)) is not None:
                run(due)


def sweep() -> None:
    """Remove the notes of killed gpusnaps on what is not due any more."""
    for opened in pairs.list_open({}):
        with suppress(GpusnapError):
            if opened.at_work or _look(opened) is not None:
                continue
            with overrides.keep_commands_alone(opened.container):
                # Unless a restore or a resume has written another one while Podman was asked.
                if pairs.read(opened.container, opened.pair) == opened:
                    pairs.close(opened.container, opened.pair)


def _look(opened: OpenPair) -> DueCommand | None:
    """Return whether the command is due, and when. Raises GpusnapError if that is not known."""
    try:
        with podman.Inspection(opened.container, seconds=_PATIENCE) as asked:
            found = asked.container()
    except NotFound:
        return None
    if found.id != opened.container:  # it is not an ID but a name, from a checkpoint
        return None
    if not commands.defines(found, opened.pair.after):
        return None
    suspension = suspensions.find_by_container(found.id)
    if suspension is not None and suspension.is_alive:
        if suspension.stage is not suspensions.Stage.SUSPENDED:
            return DueCommand(opened, found)  # `recover` undoes or completes that first
        if opened.pair is SUSPEND:
            return None  # a resume runs it
        return DueCommand(opened, found, f"run gpusnap recover after gpusnap resume {found.name}")
    if found.status in ("running", "paused"):
        if not _is_same_run(opened, found):
            return None
        unpause = f"run gpusnap recover after podman unpause {found.name}"
        return DueCommand(opened, found, unpause if found.status == "paused" else "")
    if opened.pair is CHECKPOINT and found.has_checkpoint():
        again = f"podman container restore {found.name}"
        return DueCommand(opened, found, f"gpusnap restore runs it; after {again}, gpusnap recover does")
    return None


def _is_same_run(opened: OpenPair, found: podman.Container) -> bool:
    """Return whether it runs as when the pair was noted, or from a checkpoint, and was not started anew."""
    pid, start = opened.init
    return found.restored or (bool(pid) and found.init == pid and proc.is_same(pid, start))


def _is_to_be_recovered(container: str) -> bool:
    """Return whether processes of a container may be stopped, because a gpusnap was killed, or is at work."""
    unreadable: dict[str, GpusnapError] = {}
    keys: Iterable[str] = [*(each.key for each in journal.entries(unreadable)), *unreadable]
    return container in map(container_key.id_of, (*keys, *journal.list_noted("restore")))
