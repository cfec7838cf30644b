"""Remembers on disk where checkpoints in progress write, for `gpusnap recover` after a reboot.

    /var/lib/gpusnap/in-progress/    0700; on disk, since the orders in /run are gone after a reboot
        <random>.json                {"owner": [pid, start], "boot": …, "place": …, "mount": …,
                                      "file-system": …, "by-uuid": …, "archive": …, "target": …,
                                      "container": …}

There is a file for each command that writes elsewhere than to this host's store. It is removed when the
command ends, unless something is left there, and by `gpusnap recover` when nothing is left.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.files import exists
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base import deadlines
from gpusnap.runtime_shim.base.errors import reason
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.file_system import FileSystem, find_file_system, is_in_ram

FOLDER = "/var/lib/gpusnap/in-progress"
_LIMIT = 64 << 10


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command wrote that was killed, on this boot or before."""

    path: str
    """The store, or the directory of the archive."""
    file_system: FileSystem
    archive: str
    """The path to which Podman exported; empty if that is in the store."""
    target: str
    """The path that the archive was to get."""
    container: str
    """The name of the container; empty if it is not known."""
    noted: str
    """The file that says so."""

    def find_problem(self) -> str:
        """Return why nothing can be said of what is there; "" if it can be looked at."""

        def is_mounted() -> bool:
            exists(self.path)  # it is no problem that it was removed; an error is
            return find_file_system(self.path).is_same(self.file_system)

        try:
            return "" if deadlines.ask(is_mounted, self.path) else "its file system is not mounted"
        except TimeoutError:
            return "its file system does not respond"
        except OSError as error:
            return f"it cannot be read: {reason(error)}"

    @property
    def has_archive(self) -> bool:
        """Whether its archive exists; yes if that cannot be told."""
        try:
            return bool(self.archive) and deadlines.ask(partial(exists, self.archive), self.archive)
        except OSError:
            return True


@contextmanager
def remember(
    path: str,
    *,
    archive: str = "",
    target: str = "",
    container: str = "",
    is_needed: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Keep a file that names the place while the block runs, and after it if `is_needed`.

    The parameters are as in `Place`. A disk that takes no such file does not prevent the checkpoint.
    """
    noted = os.path.join(FOLDER, f"{secrets.token_hex(8)}.json")
    try:
        found = find_file_system(path)
        document = {
            "owner": state_files.owner(),
            "boot": state_files.boot(),
            "place": path,
            "mount": found.mount,
            "file-system": found.identity,
            "by-uuid": found.by_uuid,
            "archive": archive,
            "target": target,
            "container": container,
        }
        state_files.write_durably(noted, json.dumps(document).encode())
    except OSError as error:
        note(
            f"{FOLDER} cannot be written: {reason(error)}; if this host loses power during the checkpoint, "
            f"gpusnap recover will not look for what is left in {path}",
            code="GPS-007",
        )
    try:
        yield
    finally:
        if not is_needed():
            with suppress(OSError):
                state_files.remove(noted)


def list_ended() -> tuple[Place, ...]:
    """Return those of commands that have ended, in order."""
    found = [place for place, is_gone in _read_ended() if not is_gone]
    return tuple(sorted(found, key=lambda each: (each.path, each.archive)))


def sweep(left: Collection[str]) -> None:
    """Forget those of commands that have ended, but for those whose path or file is named, or has an archive.

    `left`: what is named.
    """
    for each, is_gone in [*_read_ended()]:
        if is_gone or (not {each.path, each.noted} & set(left) and not each.has_archive):
            with suppress(OSError):
                state_files.remove(each.noted)


def _read_ended() -> Iterator[tuple[Place, bool]]:
    """Yield those of commands that have ended, and whether what was there went with a reboot."""
    with suppress(OSError):
        for name in sorted(os.listdir(FOLDER)):
            with suppress(OSError, ValueError, KeyError, TypeError):
                if name.endswith(".json"):
                    noted = os.path.join(FOLDER, name)
                    document = state_files.read(noted, limit=_LIMIT)
                    pid, start = document["owner"]
                    rebooted = document["boot"] != state_files.boot()
                    if rebooted or not proc.is_same(int(pid), int(start)):
                        by_uuid = str(document.get("by-uuid", ""))
                        where = FileSystem(str(document["mount"]), str(document["file-system"]), by_uuid)
                        archive, target = str(document["archive"]), str(document["target"])
                        path, container = str(document["place"]), str(document.get("container", ""))
                        place = Place(path, where, archive, target, container, noted)
                        yield place, rebooted and is_in_ram(where.identity)
