"""Options of a Podman container that a restore does not restore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpusnap.doctor.base.check import Check, failure, ok, warning
from gpusnap.engines.podman_options import Option


def check(found: Sequence[Option]) -> Iterator[Check]:
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
