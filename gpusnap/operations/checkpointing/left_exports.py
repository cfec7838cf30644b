"""Finds what Podman exported for a `gpusnap checkpoint` that was killed.

Of a container with --rm, such an export is all that is left beside the memory. In a store, it is in a staging
directory that says how to restore it, which nobody removes. With --to FILE, it is beside FILE, under a hidden
name that only the command's order knows (runtime_shim/shim/overrides.py).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable

from gpusnap.checkpoints.formats.names import ARCHIVE
from gpusnap.engines.podman import is_exporting, list_exporting
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.shim import overrides
from gpusnap.user_errors import convert_errors


@dataclass(frozen=True, slots=True)
class LeftExport:
    """An archive whose command was killed."""

    archive: str
    store: str
    """The path of the store in whose staging directory it is; empty if it is elsewhere."""
    said: str
    """What it is, and what can be done with it."""


def list_left(store: str) -> tuple[LeftExport, ...]:
    """Return those in a store. Raises GpusnapError."""
    with convert_errors():
        found = Store(store).list_precious(ARCHIVE)
    return tuple(_describe(os.path.join(path, ARCHIVE), store, why) for path, why in found.items())


def list_left_beside() -> tuple[LeftExport, ...]:
    """Return those that were to get another name. An empty one is left out, but for one that grows."""
    return tuple(
        _describe(
            archive,
            "",
            f"Podman's export for a gpusnap checkpoint --to {shlex.quote(target)} that was killed. "
            f"gpusnap verify {shlex.quote(archive)} checks whether it is complete; if it is, "
            f"mv {shlex.quote(archive)} {shlex.quote(target)} gives it its name; if not, remove it",
        )
        for archive, target in sorted(overrides.list_archives().items())
        if _has_content(archive) or is_exporting(archive)
    )


def list_begun() -> tuple[LeftExport, ...]:
    """Return those in stores that a Podman is making now, though it may not have created the archive yet.

    Ask before `list_left`, so that none is missed which Podman creates and completes in between.
    """
    exporting = list_exporting()
    return tuple(
        LeftExport(exporting[container], store, _describe_unfinished(exporting[container]))
        for container, store in sorted(overrides.list_ended())
        if exporting.get(container, "").startswith(os.path.join(store, ""))
    )


def remove_empty() -> None:
    """Remove archives beside their place to which Podman has exported nothing, and does not any more."""
    for archive in overrides.list_archives():
        if not is_exporting(archive) and not _has_content(archive):
            try:
                os.unlink(archive)
            except OSError:  # it is named again next time, if it gets content
                continue


def list_stores(left: Iterable[LeftExport]) -> set[str]:
    """Return the stores in which some of these are."""
    return {each.store for each in left if each.store}


def _describe(archive: str, store: str, said: str) -> LeftExport:
    if is_exporting(archive):
        said = _describe_unfinished(archive)
    return LeftExport(archive, store, said)


def _describe_unfinished(archive: str) -> str:
    return f"Podman is still exporting to {archive}: run gpusnap recover again when it has finished"


def _has_content(archive: str) -> bool:
    try:
        return os.path.getsize(archive) > 0
    except OSError:
        return True  # it cannot be known
