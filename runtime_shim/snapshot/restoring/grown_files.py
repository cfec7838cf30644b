"""Files that a process had open for writing, and that have another size now than at the dump.

CRIU restores such a file only if it has the size that it had (validation.txt of its documentation; "has bad
size"), unless it was opened for appending only. There are two reasons for another size:

- A checkpoint that leaves a container running: engines read the container's files after it has continued.
  gpusnap restores what it could copy meanwhile (records/volumes.py). A larger file is newer than the memory.
  Nobody else uses that copy, and the checkpoint still has it, so gpusnap cuts it to its size at the dump.
- A volume or a directory of the host, which is in no checkpoint: the container went on to write there, and
  ended later. What it wrote since would be lost, so gpusnap says how to cut the file, and does so only with
  the setting criu.cut-files.

A file that is shorter than it was lacks bytes that the process has written, so there is nothing to restore.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from typing import Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.files import open_below
from gpusnap.runtime_shim.base.errors import ImageError, Refused, raise_as
from gpusnap.runtime_shim.runtime.bundle import binds
from gpusnap.runtime_shim.runtime.criu.images.written_file import WrittenFile
from gpusnap.runtime_shim.snapshot.records import volumes

# As many files are named in a message.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class OtherSize:
    """A file with another size than at the dump."""

    file: WrittenFile
    top: str
    """A directory of this host: the container's root, or the source of a mount."""
    name: str
    """The file below it."""
    size: int
    """Now, in bytes."""
    own: bool
    """Whether it is in the file system that the engine has made for this container."""

    @property
    def path(self) -> str:
        """The file on this host."""
        return os.path.join(self.top, self.name)


def find(
    written: Iterable[WrittenFile], restored: Container[str], config: Mapping[str, Any], bundle: str
) -> tuple[OtherSize, ...]:
    """Return those whose size differs, by the config.json of the new container.

    A file that is missing is left to CRIU, and so is one on a tmpfs, which CRIU itself restores, in a mount
    whose files gpusnap restores, or in `restored` (records/volumes.py).
    """
    tops = _list_tops(config, bundle)
    found: dict[str, OtherSize] = {}
    for file in written:
        top, name, own = _locate(file.path, tops)
        if not top or _normalise(file.path) in restored:
            continue
        with suppress(OSError, ValueError):
            opened, size = open_below(top, name)
            opened.close()
            if size != file.size:
                found[file.path] = OtherSize(file, top, name, size, own)
    return tuple(found.values())


def check(found: Iterable[OtherSize], *, may_cut: bool) -> None:
    """Raise Refused if a file is not as it was, and may not be cut. `may_cut`: those of the host, too."""
    short = next((each for each in found if each.size < each.file.size), None)
    if short is not None:
        raise Refused(
            f"{short.file.path} of the container had {short.file.size} bytes at the checkpoint, and "
            f"{short.path} has {short.size}: what a process has written to it is gone",
            hint="put the file back as it was, or use another checkpoint",
            code="GPS-528",
        )
    grown = [] if may_cut else [each for each in found if not each.own]
    if not grown:
        return
    first, others = grown[0], len(grown) - 1
    more = f", and so have {others} other files" if others else ""
    cut = " && ".join(f"truncate --size {each.file.size} {shlex.quote(each.path)}" for each in grown[:_NAMED])
    raise Refused(
        f"{first.path}, which the container has open for writing as {first.file.path}, has grown from "
        f"{first.file.size} to {first.size} bytes since the checkpoint{more}; the checkpoint does not "
        "contain it",
        hint=f"to continue as of the checkpoint, keep a copy if you need what was written since, then: {cut}",
        code="GPS-528",
    )


def cut(found: Iterable[OtherSize]) -> tuple[str, ...]:
    """Cut files to their size at the dump; return their names in the container.

    Raises ImageError.
    """
    done = []
    for each in found:
        with raise_as(ImageError, f"{each.path} cannot be cut to its size at the checkpoint"):
            opened, _ = open_below(each.top, each.name)
            with opened:
                os.truncate(f"/proc/self/fd/{opened.fileno()}", each.file.size)
        done.append(each.file.path)
    return tuple(done)


def _list_tops(config: Mapping[str, Any], bundle: str) -> dict[str, tuple[str, bool]]:
    """Return by destination the directory or file of this host, and whether it is own; empty: not to look."""
    tops: dict[str, tuple[str, bool]] = {}
    if path := volumes.find_root_path(config, bundle):
        tops["/"] = path, volumes.find_root(config, bundle) is not None
    mounts = config.get("mounts")
    for mount in mounts if isinstance(mounts, list) else ():
        if isinstance(mount, dict) and isinstance(mount.get("destination"), str):
            tops[os.path.normpath(mount["destination"])] = "", False
    for mount in binds(config):
        destination, source = mount.get("destination"), mount.get("source")
        if isinstance(destination, str) and isinstance(source, str):
            tops[os.path.normpath(destination)] = os.path.join(bundle, source), False
    for volume in volumes.find(config, bundle):
        tops[volume.destination] = "", False
    return tops


def _normalise(path: str) -> str:
    return os.path.normpath(f"/{path.lstrip('/')}")


def _locate(path: str, tops: Mapping[str, tuple[str, bool]]) -> tuple[str, str, bool]:
    """Return the directory of this host that has a file of the container, the name below, and as above.

    The path comes from the checkpoint, and may contain anything.
    """
    above = path = _normalise(path)
    while above not in tops:
        if above == "/":
            return "", "", False
        above = os.path.dirname(above)
    top, own = tops[above]
    if not top or above != path:
        return top, os.path.relpath(path, above), own
    return os.path.dirname(top), os.path.basename(top), own
