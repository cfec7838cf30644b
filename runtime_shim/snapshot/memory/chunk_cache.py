"""Keeps the chunks of a container's last checkpoint on this host, so the next one need not write them.

The image directory belongs to the caller: containerd deletes it after packing it, Podman before a restore,
and the next checkpoint may be written to the same one. So gpusnap makes hard links of the blobs here:

    /var/lib/gpusnap/kept/         memory.keep-folder, 0700: process memory is in it
        <container>/               0700; locked (flock) by whoever links from it or changes it
            kept.json              {"version": 1, "bundle": path}: written first, removed last
            known.json             which chunk is in which blob (gpusnap.oci.chunks.index): written last,
                                   removed first
            oci-layout             makes it an image layout, but without an index: it cannot be restored
            blobs/sha256/<digest>  hard links of the image's blobs; no byte is written for them

The rules:

- Only the last checkpoint that left the container running is kept: after any other, no checkpoint follows.
  It takes no space while the image exists, and the size of the chunks after the image was deleted.
- Only hard links are made. If they are impossible (another file system), or if the disk is nearly full,
  nothing is kept, and a note says why.
- The cache only saves work. If anything is wrong with it (removed at any moment, truncated, changed, owned by
  another user), it is a miss, and the checkpoint does not fail. A lock that cannot be taken at once is also
  a miss.
- A blob is linked into a checkpoint without being read. It is the right one, because it is the same file as
  when it was synced: gpusnap.oci.chunks.index compares inode, size and time of change.
- A killed writer leaves what was kept before, and blobs that no file names: the next `keep` or `drop` of that
  container removes them. If it is killed while it removes, kept.json still exists, so the rest is found
  again.
- Chunks of a container whose bundle no longer exists are removed when the next checkpoint of any container
  ends. If memory.keep is false, all chunks are removed then. A checkpoint that lacks space removes the oldest
  first.
- Only these names are ever removed, and only from a directory with kept.json or from the container's own.
  Other files in memory.keep-folder stay.
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
from gpusnap.runtime_shim.base.errors import reason
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.settings import Memory

_RECORD = "kept.json"
_INDEX = "known.json"
_BLOBS = ("blobs", "sha256")
_LARGEST_RECORD = 16 << 10
_ID = compile_later(r"[A-Za-z0-9][\w.+-]{0,250}", re.ASCII)
_UNFINISHED = re.escape(UNFINISHED) + "[0-9a-f]{16}"
_CUT_OFF, _BLOB = compile_later(_UNFINISHED), compile_later("[0-9a-f]{64}|" + _UNFINISHED)
# This fraction (1/20) of a file system stays free, or space for another checkpoint of that size if it is
# more.
_FREE = 20
_THREADS = 8


class _NotCached(Exception):
    """Nothing is kept; the message says why."""


# Errors of a cache that is only read or removed: it is skipped.
_PASSED = (OSError, _NotCached)


class ChunkCache:
    """The kept chunks of one container, from `open`; nobody else changes them until `close`.

    None of its methods raises an exception, because no checkpoint fails for lack of it.
    """

    def __init__(self, settings: Memory, container: str, bundle: str) -> None:
        self._settings = settings
        self._container, self._bundle = container, os.path.abspath(bundle)
        self._folder = _resolve_folder(settings)
        self._path = os.path.join(self._folder, container)
        self._lock: int | None = None
        self.known: Known | None = None
        """The chunks of the last checkpoint, for gpusnap.oci.chunks.writer.write."""

    @classmethod
    def open(cls, settings: Memory, container: str, bundle: str) -> ChunkCache:
        """Open the chunks of a container. `bundle`: its directory, which exists as long as it does."""
        kept = cls(settings, container, bundle)
        with contextlib.suppress(*_PASSED):
            kept._lock = _open_locked(kept._folder, container)
            if settings.keep and _read_bundle(kept._path) == kept._bundle:
                known = Known(os.path.join(kept._path, _INDEX))
                kept.known = known if len(known) else None
        return kept

    def __enter__(self) -> ChunkCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keep(self, layout: Layout, tables: Sequence[Table]) -> None:
        """Keep the chunks of a checkpoint instead of the previous ones. Its layout must be synced to disk.

        If this is impossible, nothing is kept any more, and a note says why. Removes the kept chunks of
        containers that no longer exist.
        """
        blobs = {chunk.blob: chunk.stored for table in tables for chunk in table.chunks}
        if not self._settings.keep or not blobs:
            self.drop()
            return
        try:
            self._replace(layout, tables, blobs)
            remove_stale(self._settings)
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
        """Remove the kept chunks of this container, and of containers that no longer exist."""
        self.known = None
        with contextlib.suppress(*_PASSED):
            if self._lock is None:
                self._lock = _open_locked(self._folder, self._container)
            _empty(self._path)
        remove_stale(self._settings)

    def close(self) -> None:
        """Release the lock. May be called twice."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            unlock(lock)

    def _replace(self, layout: Layout, tables: Sequence[Table], blobs: Mapping[str, int]) -> None:
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        if os.stat(self._folder).st_dev != os.stat(layout.path).st_dev:
            raise _make_elsewhere_error(self._folder, layout.path)
        _check_room(self._folder, sum(blobs.values()))
        lock = self._open_or_create()
        if _read_bundle(self._path) != self._bundle:
            replace(_RECORD, json.dumps({"version": 1, "bundle": self._bundle}).encode(), lock)
        own = Layout(self._path).create()
        _link(blobs, layout.path, self._path)
        known = Known(os.path.join(self._path, _INDEX))
        known.clear()
        known.learn(tables, own)
        known.save()
        _remove(_BLOB, self._path, *_BLOBS, but={get_hex(blob) for blob in blobs})
        _remove(_CUT_OFF, self._path)

    def _open_or_create(self) -> int:
        """Return the locked directory of the container; create it again if somebody removed it meanwhile."""
        _check_name(self._container, self._folder)
        if self._lock is not None and not is_still_there(self._lock, self._path):
            lock, self._lock = self._lock, None
            unlock(lock)
        if self._lock is None:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._path, 0o700)
            self._lock = _open_locked(self._folder, self._container)
        return self._lock


def remove_stale(settings: Memory) -> None:
    """Remove the chunks of containers that no longer exist; of all if the settings keep nothing."""

    def spent(path: str) -> bool:
        bundle = _read_bundle(path)
        return bundle is not None and not (settings.keep and os.path.isdir(bundle))

    folder = _resolve_folder(settings)
    for name in _list_names(folder):
        path = os.path.join(folder, name)
        with contextlib.suppress(*_PASSED):
            # First check without the lock, which would block its user.
            if spent(path):
                with _hold_lock(folder, name):
                    if spent(path):
                        _empty(path)


def make_room(settings: Memory, place: str, need: int, *, container: str) -> None:
    """Remove kept chunks until `need` bytes are free in the directory `place`, where `container` is written.

    The oldest chunks go first, and those of `container` last. Call it before `ChunkCache.open`. Nothing is
    removed if `place` is on another file system, or if another gpusnap uses it at the moment. The caller
    checks afterwards whether there is enough space.
    """
    folder = _resolve_folder(settings)

    def turn(name: str) -> tuple[bool, int]:
        return name == container, _last_kept(os.path.join(folder, name))

    with contextlib.suppress(OSError):
        if os.stat(folder).st_dev != os.stat(place).st_dev:
            return
        for name in sorted(_list_names(folder), key=turn):
            if _count_free(place) >= need:
                return
            path = os.path.join(folder, name)
            with contextlib.suppress(*_PASSED), _hold_lock(folder, name):
                if _read_bundle(path) is not None:
                    _empty(path)


def _resolve_folder(settings: Memory) -> str:
    """The directory for kept chunks, without symbolic links, which gpusnap.oci.base.files does not follow."""
    return os.path.realpath(settings.keep_folder)


def _list_names(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if _ID.fullmatch(name)]
    except OSError:
        return []


def _last_kept(path: str) -> int:
    """When chunks were last kept (st_mtime_ns); 0 if the chunks are of no use."""
    try:
        return os.lstat(os.path.join(path, _INDEX)).st_mtime_ns
    except OSError:
        return 0


def _open_locked(folder: str, name: str) -> int:
    """Lock and return the directory of a container. Raises OSError, and _NotCached if it must not be used."""
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
def _hold_lock(folder: str, name: str) -> Iterator[None]:
    lock = _open_locked(folder, name)
    try:
        yield
    finally:
        unlock(lock)


def _read_bundle(path: str) -> str | None:
    """Return the bundle of the container whose chunks are kept there; None if kept.json does not say it."""
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
    """Raise _NotCached if the disk is nearly full: kept chunks take space from whatever is written next."""
    found = os.statvfs(folder)
    wanted = max(size, found.f_blocks * found.f_frsize // _FREE)
    if _count_free(folder) < wanted:
        raise _NotCached(
            f"{folder} has only {human(_count_free(folder))} free, but {human(wanted)} must remain free"
        )


def _count_free(path: str) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _make_elsewhere_error(folder: str, image: str) -> _NotCached:
    return _NotCached(f"{folder} is on another file system than {image}, so hard links are not possible")


def _link(blobs: Mapping[str, int], image: str, path: str) -> None:
    """Make hard links of blobs of an image, and replace files that are not the same ones."""
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
            raise _make_elsewhere_error(path, image) from error
        raise
    finally:
        os.close(origin)


def _link_one(name: str, size: int, origin: int, folder: int) -> None:
    found = os.stat(name, dir_fd=origin, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
        raise _NotCached(f"the blob {name} has changed since it was written")
    # A blob of the same size may have been damaged after it was kept, and then written anew: replace it.
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(found, os.stat(name, dir_fd=folder, follow_symlinks=False)):
            return
    unfinished = UNFINISHED + secrets.token_hex(8)
    os.link(name, unfinished, src_dir_fd=origin, dst_dir_fd=folder, follow_symlinks=False)
    os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)


def _empty(path: str) -> None:
    """Remove the kept chunks in a locked directory, and the directory if it contains nothing else."""
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
    """Remove files with such names, except some; in threads, because each gigabyte takes 0.2 s."""

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
