"""What only a Podman container has: options that a restore does not restore, and named volumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpusnap.doctor.base.check import Check, failure, ok, warning
from gpusnap.engines.podman_options import Option
from gpusnap.runtime_shim.base.units import human


def check_options(found: Sequence[Option]) -> Iterator[Check]:
    """Report a failure for each that makes the restore fail, a warning for each that is only lost."""
    for each in found:
        if each.fatal:
            says = f"the container has {each.what}, and Podman cannot restore such a container"
            yield failure("Podman's options", says, each.todo)
        else:
            says = f"the container has {each.what}, which Podman does not continue after a restore"
            yield warning("Podman's options", says, each.todo)
    if not found:
        yield ok("Podman's options", "no option that Podman cannot restore")


def check_volumes(sizes: Mapping[str, int]) -> Iterator[Check]:
    """Say what a checkpoint and a restore do with volumes, by name and bytes of their files."""
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
