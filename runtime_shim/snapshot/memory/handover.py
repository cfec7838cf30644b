"""Memory of a checkpoint that the runtime hands over to the `gpusnap checkpoint` that ordered it.

The command commits the memory together with the records of Podman, which it has only when the runtime has
ended. So both are one artifact, committed once:

    gpusnap checkpoint              runtime                          STORE/staging/NAME
    orders it, with NAME      ───>  writes chunks, syncs them        locked by the runtime, precious
                                    writes the manifest: `complete`  precious
    takes it over, adds Podman's
    records, and commits all                                         locked by the command, then removed

Without such an order, and if the command has ended, the runtime commits the memory itself, without records.
If the command is killed later, `gpusnap recover` does that, or a restore on this host that needs the chunks.

What is in `complete`: a line of JSON that says which gpusnap ordered it (records/origin.py), with the PID and
start time of the command; then the manifest. Only that gpusnap knows whether the command still runs, so
others of the store leave it alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from gpusnap.oci.base.dataclass import asdict, dataclass, list_fields
from gpusnap.oci.base.errors import NotThere, OciError, StagingBusy
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.chunks import artifact as artifacts
from gpusnap.oci.chunks.table import descriptors
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.store.staging import Staging
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import ManifestError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records.artifact import write_artifact
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.records.manifest_json import decode, encode
from gpusnap.runtime_shim.snapshot.records import journal, origin
from gpusnap.runtime_shim.snapshot.records.origin import Origin


@dataclass(frozen=True, slots=True)
class Recipient:
    """A `gpusnap checkpoint` that takes the memory over."""

    staging: str
    """The name of the staging directory in its store."""
    owner: tuple[int, int]
    """PID and start time of the command."""

    @property
    def is_alive(self) -> bool:
        """Return whether the command still runs."""
        return proc.is_same(*self.owner)


class HandedOverMemory:
    """Memory that was handed over and is taken over now: nobody else uses its staging directory."""

    def __init__(self, store: Store, staging: Staging, note: bytes) -> None:
        self.staging = staging
        self._store, self._note = store, note

    def read(self) -> Manifest:
        """Return its manifest. Raises ManifestError."""
        return _parse_record(self._note, os.path.basename(self.staging.path))

    def commit(self) -> Manifest:
        """Commit it as an artifact without records, and return its manifest. The directory stays.

        Raises OciError, ManifestError.
        """
        layout, record = self.staging.layout, self.read()
        # Whatever else is in it belongs to a checkpoint that failed, and may have filled the disk.
        self.staging.prune(each.digest for each in descriptors(record.tables))
        config = digest_of(_get_manifest(self._note))
        if config not in self._list_configs():  # its command may have been killed after the commit
            self.staging.commit(write_artifact(layout, record), tables=record.tables)
        return record

    def remove(self) -> None:
        """Remove the directory: the memory is committed, or nobody needs it.

        Raises DiskError; then `gpusnap recover` removes it.
        """
        try:
            self.staging.unmark_precious()
        except BaseException:
            self.leave()
            raise
        self.staging.close()

    def leave(self) -> None:
        """Leave it as it is, for `gpusnap recover`."""
        self.staging.close(leave=True)

    def _list_configs(self) -> set[str]:
        found = set()
        for entry in self._store.entries():
            try:
                found.add(artifacts.read(entry.descriptor, self._store.read).config.digest)
            except OciError:  # another tool's, or damaged
                continue
        return found


def hand_over(staging: Staging, record: Manifest, recipient: Recipient) -> None:
    """Complete a precious staging directory for its recipient. Raises OciError, ManifestError, OSError."""
    owner = json.dumps({**asdict(origin.identify()), "owner": recipient.owner})
    staging.hand_over(owner.encode() + b"\n" + encode(record))


def take_over(store: Store, name: str) -> HandedOverMemory | None:
    """Take over what was handed over in the staging directory `name`; None if nothing was.

    Raises OciError.
    """
    try:
        staging, note = store.take_over(name)
    except NotThere:
        return None
    return HandedOverMemory(store, staging, note)


def take_unneeded(store: Store, name: str) -> HandedOverMemory | None:
    """Take over what was handed over in the staging directory `name`; None if nothing was, or it is needed.

    The journal says what is needed as it is. An entry that cannot be read may need all memory of its
    container. Raises OciError, GpusnapError.
    """
    taken = take_over(store, name)
    if taken is None:
        return None
    needed = True
    try:
        layouts, unreadable = journal.list_layouts()  # it named this one before it was handed over
        needed = taken.staging.layout.path in layouts or bool(
            unreadable and taken.read().container in unreadable
        )
    finally:
        if needed:
            taken.leave()
    return None if needed else taken


def commit_left(store: Store, container: str | None = None) -> Iterator[Manifest]:
    """Commit the memory whose command has ended; yield each manifest when its memory is committed.

    `container`: the ID of the only container whose memory is committed; None for all. Memory is left alone
    that another process is committing just now, that `take_unneeded` leaves, or that another gpusnap of the
    store ordered. Raises GpusnapError, and at the end, after all others were committed, the first OciError or
    ManifestError.
    """
    left, failures = _list_left(store), list[OciError | ManifestError]()
    for name, note in left.items():
        if container not in (None, _get_container(note)):
            continue
        try:
            record = _commit_one_left(store, name)
        except (OciError, ManifestError) as error:  # a damaged one keeps no other one from the store
            failures.append(error)
            continue
        if record is not None:
            yield record
    if failures:
        raise failures[0]


def _commit_one_left(store: Store, name: str) -> Manifest | None:
    """Commit what was handed over in a staging directory, unless somebody else does or needs it as it is."""
    try:
        taken = take_unneeded(store, name)
    except StagingBusy:
        return None
    if taken is None:
        return None
    try:
        record = taken.commit()
    except BaseException:
        taken.leave()
        raise
    with suppress(OciError):  # the next one removes it
        taken.remove()
    return record


def list_left(store: Store) -> tuple[Manifest, ...]:
    """Return the manifests of memory whose command has ended. Raises OciError.

    A damaged one is left out; `commit_left` raises what is wrong with it.
    """
    found = []
    for name, note in _list_left(store).items():
        with suppress(ManifestError):
            found.append(_parse_record(note, name))
    return tuple(found)


def find_left(layout: str) -> str:
    """Return the container whose memory `commit_left` would commit; "" if nothing of that kind is there.

    `layout`: the path of the staging directory. Raises OciError.
    """
    notes = _list_left(Store(os.path.dirname(os.path.dirname(layout))))
    return _get_container(notes.get(os.path.basename(layout), b""))


def list_of_others(store: Store) -> frozenset[str]:
    """Return the names of staging directories whose memory only another gpusnap may commit.

    Raises OciError.
    """
    return frozenset(name for name, note in store.list_handed_over().items() if _is_of_another(note))


def _list_left(store: Store) -> dict[str, bytes]:
    return {name: note for name, note in store.list_handed_over().items() if not _is_needed(note)}


def _is_needed(note: bytes) -> bool:
    """Return whether the command that was to take it over still runs, or only another gpusnap can tell."""
    try:
        document = parse_json(note.partition(b"\n")[0])
        if isinstance(document, list):  # an earlier version's
            boot, pid, start = document
            return boot == state_files.boot() and proc.is_same(int(pid), int(start))
        pid, start = document["owner"]
        wrote = _get_origin(document)
        if not (wrote.is_own or wrote.is_own_renamed):
            return True
        return wrote.is_this_run and proc.is_same(int(pid), int(start))
    except (ValueError, TypeError, KeyError):
        return False
    except OSError:  # it cannot be known
        return True


def _is_of_another(note: bytes) -> bool:
    try:
        wrote = _get_origin(parse_json(note.partition(b"\n")[0]))
        return not (wrote.is_own or wrote.is_own_renamed)
    except (ValueError, TypeError, KeyError, OSError):
        return False


def _get_origin(document: Mapping[str, Any]) -> Origin:
    """Raises KeyError; TypeError for the list of an earlier version."""
    return Origin(*(str(document[name]) for name in list_fields(Origin)))


def _get_manifest(note: bytes) -> bytes:
    return note.partition(b"\n")[2]


def _get_container(note: bytes) -> str:
    """Return the ID of the container of a note; "" if its manifest cannot be read."""
    try:
        return _parse_record(note, "").container
    except ManifestError:
        return ""


def _parse_record(note: bytes, name: str) -> Manifest:
    try:
        return decode(_get_manifest(note), f"the manifest of the staging {name}")
    except ManifestError as error:
        error.add_hint("gpusnap gc names its directory")
        raise
