"""Podman's checkpoint archive: the tar that `podman container checkpoint --export` writes.

It is plain, or compressed with zstd (the default) or gzip; its entries are listed in libpod's
exportCheckpoint. Read as a stream: nothing is unpacked to disk.
"""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import zstandard

__all__ = ["ArchiveError", "read_member"]

_ZSTD = b"\x28\xb5\x2f\xfd"  # RFC 8878, 3.1.1


class ArchiveError(Exception):
    """The archive cannot be read, or does not hold what was asked for; the message is a sentence."""


def read_member(path: str, name: str, *, limit: int) -> bytes | None:
    """The content of one entry, at most `limit` bytes of it; None where the archive has no such entry.

    Raises ArchiveError where the file is no archive or is cut short within an entry. One that ends between
    two looks to tarfile as if it were whole.
    """
    try:
        with _opened(path) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            for entry in tar:
                if entry.isfile() and entry.name.removeprefix("./") == name:
                    content = tar.extractfile(entry)
                    return content.read(limit) if content else None
    except OSError as error:
        raise ArchiveError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tarfile.TarError, zstandard.ZstdError, zlib.error, EOFError, ValueError) as error:
        raise ArchiveError(f"{path} is not a checkpoint archive, or is cut short: {error}") from error
    return None


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    """The archive's tar, decompressed."""
    with open(path, "rb") as file:
        magic = file.read(4)
        file.seek(0)
        if magic == _ZSTD:
            # Podman writes one frame, other tools several.
            with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as plain:
                yield plain
        elif magic[:2] == b"\x1f\x8b":
            import gzip

            with gzip.GzipFile(fileobj=file) as unzipped, io.BufferedReader(unzipped) as plain:
                yield plain
        else:
            yield file
