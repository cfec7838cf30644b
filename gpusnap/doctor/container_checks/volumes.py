"""A Podman container's named volumes, which a checkpoint includes and a restore need not restore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpusnap.doctor.base.check import Check, ok
from gpusnap.runtime_shim.units import human


def check(sizes: Mapping[str, int]) -> Iterator[Check]:
    """Say what happens with volumes, by name and bytes of their files."""
    facts = {"volumes": [{"name": name, "size": size} for name, size in sizes.items()]}
    if not sizes:
        yield ok("volumes", "no named volume", **facts)
        return
    listed = ", ".join(f"{name} ({human(size)})" for name, size in sizes.items())
    yield ok(
        "volumes",
        f"{listed}: a checkpoint includes the files, unless --ignore-volumes is given; a restore uses "
        "volumes that still exist in Podman as they are",
        **facts,
    )
