"""How long a checkpoint is likely to take: from earlier ones in the store, or else from rates."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from gpusnap.checkpoints import artifact as kept
from gpusnap.doctor.base.check import Check, ok
from gpusnap.doctor.base.free_space import Speed
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.records.manifest import Manifest

# docs/benchmarks.md, 12.7 GiB on an H200: the driver's checkpoint took 2.1 s with a prepared mapping, and 4.6
# s without; lock, CRIU's dump of the small rest, sync and other steps 0.5 to 1 s.
_DRIVER_FAST, _DRIVER_SLOW = 6.0 * (1 << 30), 2.7 * (1 << 30)
_REST_FAST, _REST_SLOW = 0.5, 1.5
# CRIU writes resident memory in one thread, into the page cache or to the disk.
_CRIU = 1.0 * (1 << 30)
_DISK = 0.5 * (1 << 30)
"""Bytes per second, if the disk was not measured."""
_AS_MUCH = 8
"""A checkpoint of less than an eighth of the bytes is no measure of the rate: other steps dominate it."""
_PATIENCE = 0.5
"""Seconds for reading earlier checkpoints: the manifest of a large one takes a tenth of that or more."""


@dataclass(frozen=True, slots=True)
class Range:
    """A range of seconds."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class EarlierCheckpoint:
    container: str
    bytes: int
    """Bytes of GPU memory."""
    seconds: float


def estimate(gpu: int, resident: int, disk: float | None) -> Range:
    """Estimate for so many bytes on GPUs and in RAM; `disk` is its writing speed in bytes per second.

    The low end: the driver at its best, and chunks that are known, zero or written while it copies. The high
    end: its slower way, and every byte written afterwards, none of it compressed.
    """
    low = _REST_FAST + gpu / _DRIVER_FAST + resident / _CRIU
    high = _REST_SLOW + gpu / _DRIVER_SLOW + (gpu + resident) / min(disk or _DISK, 16 * _DISK)
    return Range(low, max(low, high))


def from_earlier(gpu: int, before: Sequence[EarlierCheckpoint]) -> Range:
    """Estimate from the seconds and bytes of earlier ones, of which there is at least one."""
    each = [_REST_FAST + max(0.0, one.seconds - _REST_FAST) * gpu / one.bytes for one in before]
    return Range(min(each) * 0.8, max(each) * 1.25)


def list_earlier(path: str, container: str, *, patience: float = _PATIENCE) -> tuple[EarlierCheckpoint, ...]:
    """Return checkpoints in the store: of this container (its full ID), else the last ones of any container.

    At most five, and only those that can be read within `patience` seconds, the latest first.
    """
    end = time.monotonic() + patience
    if not os.path.exists(os.path.join(path, "oci-layout")):
        return ()
    store = Store(path)
    found: list[tuple[str, EarlierCheckpoint]] = []
    seen: set[str] = set()
    with suppress(OciError, GpusnapError):
        for entry in reversed(store.entries()):
            if time.monotonic() > end:
                break
            if entry.descriptor.digest in seen:
                continue
            seen.add(entry.descriptor.digest)
            with suppress(OciError, GpusnapError):
                record = kept.load(entry.descriptor, store.layout).record
                if record is not None and (one := _read_earlier(record)) is not None:
                    found.append((record.created, one))
    latest = [one for _, one in sorted(found, key=lambda each: each[0], reverse=True)]
    same = [one for one in latest if one.container == container]
    return tuple((same or latest)[:5])


def _read_earlier(record: Manifest) -> EarlierCheckpoint | None:
    size = sum(gpu.memory_used for gpu in record.gpus)
    seconds = max((step.start + step.seconds for step in record.timing), default=0.0)
    return EarlierCheckpoint(record.container, size, seconds) if size and seconds else None


def check(
    container: str,
    gpu: int,
    resident: int,
    before: Sequence[EarlierCheckpoint],
    disk: Speed | None,
    *,
    volumes: int = 0,
) -> Iterator[Check]:
    """Return one line: the range of seconds, and its basis; volumes: bytes of their files."""
    before = [one for one in before if one.bytes and one.bytes * _AS_MUCH >= gpu]
    if gpu and before:
        found = from_earlier(gpu, before)
        own = all(one.container == container for one in before)
        whose = "its own" if own else "other containers'"
        basis = f"from {whose} earlier checkpoints in the store ({len(before)})"
    else:
        found = estimate(gpu, resident, disk.write if disk else None)
        rates = f"the disk's write rate, {human(int(disk.write))}/s" if disk else "an unmeasured disk"
        basis = f"from the rates in docs/benchmarks.md and {rates}"
    # Podman copies them into its storage, and from there into the archive; gpusnap makes chunks of that.
    rate = min(disk.write if disk else _DISK, 16 * _DISK)
    found = Range(found.low + 2 * volumes / _CRIU, found.high + 3 * volumes / rate)
    files = f" and {human(volumes)} in volumes" if volumes else ""
    yield ok(
        "duration",
        f"a checkpoint of {human(gpu)} of GPU memory and {human(resident)} of RAM{files} will probably "
        f"take {_seconds(found.low)} to {_seconds(found.high)} s, an estimate {basis}; the archive of "
        "Podman's --export comes on top",
        low=found.low,
        high=found.high,
        gpu=gpu,
        resident=resident,
        volumes=volumes,
        earlier=len(before),
        disk=disk.write if disk else None,
    )


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"
