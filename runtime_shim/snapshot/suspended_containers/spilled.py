"""The chunks of suspended containers in the store, and their removal: see spill.py.

The mark of a staging directory says which gpusnap wrote it (records/origin.py). Only that one knows whether
the container still exists. After a reboot it does not, and its host removes the chunks.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial

from gpusnap.oci.base.errors import OciError
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.store.paths import PRECIOUS
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base import deadlines
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.snapshot.memory import suspended_memory
from gpusnap.runtime_shim.snapshot.records import journal, origin
from gpusnap.runtime_shim.snapshot.records.origin import Origin

_MARK = compile_later(
    r"Suspended container's GPU memory: (?P<key>.*) on (?P<host>\S*) "
    r"\(machine (?P<machine>\S*), boot (?P<boot>\S*), records (?P<records>\S*)\)"
)
_ORIGIN = ("host", "machine", "boot", "records")
# The marks of versions that did not name the host.
_EARLIER_MARK = compile_later(r"GPU memory of the suspended container (?P<key>.*)")
_LOADED = compile_later(r"\d+-[0-9a-f]+\.load\.(\d+)\.(\d+)")
"""Files of load.py, with the PID and start time of the process that reads into them."""


def make_mark(key: str) -> str:
    """Return the text with which a staging directory names its owner. Raises OSError.

    It does not begin as the marks of earlier versions do: those versions remove all that they do not know.
    """
    own = origin.identify()
    return (
        f"Suspended container's GPU memory: {key} on {own.host} (machine {own.machine}, "
        f"boot {own.boot}, records {own.records})"
    )


def is_of_another(why: str) -> bool:
    """Return whether a mark is that of another gpusnap or version: `sweep` leaves its memory alone."""
    mark = _MARK.fullmatch(why)
    if mark is None:
        return _EARLIER_MARK.fullmatch(why) is not None
    try:
        return not Origin(*mark.group(*_ORIGIN)).is_own
    except OSError:  # it cannot be known
        return True


def explain_mark(why: str, layout: str) -> str:
    """Return whose spilled memory a mark names, and what a user can do with it; any other mark as it is.

    `layout`: the path of the staging directory with that mark.
    """
    mark = _MARK.fullmatch(why)
    if mark is None:
        earlier = _EARLIER_MARK.fullmatch(why)
        if earlier is None:
            return why
        return (
            f"memory of the container {container_key.id_of(earlier['key'])}, which an earlier version of "
            "gpusnap suspended, on this host or on another one that uses this store; if gpusnap ps shows it "
            f"nowhere, nobody needs it: remove {layout}"
        )
    host, container = mark["host"], container_key.id_of(mark["key"])
    what = f"memory of the suspended container {container}"
    removes = "gpusnap resume or gpusnap recover removes it"
    try:
        if Origin(*mark.group(*_ORIGIN)).is_own:
            return f"{what} of this host: {removes}"
        same_host = mark["boot"] == state_files.boot()
    except OSError:
        return f"{what} of {host}: {removes} there"
    if same_host:
        return (
            f"{what}, which another gpusnap on this host suspended that has a /run of its own, for example "
            f"in a container: {removes} there; if that is gone, nobody needs it: remove {layout}"
        )
    return (
        f"{what} of another host, {host}: {removes} there; if that host or the container is gone, nobody "
        f"needs it: remove {layout}"
    )


def sweep(path: str) -> None:
    """Remove chunks from a store that no suspended container uses any more, for example after a reboot.

    Those of other hosts stay; `gpusnap gc` names them. A store that does not answer in time is left alone: a
    container whose memory is in RAM does not need it.
    """
    with suppress(OSError, GpusnapError):
        for layout, key in deadlines.ask(partial(_list_marked, path), f"the store {path}"):
            with suppress(OSError, GpusnapError, OciError):
                if not container_key.is_key(key):
                    suspended_memory.discard(layout)
                elif not _is_used(layout, key):
                    # Again, under its lock: a spill that has just freed the RAM has named it meanwhile.
                    with journal.hold(key, patience=0):
                        if not _is_used(layout, key):
                            suspended_memory.discard(layout)  # not while it is written: it has an owner then


def _list_marked(path: str) -> list[tuple[str, str]]:
    """Return our own staging directories of spills in a store, with the key of each one's container."""
    folder, found = os.path.join(os.path.realpath(path), "staging"), []
    for name in os.listdir(folder):
        with suppress(OSError, ValueError):
            with open(os.path.join(folder, name, PRECIOUS), encoding="utf-8") as file:
                whose = file.read(4096)
            mark = _MARK.fullmatch(whose)
            if mark is not None and Origin(*mark.group(*_ORIGIN)).is_own:
                found.append((os.path.join(folder, name), mark["key"]))
    return found


def _is_used(layout: str, key: str) -> bool:
    """Whether the journal names a staging directory, maybe by another path: a store can be moved."""
    entry = journal.read(key)
    return entry is not None and os.path.basename(entry.layout) == os.path.basename(layout)


def sweep_loaded(key: str) -> None:
    """Remove files that a killed gpusnap read memory into. Raises OSError."""
    for path in tmpfs.sizes(key):
        found = _LOADED.fullmatch(os.path.basename(path))
        if found is not None and not proc.is_same(int(found[1]), int(found[2])):
            with suppress(FileNotFoundError):
                os.unlink(path)
