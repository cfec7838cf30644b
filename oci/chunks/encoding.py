"""Which encoding a chunk gets: the smallest, unless a restore is clearly shorter with another one.

Four samples of the chunk are packed in each way. What is left of them says how large the blob will be. A
restore reads blobs and decodes them in several threads at once, so that a chunk of S bytes, of which s are
stored, costs it the longer of

    s / what the disk delivers                              in seconds
    S * what one thread takes for each byte / threads

The second is measured here, on the samples: to copy the blob out of the page cache, to decode it, and to hash
the plain bytes. Where nobody knows what the disk delivers, size alone decides.
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
"""A chunk is compressed where its samples shrink below this part of their size."""
# What shrinks below this part gets the smallest encoding in any case: it is nearly nothing to read.
_ALWAYS = 0.25
# With a larger encoding a restore has to be so many times shorter: it takes more room on the disk.
_CLEARLY = 1.25
_SAMPLES = 4
SAMPLE = 64 << 10
# A measurement is the shortest of so many: the first ones find cold caches, 2 ms in all.
_TIMES = 5
ZSTD = 0
"""In place of the width of numbers in planes: zstd alone."""
_WHOLE = _SAMPLES * SAMPLE
# What an EncodingChooser holds: its own memory, the packed samples, and zstd's memory to unpack them.
MEMORY = 3 * _WHOLE + _WHOLE // 2 + _WHOLE + (1 << 18)


class DecodeTimes:
    """CPU seconds that one thread takes for each byte, by what it does; each measured once.

    What it does depends on the data as well. So it is measured anew for each tenth that may be left of the
    samples, and two chunks with the same bytes find the same times.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock`: in seconds. That of the thread's CPU time leaves out the wait for the interpreter."""
        self._clock = clock
        self._found: dict[tuple[str, int], float] = {}

    def of(self, what: str, left: float, size: int, prepare: Callable[[], Callable[[], object]]) -> float:
        """Seconds for each of `size` bytes; where nobody knows, of what `prepare` returns, which does it."""
        key = what, int(left * 10)
        found = self._found.get(key)
        if found is None:
            action = prepare()
            # Another thread may have been first.
            found = self._found.setdefault(key, min(self._once(action) for _ in range(_TIMES)) / size)
        return found

    def _once(self, action: Callable[[], object]) -> float:
        begun = self._clock()
        action()
        return self._clock() - begun


_OF_THIS_PROCESS = DecodeTimes()


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """How fast the chunks will be read: what the disk delivers, in bytes/s, and threads that decode."""

    disk: float
    threads: int
    times: DecodeTimes = _OF_THIS_PROCESS


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to store a chunk: the part of its size that is left, and what a thread takes for a plain byte."""

    left: float
    seconds: float

    def cost(self, speed: ReadSpeed) -> float:
        """Seconds of a restore for each plain byte."""
        return max(self.left / speed.disk, self.seconds / speed.threads)


def choose(plain: Candidate, packed: Mapping[int, Candidate], speed: ReadSpeed) -> int | None:
    """The width of the planes, ZSTD, or None for plain. `packed`: what is worth it, the smallest first."""
    best: int | None = None
    so_far: Candidate | None = None
    for width, each in (*packed.items(), (None, plain)):
        if so_far is None or so_far.cost(speed) >= _CLEARLY * each.cost(speed):
            best, so_far = width, each
        if so_far.left < _ALWAYS:
            break
    return best


def _check(plain: memoryview) -> None:
    """Hash as a restore will."""
    if not compute_blake3(plain):
        digest_of(plain)


class EncodingChooser:
    """Packs samples of chunk after chunk, and says what is best for each. For one thread."""

    def __init__(self, speed: ReadSpeed | None) -> None:
        """`speed`: of whoever will read the chunks; None where that is not known."""
        self._speed = speed
        self._sample, self._plain = Memory(_WHOLE), Memory(_WHOLE)
        self._low, self._top = Memory(_WHOLE), Memory(_WHOLE // 2)
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor()

    def free(self) -> None:
        """Give the memory back."""
        for memory in (self._sample, self._plain, self._low, self._top):
            memory.free()

    def choose(self, plain: memoryview) -> int | None:
        """The width of the numbers that a chunk is to be taken for; ZSTD for that alone, None for neither.

        Planes are decoded faster than zstd alone, which has less to do then: where both leave as much, it is
        planes.
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
        """Which part is left of the samples, each packed alone."""
        packed = sum(len(self._pack(piece, width)) for piece in pieces) / _WHOLE
        return packed + (width - 1) / width if width else packed

    def _choose_quickest(
        self, pieces: Sequence[memoryview], packed: Mapping[int, float], speed: ReadSpeed
    ) -> int | None:
        """As `choose`; `packed` has what is left in each way."""

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
        """All samples as one: with less at a time, what each call costs would count for more than it does."""
        for at, piece in enumerate(pieces):
            self._sample.view[at * SAMPLE : (at + 1) * SAMPLE] = piece
        return self._sample.view

    def _pack(self, sample: memoryview, width: int) -> bytes:
        """A sample as zstd, or of its numbers the highest bytes."""
        if not width:
            return self._compressor.compress(sample)
        low, top = self._get_planes(sample.nbytes, width)
        planes.split(sample, low, top, width)
        return self._compressor.compress(top)

    def _prepare_unpacking(self, width: int, sample: memoryview) -> Callable[[], object]:
        """What decodes a sample."""
        frame, plain = self._pack(sample, width), self._plain.view
        low, top = self._get_planes(sample.nbytes, width) if width else (plain, plain)

        def unpack() -> None:
            with self._decompressor.stream_reader(frame) as reader:
                reader.readinto(top)
            if width:
                planes.join(plain, low, top, width)

        return unpack

    def _get_planes(self, size: int, width: int) -> tuple[memoryview, memoryview]:
        """Memory for the lower bytes of so many bytes of numbers, and for the highest ones."""
        count = size // width
        return self._low.view[: (width - 1) * count], self._top.view[:count]
