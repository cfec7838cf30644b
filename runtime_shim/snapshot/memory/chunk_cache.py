"""Keeps the chunks of a container's last checkpoint on this host, so the next one need not write them.

The image directory is its caller's: containerd deletes it once it is packed, Podman before a restore, and
the next checkpoint may go into the same one. So the blobs get second names here:

    /var/lib/gpusnap/kept/         memory.keep-folder, 0700: process memory is in it
        <container>/               0700; held (flock) by whoever links from it or changes it
            kept.json              {"version": 1, "bundle": path}: written first, removed last
            known.json             which chunk is in which blob (gpusnap.oci.chunks.index): written last,
                                   removed first
            oci-layout             it is an image layout, but one without an index: nothing to restore from
            blobs/sha256/<digest>  hard links of the image's blobs; no byte is written for them

The rules:

- What is kept is the last checkpoint after which the container ran on: after the others none follows. It
  takes no room beside the image, and as much as the chunks once that has been deleted.
- Links only. Where none can be made (another file system), or where the disk gets tight, nothing is kept and
  a note says why.
- It saves work and is needed for nothing. Whatever is wrong with it (removed at any moment, cut off, changed,
  somebody else's) is a miss, and no error of a checkpoint. A lock that is not had at once is a miss too.
- A blob is linked into a checkpoint without being read. It is the right one because it is the file that it
  was when it was made durable: gpusnap.oci.chunks.index compares inode, size and time of change.
- A writer that is killed leaves what was kept before, and blobs that nothing names: the next `keep` or `drop`
  of that container removes them. One that removes and is killed leaves kept.json, so that it is found again.
- What is kept of a container whose bundle is gone is removed when the next checkpoint of any container ends,
  and all of it where memory.keep is false. A checkpoint that lacks room has the oldest removed first.
- Only these names are ever removed, and only from a folder with kept.json or the container's own: whatever
  else memory.keep-folder holds stays.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from gpusnap.oci.base.errors import OciError
from gpusnap.oci.base.files import UNFINISHED, open_folder, read_regular, replace
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.base.locks import is_still_there, try_exclusive, unlock
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.base.threads import run_for_each
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.table import Table
from gpusnap.oci.layout.digests import get_hex
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.errors import reason
from gpusnap.runtime_shim.log import note
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.units import human

_RECORD = "kept.json"
_INDEX = "known.json"
_BLOBS = ("blobs", "sha256")
_LARGEST_RECORD = 16 << 10
_ID = compile_later(r"[A-Za-z0-9][\w.+-]{0,250}", re.ASCII)
_UNFINISHED = re.escape(UNFINISHED) + "[0-9a-f]{16}"
_CUT_OFF, _BLOB = compile_later(_UNFINISHED), compile_later("[0-9a-f]{64}|" + _UNFINISHED)
# This part of a file system stays free, or else room for another checkpoint of that size.
_FREE = 20
_THREADS = 8


class _NotCached(Exception):
    """Why nothing is kept, in words."""


# What is wrong with one that is only looked at, or removed: it is passed over.
_PASSED = (OSError, _NotCached)


class ChunkCache:
    """What is kept of one container, as `open` finds it; nobody else changes it until `close`.

    None of its methods raises anything: a checkpoint does not fail for want of it.
    """

    def __init__(self, settings: Memory, container: str, bundle: str) -> None:
        self._settings = settings
        self._container, self._bundle = container, os.path.abspath(bundle)
        self._folder = _place(settings)
        self._path = os.path.join(self._folder, container)
        self._lock: int | None = None
        self.known: Known | None = None
        """The chunks of the last checkpoint, for gpusnap.oci.chunks.writer.write."""

    @classmethod
    def open(cls, settings: Memory, container: str, bundle: str) -> ChunkCache:
        """What is kept of that container. `bundle`: its folder, there for as long as the container is."""
        kept = cls(settings, container, bundle)
        with contextlib.suppress(*_PASSED):
            kept._lock = _locked(kept._folder, container)
            if settings.keep and _bundle_of(kept._path) == kept._bundle:
                known = Known(os.path.join(kept._path, _INDEX))
                kept.known = known if len(known) else None
        return kept

    def __enter__(self) -> ChunkCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keep(self, layout: Layout, tables: Sequence[Table]) -> None:
        """Keep the chunks of a checkpoint, in place of what was kept. Its layout is durable by now.

        Where that cannot be, nothing is kept any more, and a note says why. What is kept of containers that
        are gone is removed.
        """
        blobs = {chunk.blob: chunk.stored for table in tables for chunk in table.chunks}
        if not self._settings.keep or not blobs:
            self.drop()
            return
        try:
            self._replace(layout, tables, blobs)
            tidy(self._settings)
            return
        except (OciError, _NotCached) as error:
            why = str(error)
        except OSError as error:
            why = f"{self._path} cannot be used: {reason(error)}"
        self.drop()
        note(
            f"the GPU memory of container {self._container} is not kept for its next checkpoint, which "
            f"will write all of it again: {why}; set memory.keep-folder to a directory next to the "
            "images, or memory.keep to false",
            code="GPS-514",
        )

    def drop(self) -> None:
        """Keep nothing of this container any more, nor of those that are gone."""
        self.known = None
        with contextlib.suppress(*_PASSED):
            if self._lock is None:
                self._lock = _locked(self._folder, self._container)
            _empty(self._path)
        tidy(self._settings)

    def close(self) -> None:
        """Let others have it. May be called twice."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            unlock(lock)

    def _replace(self, layout: Layout, tables: Sequence[Table], blobs: Mapping[str, int]) -> None:
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        if os.stat(self._folder).st_dev != os.stat(layout.path).st_dev:
            raise _elsewhere(self._folder, layout.path)
        _check_room(self._folder, sum(blobs.values()))
        lock = self._made()
        if _bundle_of(self._path) != self._bundle:
            replace(_RECORD, json.dumps({"version": 1, "bundle": self._bundle}).encode(), lock)
        own = Layout(self._path).create()
        _link(blobs, layout.path, self._path)
        known = Known(os.path.join(self._path, _INDEX))
        known.clear()
        known.learn(tables, own)
        known.save()
        _remove(_BLOB, self._path, *_BLOBS, but={get_hex(blob) for blob in blobs})
        _remove(_CUT_OFF, self._path)

    def _made(self) -> int:
        """The container's folder, locked, made anew where somebody removed it meanwhile."""
        _check_name(self._container, self._folder)
        if self._lock is not None and not is_still_there(self._lock, self._path):
            lock, self._lock = self._lock, None
            unlock(lock)
        if self._lock is None:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._path, 0o700)
            self._lock = _locked(self._folder, self._container)
        return self._lock


def tidy(settings: Memory) -> None:
    """Remove what is kept of containers that are gone; of all where the settings keep nothing."""

    def spent(path: str) -> bool:
        bundle = _bundle_of(path)
        return bundle is not None and not (settings.keep and os.path.isdir(bundle))

    folder = _place(settings)
    for name in _names(folder):
        path = os.path.join(folder, name)
        with contextlib.suppress(*_PASSED):
            # Looked at first without the lock, which would be in the way of who uses it.
            if spent(path):
                with _held(folder, name):
                    if spent(path):
                        _empty(path)


def make_room(settings: Memory, place: str, need: int, *, container: str) -> None:
    """Remove what is kept until `need` bytes are free in the folder `place`, where that container is written.

    The oldest chunks go first, and those of that container last, before `ChunkCache.open`. Nothing is removed
    if `place` is on another file system, nor what another gpusnap uses just now. The caller checks whether
    there is room afterwards.
    """
    folder = _place(settings)

    def turn(name: str) -> tuple[bool, int]:
        return name == container, _last_kept(os.path.join(folder, name))

    with contextlib.suppress(OSError):
        if os.stat(folder).st_dev != os.stat(place).st_dev:
            return
        for name in sorted(_names(folder), key=turn):
            if _free(place) >= need:
                return
            path = os.path.join(folder, name)
            with contextlib.suppress(*_PASSED), _held(folder, name):
                if _bundle_of(path) is not None:
                    _empty(path)


def _place(settings: Memory) -> str:
    """Without links, which gpusnap.oci.base.files does not follow."""
    return os.path.realpath(settings.keep_folder)


def _names(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if _ID.fullmatch(name)]
    except OSError:
        return []


def _last_kept(path: str) -> int:
    """When (st_mtime_ns); 0 where it is of no use to anybody."""
    try:
        return os.lstat(os.path.join(path, _INDEX)).st_mtime_ns
    except OSError:
        return 0


def _locked(folder: str, name: str) -> int:
    """A container's folder, locked. Raises OSError, and _NotCached where it may not be used."""
    _check_name(name, folder)
    path = os.path.join(folder, name)
    lock = open_folder(folder, name)
    try:
        for found, where in ((os.stat(folder), folder), (os.fstat(lock), path)):
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise _NotCached(f"other users can write to {where}")
        if not try_exclusive(lock) or not is_still_there(lock, path):  # whoever had it has removed it
            raise _NotCached(f"another gpusnap is working on {path}")
    except BaseException:
        os.close(lock)
        raise
    return lock


def _check_name(name: str, folder: str) -> None:
    if not _ID.fullmatch(name):
        raise _NotCached(f"{name[:80]!r} is not a valid name for a directory in {folder}")


@contextmanager
def _held(folder: str, name: str) -> Iterator[None]:
    lock = _locked(folder, name)
    try:
        yield
    finally:
        unlock(lock)


def _bundle_of(path: str) -> str | None:
    """The bundle of the container whose chunks are kept there; None where kept.json does not say."""
    try:
        folder = open_folder(path)
        try:
            record = parse_json(read_regular(_RECORD, folder, limit=_LARGEST_RECORD))
        finally:
            os.close(folder)
    except (OSError, ValueError, RecursionError):
        return None
    match record:
        case {"version": 1, "bundle": str(bundle)} if bundle.startswith("/") and "\0" not in bundle:
            return bundle
        case _:
            return None


def _check_room(folder: str, size: int) -> None:
    """Raise _NotCached where the disk gets tight: what is kept takes room from whatever comes next."""
    found = os.statvfs(folder)
    wanted = max(size, found.f_blocks * found.f_frsize // _FREE)
    if _free(folder) < wanted:
        raise _NotCached(
            f"{folder} has only {human(_free(folder))} free, but {human(wanted)} must remain free"
        )


def _free(path: str) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _elsewhere(folder: str, image: str) -> _NotCached:
    return _NotCached(f"{folder} is on another file system than {image}, so hard links are not possible")


def _link(blobs: Mapping[str, int], image: str, path: str) -> None:
    """Give blobs of an image their second names, in place of files that are not the same ones."""
    origin = open_folder(image, *_BLOBS)
    try:
        folder = open_folder(path, *_BLOBS)
        try:
            for digest, size in blobs.items():
                _link_one(get_hex(digest), size, origin, folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise _elsewhere(path, image) from error
        raise
    finally:
        os.close(origin)


def _link_one(name: str, size: int, origin: int, folder: int) -> None:
    found = os.stat(name, dir_fd=origin, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
        raise _NotCached(f"the blob {name} has changed since it was written")
    # One of the same size may have been damaged since it was kept, and so been written anew: it is replaced.
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(found, os.stat(name, dir_fd=folder, follow_symlinks=False)):
            return
    unfinished = UNFINISHED + secrets.token_hex(8)
    os.link(name, unfinished, src_dir_fd=origin, dst_dir_fd=folder, follow_symlinks=False)
    os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)


def _empty(path: str) -> None:
    """Remove what is kept in a folder whose lock is held, and the folder where nothing else is in it."""
    _unlink(os.path.join(path, _INDEX))
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        _remove(_BLOB, path, *_BLOBS)
    for folder in (os.path.join(path, *_BLOBS), os.path.join(path, _BLOBS[0])):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    _remove(_CUT_OFF, path)
    _unlink(os.path.join(path, "oci-layout"))
    _unlink(os.path.join(path, _RECORD))
    with contextlib.suppress(OSError):
        os.rmdir(path)


def _remove(names: re.Pattern[str], *path: str, but: Collection[str] = ()) -> None:
    """Remove files of such names from a folder, but some; in threads, as each gigabyte takes 0.2 s."""

    def remove(name: str) -> None:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(name, dir_fd=folder)

    folder = open_folder(*path)
    try:
        found = [name for name in os.listdir(folder) if name not in but and names.fullmatch(name)]
        run_for_each(found, remove, threads=min(_THREADS, len(found)))
    finally:
        os.close(folder)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(path)
