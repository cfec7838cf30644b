"""Compressed streams: read with any compression, and never considered complete if they are truncated.

zstandard's readers end without an error if a zstd stream ends within a frame. So its frames are followed
here, by the sizes in their headers (RFC 8878, 3.1.1).
"""

from __future__ import annotations

import gzip
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Literal, Protocol, TypeAlias, cast

import zstandard

Kind: TypeAlias = Literal["none", "zstd", "gzip"]

_PIECE = 1 << 20
_MAGIC = 0xFD2FB528
_ZSTD = _MAGIC.to_bytes(4, "little")
_GZIP = b"\x1f\x8b"
# RFC 8878, 3.1.2: sixteen magic numbers of skippable frames, which differ in their last four bits.
_SKIPPABLE = 0x184D2A50


class Readable(Protocol):
    """An object to read in order."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, none at the end."""


class _Stream:
    """Pieces of bytes, as a file to read in order."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._left = b""

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes, but less only at the end; all for -1."""
        found, have = [self._left], len(self._left)
        while size < 0 or have < size:
            piece = next(self._pieces, None)
            if piece is None:
                break
            found.append(piece)
            have += len(piece)
        whole = b"".join(found)
        self._left = b"" if size < 0 else whole[size:]
        return whole if size < 0 else whole[:size]


class Observed:
    """A stream to read in order; every piece that is read is passed to `seen`, too."""

    def __init__(self, file: Readable, seen: Callable[[bytes], object]) -> None:
        self._file, self._seen = file, seen

    def read(self, size: int = -1, /) -> bytes:
        """Return what the stream's `read` returns."""
        data = self._file.read(size)
        self._seen(data)
        return data


class Plain:
    """The decompressed content of a stream: zstd in any number of frames, gzip or neither.

    `read` raises EOFError for a truncated one, and gzip's, zlib's and zstandard's errors for a broken one.
    """

    def __init__(self, file: Readable) -> None:
        kind, raw = kind_of(file)
        self._frames = _Frames()
        self._seekable: io.BufferedReader | None = None
        if kind == "zstd":
            # Podman writes one frame, other tools several.
            raw = zstandard.ZstdDecompressor().stream_reader(
                cast(IO[bytes], Observed(raw, self._frames.feed)), read_size=_PIECE, read_across_frames=True
            )
        elif kind == "gzip":
            raw = gzip.GzipFile(fileobj=cast(IO[bytes], raw), mode="rb")
        elif isinstance(raw, io.BufferedReader):
            self._seekable = raw
        self._raw = raw

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, none at the end."""
        data = self._raw.read(size)
        if not data and size and not self._frames.is_whole:
            raise EOFError("its last zstd frame is incomplete")
        return data

    def skip(self, size: int) -> bool:
        """Skip `size` bytes, if that needs no reading. This may go beyond the end of the file."""
        if self._seekable is None:
            return False
        self._seekable.seek(size, io.SEEK_CUR)
        return True


def as_file(pieces: Iterable[bytes]) -> IO[bytes]:
    """Return pieces of bytes as a file that only has `read`."""
    return cast(IO[bytes], _Stream(pieces))


def kind_of(file: Readable) -> tuple[Kind, Readable]:
    """Return how a stream is compressed, by its first bytes, and an object to read all of it."""
    head = _read_exactly(file, len(_ZSTD))
    kind: Kind = "zstd" if head == _ZSTD else "gzip" if head.startswith(_GZIP) else "none"
    if isinstance(file, io.BufferedReader) and file.seekable():
        file.seek(-len(head), io.SEEK_CUR)
        return kind, file
    return kind, _Prefixed(head, file)


def packer(*, level: int = 1, threads: int = 1) -> zstandard.ZstdCompressionObj:
    """Return a compressor for one zstd frame, with checksum. The number of threads changes no byte."""
    # With one worker, not zero: zstd divides the content into jobs only if there is a worker.
    compressor = zstandard.ZstdCompressor(level=level, threads=max(threads, 1), write_checksum=True)
    return compressor.compressobj()


class Packer(Protocol):
    """Compresses a stream, piece by piece."""

    def compress(self, data: bytes, /) -> bytes:
        """Add more of the stream; return what is ready of its compressed form."""

    def flush(self) -> bytes:
        """Return the rest."""


def gzip_packer(*, level: int = 1, threads: int = 1) -> Packer:
    """Return a compressor for gzip members of 1 MiB each, which RFC 1952 (2.2) treats as one file.

    The number of threads does not change the result.
    """
    return _GzipPacker(level, threads)


class _GzipPacker:
    def __init__(self, level: int, threads: int) -> None:
        self._level, self._threads = level, max(threads, 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="gpusnap-gzip")
        self._waiting: deque[Future[bytes]] = deque()
        self._left: list[bytes] = []
        self._size = 0

    def compress(self, data: bytes, /) -> bytes:
        self._left.append(data)
        self._size += len(data)
        if self._size < _PIECE:
            return b""
        whole = b"".join(self._left)
        end = len(whole) - len(whole) % _PIECE
        for at in range(0, end, _PIECE):
            self._give(whole[at : at + _PIECE])
        self._left, self._size = [whole[end:]], len(whole) - end
        found = []
        while len(self._waiting) > 2 * self._threads:
            found.append(self._waiting.popleft().result())
        return b"".join(found)

    def flush(self) -> bytes:
        if self._size or not self._waiting:
            self._give(b"".join(self._left))
        found = [each.result() for each in self._waiting]
        self._waiting.clear()
        self._pool.shutdown()
        return b"".join(found)

    def _give(self, piece: bytes) -> None:
        self._waiting.append(self._pool.submit(gzip.compress, piece, self._level, mtime=0))


def compress(pieces: Iterable[bytes], *, level: int = 1, threads: int = 1) -> Iterator[bytes]:
    """Yield one zstd frame of `pieces`, as `packer` makes it."""
    packing = packer(level=level, threads=threads)
    for piece in pieces:
        if data := packing.compress(piece):
            yield data
    yield packing.flush()


class _Prefixed:
    """A stream whose first bytes were already read."""

    def __init__(self, head: bytes, rest: Readable) -> None:
        self._head, self._rest = head, rest

    def read(self, size: int, /) -> bytes:
        if self._head:
            found, self._head = self._head[:size], self._head[size:]
            return found
        return self._rest.read(size)


class _Frames:
    """Whether a zstd stream is at the end of a frame, from its bytes in pieces of any size."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._skip = 0
        self._checksum = 0
        self._to("magic", 4)

    @property
    def is_whole(self) -> bool:
        return self._state == "magic" and not self._held and not self._skip

    def feed(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
            else:
                step = min(self._need - len(self._held), len(data) - at)
                self._held += data[at : at + step]
                if len(self._held) == self._need:
                    value = int.from_bytes(self._held, "little")
                    self._held.clear()
                    self._step(value)
            at += step

    def _to(self, state: Literal["magic", "skippable", "header", "block"], need: int) -> None:
        self._state, self._need = state, need

    def _step(self, value: int) -> None:
        match self._state:
            case "magic" if value == _MAGIC:
                self._to("header", 1)
            case "magic" if value & ~0xF == _SKIPPABLE:
                self._to("skippable", 4)
            case "magic":
                raise EOFError("its last zstd frame is followed by other data")
            case "skippable":
                self._skip = value
                self._to("magic", 4)
            case "header":
                single = bool(value & 0x20)
                self._checksum = 4 if value & 4 else 0
                content = (1 if single else 0, 2, 4, 8)[value >> 6]
                self._skip = (0 if single else 1) + (0, 1, 2, 4)[value & 3] + content
                self._to("block", 3)
            case "block":
                # 3.1.1.2: one byte represents a block of type 1 (RLE), whatever its size.
                self._skip = 1 if value >> 1 & 3 == 1 else value >> 3
                if value & 1:
                    self._skip += self._checksum
                    self._to("magic", 4)


def _read_exactly(file: Readable, size: int) -> bytes:
    found = b""
    while len(found) < size and (piece := file.read(size - len(found))):
        found += piece
    return found
