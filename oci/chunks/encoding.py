"""Which encoding a chunk gets: the smallest, unless a restore is clearly faster with another one.

Four samples of the chunk are compressed in each way; their compressed size predicts the size of the blob. A
restore reads blobs and decodes them in several threads at once. So for a chunk of S bytes, of which s are
stored, it needs the longer of

    s / read rate of the disk                              in seconds
    S * time of one thread per byte / threads

The second is measured here, on the samples: copying the blob out of the page cache, decoding it, and hashing
the plain bytes. If the read rate of the disk is not known, only the size decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import zstandard

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.chunks import planes
from gpusnap.oci.chunks.blake3_digests import compute_blake3
from gpusnap.oci.chunks.buffers import Buffer, Memory
from gpusnap.oci.layout.digests import digest_of

WORTH = 0.97
"""A chunk is compressed if its samples shrink below this part of their size."""
# Below this part, a chunk gets the smallest encoding in any case: reading it takes nearly no time.
_ALWAYS = 0.25
# A larger encoding must make a restore this many times faster, because it takes more space on the disk.
_CLEARLY = 1.25
_SAMPLES = 4
SAMPLE = 64 << 10
# A measurement is the shortest of this many: the first ones have cold caches, 2 ms in all.
_TIMES = 5
ZSTD = 0
"""Used instead of the width of numbers in planes: only zstd."""
_WHOLE = _SAMPLES * SAMPLE
# The memory of an EncodingChooser: its own buffers, the compressed samples, and zstd's memory to unpack them.
MEMORY = 3 * _WHOLE + _WHOLE // 2 + _WHOLE + (1 << 18) + planes.COMPRESSOR_MEMORY


class DecodeTimes:
    """CPU seconds of one thread per byte, for each operation; each is measured once.

    They also depend on the data. So they are measured anew for each tenth of the compressed size, and two
    chunks with the same bytes get the same times.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock`: in seconds. The thread's CPU time does not include waits for the interpreter."""
        self._clock = clock
        self._found: dict[tuple[str, int], float] = {}

    def of(self, what: str, left: float, size: int, prepare: Callable[[], Callable[[], object]]) -> float:
        """Return seconds per byte; if not known, measure the result of `prepare` on `size` bytes."""
        key = what, int(left * 10)
        found = self._found.get(key)
        if found is None:
            action = prepare()
            # Another thread may have been faster.
            found = self._found.setdefault(key, min(self._once(action) for _ in range(_TIMES)) / size)
        return found

    def _once(self, action: Callable[[], object]) -> float:
        begun = self._clock()
        action()
        return self._clock() - begun


_OF_THIS_PROCESS = DecodeTimes()


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """How fast the chunks will be read: the disk's rate in bytes/s, and the number of decoding threads."""

    disk: float
    threads: int
    times: DecodeTimes = _OF_THIS_PROCESS


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to store a chunk: its size as a part of the plain size, and a thread's time per plain byte."""

    left: float
    seconds: float

    def cost(self, speed: ReadSpeed) -> float:
        """Return the seconds of a restore per plain byte."""
        return max(self.left / speed.disk, self.seconds / speed.threads)


def choose(plain: Candidate, packed: Mapping[int, Candidate], speed: ReadSpeed) -> int | None:
    """Return the width of the planes, ZSTD, or None for plain. `packed`: those worth it, smallest first."""
    best: int | None = None
    so_far: Candidate | None = None
    for width, each in (*packed.items(), (None, plain)):
        if so_far is None or so_far.cost(speed) >= _CLEARLY * each.cost(speed):
            best, so_far = width, each
        if so_far.left < _ALWAYS:
            break
    return best


def _check(plain: memoryview) -> None:
    """Hash it like a restore."""
    if not compute_blake3(plain):
        digest_of(plain)


class EncodingChooser:
    """Compresses samples of chunk after chunk, and chooses the best encoding for each. For one thread."""

    def __init__(self, speed: ReadSpeed | None) -> None:
        """`speed`: of the restore that will read the chunks; None if not known."""
        self._speed = speed
        self._sample, self._plain = Memory(_WHOLE), Memory(_WHOLE)
        self._low, self._top = Memory(_WHOLE), Memory(_WHOLE // 2)
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._of_planes = planes.make_compressor()
        self._decompressor = zstandard.ZstdDecompressor()

    def free(self) -> None:
        """Release the memory."""
        for memory in (self._sample, self._plain, self._low, self._top):
            memory.free()

    def choose(self, plain: memoryview) -> int | None:
        """Return the width of the numbers in a chunk; ZSTD for zstd only, None for plain.

        Planes are decoded faster than zstd alone, which then has less to do. If both have the same size, it
        is planes.
        """
        size = plain.nbytes
        if size <= 2 * _SAMPLES * SAMPLE:
            return ZSTD
        stride = (size - SAMPLE) // (_SAMPLES - 1) // 4 * 4
        pieces = [plain[at * stride : at * stride + SAMPLE] for at in range(_SAMPLES)]
        widths = (ZSTD, *(planes.WIDTHS if size % max(planes.WIDTHS) == 0 else ()))
        left = {width: self._measure_left(pieces, width) for width in widths}
        order = sorted(left, key=lambda width: (left[width], -width))
        worth = {width: left[width] for width in order if left[width] < WORTH}
        if self._speed is None or not worth:
            return next(iter(worth), None)
        return self._choose_quickest(pieces, worth, self._speed)

    def _measure_left(self, pieces: Sequence[memoryview], width: int) -> float:
        """Return the compressed size of the samples as a part, each compressed alone."""
        packed = sum(len(self._pack(piece, width)) for piece in pieces) / _WHOLE
        return packed + (width - 1) / width if width else packed

    def _choose_quickest(
        self, pieces: Sequence[memoryview], packed: Mapping[int, float], speed: ReadSpeed
    ) -> int | None:
        """Like `choose`; `packed` has the compressed size for each way."""

        def measure(what: str, left: float, prepare: Callable[[memoryview], Callable[[], object]]) -> float:
            return speed.times.of(what, left, _WHOLE, lambda: prepare(self._join_samples(pieces)))

        copied = measure("copy", 1, lambda sample: partial(Buffer(sample).read, 0, self._plain.view))
        hashed = measure("hash", 1, lambda sample: partial(_check, sample))
        found = {}
        for width, left in packed.items():
            way = f"planes {width}" if width else "zstd"
            decoded = measure(way, left, partial(self._prepare_unpacking, width))
            found[width] = Candidate(left, copied * left + decoded + hashed)
        return choose(Candidate(1, copied + hashed), found, speed)

    def _join_samples(self, pieces: Sequence[memoryview]) -> memoryview:
        """Return all samples as one: with small samples, the overhead of each call would count too much."""
        for at, piece in enumerate(pieces):
            self._sample.view[at * SAMPLE : (at + 1) * SAMPLE] = piece
        return self._sample.view

    def _pack(self, sample: memoryview, width: int) -> bytes:
        """Compress a sample with zstd, or only the highest bytes of its numbers."""
        if not width:
            return self._compressor.compress(sample)
        low, top = self._get_planes(sample.nbytes, width)
        planes.split(sample, low, top, width)
        return self._of_planes.compress(top)

    def _prepare_unpacking(self, width: int, sample: memoryview) -> Callable[[], object]:
        """Return a function that decodes a sample."""
        frame, plain = self._pack(sample, width), self._plain.view
        low, top = self._get_planes(sample.nbytes, width) if width else (plain, plain)

        def unpack() -> None:
            with self._decompressor.stream_reader(frame) as reader:
                reader.readinto(top)
            if width:
                planes.join(plain, low, top, width)

        return unpack

    def _get_planes(self, size: int, width: int) -> tuple[memoryview, memoryview]:
        """Return memory for the lower bytes of numbers of this total size, and for the highest ones."""
        count = size // width
        return self._low.view[: (width - 1) * count], self._top.view[:count]
