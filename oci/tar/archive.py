"""Podman's checkpoint archive: the tar that `podman container checkpoint --export` writes.

It is plain, or compressed with zstd (the default) or gzip; libpod's exportCheckpoint lists its entries. It is
read as a stream, and nothing is unpacked to disk; it is written as a stream, under another name until it is
complete. It may come from anybody: names must not lead out of the archive, headers are limited, and an
archive is complete only if it has its two blocks of zeros, and the end of its compression.
"""

from __future__ import annotations

import errno
import gzip
import os
import sys
import tarfile
import zlib
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Literal, TypeAlias

import zstandard

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import (
    ArchiveError,
    BrokenArchive,
    DiskError,
    NotAnArchive,
    binary_size,
    disk_error,
    reason,
)
from gpusnap.oci.base.files import create_unnamed_file, open_folder, open_named, write_all
from gpusnap.oci.tar import headers as tar
from gpusnap.oci.tar.compression import Plain, Readable, packer

Compression: TypeAlias = Literal["none", "zstd"]

_PIECE = 1 << 20
# GNU tar pads its last record, of 10 KiB by default and of a few MiB at most, with zeros.
_LONGEST_TAIL = 16 << 20
# Bytes of memory for the names in an archive, which a reader may keep, and for what it keeps of each: about
# 1.5 million entries with usual names. A compressed KiB may contain names of a MiB.
_MOST_NAMES, _ENTRY = 512 << 20, 128


class Content:
    """The content of a file in an archive, to be read once and in order, before the next entry is used."""

    def __init__(self, source: _Source, size: int) -> None:
        self._source = source
        self.left = size

    def read(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes, the rest for -1, none at the end. Raises ArchiveError."""
        count = self.left if size < 0 else min(size, self.left)
        data = self._source.read_exactly(count)
        self.left -= len(data)
        return data


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry: its name without slashes at its ends, its header, and for a file its content."""

    name: str
    info: tarfile.TarInfo
    content: Content | None


def entries(
    archive: str | Readable, *, plain: Callable[[bytes], object] | None = None, where: str = ""
) -> Generator[Entry, None, None]:
    """Yield the entries of an archive in order, each to be used before the next one.

    Files, directories and links, no others; the entry of the archive's own directory is skipped, and so is
    the unread content of an entry. `plain` is called with every piece of the tar, decompressed. `where` is
    the archive's name in messages.

    Raises NotAnArchive; ArchiveError if it cannot be read, is truncated, or contains something that no
    checkpoint has, a name that leads out of it, perhaps through an earlier link, or too many names.
    """
    with ExitStack() as opened:
        where = where or (archive if isinstance(archive, str) else "the archive")
        file: Readable
        if isinstance(archive, str):
            try:
                file = opened.enter_context(open_named(archive))
            except OSError as error:
                raise ArchiveError(f"{where} cannot be read: {reason(error)}") from error
        else:
            file = archive
        source = _Source(file, where, plain)
        links: set[str] = set()
        left = _MOST_NAMES
        while (info := source.header()) is not None:
            left -= sys.getsizeof(info.name) + sys.getsizeof(info.linkname) + _ENTRY
            if left < 0:
                raise source.describe_broken("its entries have more names than any checkpoint")
            if links:
                source.check_parents(info.name, links)
            if info.issym() or info.islnk():
                links.add(info.name)
            size = info.size  # the caller may change the header
            content = Content(source, size) if info.isreg() else None
            if info.name:
                yield Entry(info.name, info, content)
            if content is not None:
                source.skip(content.left)
                source.skip(-size % tar.BLOCK)
        source.read_end()


def unpack(file: Readable, where: str) -> Iterator[bytes]:
    """Yield the decompressed content of a file, in pieces. Raises ArchiveError, in which it is `where`."""
    source = _Source(file, where, None)
    while piece := source.read_some():
        yield piece


class Writer:
    """An archive that is written to disk; it gets its name at the end of a `with` block or not at all.

    threads: for zstd. Everything raises DiskFull and DiskError, its end also if a file of that name exists by
    then: none is replaced. The file has mode 0600.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        compress: Compression = "none",
        threads: int = 1,
    ) -> None:
        folder, name = os.path.split(os.path.abspath(path))
        self.path = os.path.join(os.path.realpath(folder), name)
        self._open = ExitStack()
        self._folder = self._file = -1
        self._name: Callable[[str], None]
        self._size = 0
        self._packing = packer(threads=threads) if compress == "zstd" else None

    def __enter__(self) -> Writer:
        with ExitStack() as opened, self._explain_write_errors():
            self._folder = open_folder(os.path.dirname(self.path))
            opened.callback(os.close, self._folder)
            self._file, self._name = opened.enter_context(create_unnamed_file(self._folder))
            self._open = opened.pop_all()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._open:
            if kind is None:
                self._finish()

    def add(self, info: tarfile.TarInfo, content: Readable | None = None) -> None:
        """Write an entry with owner, mode, time, links and pax headers as they are, and `info.size` bytes.

        Raises ArchiveError if the content ends before that, and what its `read` raises; DiskFull, before
        anything of it is written, if it is larger than the free space: a few bytes of a table of chunks may
        mean terabytes.
        """
        if self._packing is None and content is not None:
            self._check_room(info.size)
        try:
            for piece in tar.pieces(info, content):
                self._write(piece)
        except tar.HeaderFault as fault:
            raise ArchiveError(f"{self.path} cannot be written: {fault}") from fault

    def _check_room(self, size: int) -> None:
        place = os.fstatvfs(self._file)
        if size > place.f_bfree * place.f_frsize:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            what = f"the archive {os.path.basename(self.path)} with an entry of {binary_size(size)}"
            raise disk_error(full, os.path.dirname(self.path), what, None)

    def append(self, data: bytes) -> None:
        """Write pieces of the tar unchanged, for a caller that makes whole entries of them."""
        self._write(data)

    def _write(self, data: bytes) -> None:
        if self._packing is not None:
            data = self._packing.compress(data)
        self._put(data)

    def _put(self, data: bytes) -> None:
        self._size += len(data)
        with self._explain_write_errors():
            write_all(self._file, data)

    def _finish(self) -> None:
        self._write(tar.END)
        if self._packing is not None:
            self._put(self._packing.flush())
        with self._explain_write_errors():
            os.fsync(self._file)
            name = os.path.basename(self.path)
            try:
                self._name(name)
            except FileExistsError as error:
                raise DiskError(
                    f"{self.path} was created by another process in the meantime, and gpusnap does not "
                    "overwrite archives",
                    code="GPS-103",
                ) from error
            try:
                os.fsync(self._folder)
            except OSError:
                with suppress(OSError):
                    os.unlink(name, dir_fd=self._folder)
                raise

    @contextmanager
    def _explain_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"the archive {os.path.basename(self.path)}, {binary_size(self._size)} so far,"
            raise disk_error(error, os.path.dirname(self.path), what, None) from error


class _Source:
    """The tar in an archive: every error in it is an ArchiveError."""

    def __init__(self, file: Readable, where: str, plain: Callable[[bytes], object] | None) -> None:
        self._where, self._seen = where, plain
        self._head = b""
        """Its first block, or what has been read of that."""
        with self._explain_read_errors():
            self._plain = Plain(file)

    def header(self) -> tarfile.TarInfo | None:
        """Return the next entry's header; None at the end."""
        try:
            with self._explain_read_errors():
                return tar.read_header(self.read_exactly)
        except ArchiveError as error:
            if not tar.begins_like_a_tar(self._head):
                raise NotAnArchive(f"{self._where} is not a checkpoint archive") from error
            raise

    def check_parents(self, name: str, links: Collection[str]) -> None:
        """Raise ArchiveError if a name is below one of the links: an unpacker would follow that."""
        parent = os.path.dirname(name)
        while parent:
            if parent in links:
                raise self.describe_broken(
                    f"the name {name[:200]!r} passes through the link {parent[:200]!r}"
                )
            parent = os.path.dirname(parent)

    def read_exactly(self, size: int) -> bytes:
        found: list[bytes] = []
        left = size
        while left:
            piece = self._read(left)
            if not piece:
                raise self.describe_broken("it ends too early")
            found.append(piece)
            left -= len(piece)
        return found[0] if len(found) == 1 else b"".join(found)

    def read_some(self) -> bytes:
        """Return as much as is available at once; nothing at the end."""
        return self._read(_PIECE)

    def skip(self, size: int) -> None:
        with self._explain_read_errors():
            if self._seen is None and self._plain.skip(size):
                return
        while size:
            size -= len(self.read_exactly(min(size, _PIECE)))

    def read_end(self) -> None:
        """Read what follows the end of the tar: zeros, and the end of the compression."""
        tail = 0
        while piece := self._read(_PIECE):
            tail += len(piece)
            if tail > _LONGEST_TAIL or piece.count(0) != len(piece):
                raise self.describe_broken("it continues after its end")

    def _read(self, size: int) -> bytes:
        with self._explain_read_errors():
            data = self._plain.read(size)
        if len(self._head) < tar.BLOCK:
            self._head += data[: tar.BLOCK - len(self._head)]
        if self._seen is not None:
            self._seen(data)
        return data

    def describe_broken(self, why: object) -> ArchiveError:
        return BrokenArchive(f"{self._where} is not a checkpoint archive, or is cut short: {why}")

    @contextmanager
    def _explain_read_errors(self) -> Iterator[None]:
        try:
            yield
        except (tar.HeaderFault, zstandard.ZstdError, zlib.error, gzip.BadGzipFile, EOFError) as error:
            raise self.describe_broken(error) from error
        except OSError as error:
            raise ArchiveError(f"{self._where} cannot be read: {reason(error)}") from error
