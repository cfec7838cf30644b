"""Pairs of commands of a container, and the notes on pairs of which only the first has been run.

    /run/gpusnap/journal/<ID>.pre-checkpoint     while the one after may have to be run; gone after a reboot,
    /run/gpusnap/journal/<ID>.pre-suspend        as are the processes

Written before the first command, or by a resume or a restore before it begins; removed when the one after has
been run, or when a later `gpusnap restore` or `gpusnap resume` runs it. If gpusnap is killed in between, the
note stays (`due.py`). A note names the gpusnap that wrote it, the container's first process, and the mark of
the command that may be running.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.snapshot.records import journal

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Pair:
    """A command before, and the one that undoes it or follows, by the names of their annotations."""

    before: str
    after: str


CHECKPOINT = Pair("pre-checkpoint", "post-restore")
SUSPEND = Pair("pre-suspend", "post-resume")
PAIRS = (CHECKPOINT, SUSPEND)


@dataclass(frozen=True, slots=True)
class OpenPair(journal.Record):
    """The note on a pair."""

    key: str
    """The ID of the container: only Podman's have such commands."""
    pair: Pair
    owner: tuple[int, int]
    """PID and start time of the gpusnap that wrote it."""
    init: tuple[int, int]
    """PID and start time of the container's first process; (0, 0) if it did not run."""
    mark: str = ""
    """In the environment of the command that was run last, and of all that it started."""


def note(container: str, pair: Pair, *, init: int = 0, mark: str = "") -> None:
    """Note that the command after is due in a container, by its ID. Raises GpusnapError.

    `init`: the PID of its first process; 0 if it does not run yet. `mark`: as in OpenPair.
    """
    first = state_files.owner(init) if init else (0, 0)
    _write(OpenPair(container, pair, state_files.owner(), first, mark))


def _write(found: OpenPair) -> None:
    document = {"version": _VERSION, "owner": found.owner, "init": found.init, "mark": found.mark}
    journal.write_document(found.container, found.pair.before, document)


def note_ahead(container: str, pair: Pair, *, init: int = 0) -> bool:
    """Note it before a resume or a restore begins, as `note`; return whether it is noted now.

    It is not if another gpusnap is at work on the pair, or without room: that must keep no container from
    its restore.
    """
    earlier = find(container, pair)
    if earlier is not None and earlier.at_work:
        return False
    with suppress(GpusnapError):
        note(container, pair, init=init, mark=earlier.mark if earlier is not None else "")
        return True
    return False


def put_back(container: str, pair: Pair, earlier: OpenPair | None) -> None:
    """Replace a note by the one that was there before; remove it if there was none."""
    close(container, pair)
    if earlier is not None:
        with suppress(GpusnapError):
            _write(earlier)


def read(container: str, pair: Pair) -> OpenPair | None:
    """Return the note on a pair; None if it is not open. Raises GpusnapError if it cannot be read."""
    document = journal.load(container, pair.before)
    if document is None:
        return None
    try:
        if document["version"] != _VERSION:
            raise ValueError(document["version"])
        owner, init = journal.identity(document["owner"]), journal.identity(document["init"])
        return OpenPair(container, pair, owner, init, str(document["mark"]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise GpusnapError(
            f"the note on the command {pair.after} of the container {container[:12]} was not written by this "
            f"version of gpusnap: {error}",
            hint=f"run gpusnap recover with the version that wrote it, or remove {get_path(container, pair)}",
            code="GPS-023",
        ) from error


def get_path(container: str, pair: Pair) -> str:
    """Return the path of a note, for messages."""
    return f"{journal.FOLDER}/{container}.{pair.before}"


def find(container: str, pair: Pair) -> OpenPair | None:
    """Return the note on a pair; None also if it cannot be read, which `gpusnap recover` reports."""
    with suppress(GpusnapError):
        return read(container, pair)
    return None


def close(container: str, pair: Pair) -> None:
    """Note that nothing is due any more. If the note stays, `gpusnap recover` looks at it."""
    with suppress(OSError):
        journal.drop(container, pair.before)


def list_open(unreadable: dict[str, GpusnapError]) -> tuple[OpenPair, ...]:
    """Return all notes; the errors of those that cannot be read are added to `unreadable`, by container."""
    found: list[OpenPair] = []
    for pair in PAIRS:
        found += journal.read_each(journal.list_noted(pair.before), partial(read, pair=pair), unreadable)
    return tuple(found)
