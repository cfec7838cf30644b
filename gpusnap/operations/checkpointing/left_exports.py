"""Finds what Podman exported for a `gpusnap checkpoint` that was killed.

Of a container with --rm, such an export is all that is left beside the memory. In a store, it is in a staging
directory that says how to restore it, which nobody removes. With --to FILE, it is beside FILE, under a hidden
name that only the command's order knows (runtime_shim/shim/overrides.py), and a file on disk (places.py).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable
from functools import partial

from gpusnap.base.user_errors import convert_errors
from gpusnap.checkpoints.formats.names import ARCHIVE
from gpusnap.engines.podman import is_exporting, list_exporting
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.store.store import Store
from gpusnap.operations.checkpointing import places
from gpusnap.runtime_shim.base import deadlines
from gpusnap.runtime_shim.shim import overrides


@dataclass(frozen=True, slots=True)
class LeftExport:
    """An archive whose command was killed."""

    archive: str
    """Its path; of a place that cannot be looked at, the file that names it."""
    store: str
    """The path of the store in whose staging directory it is, or of the place that cannot be looked at; empty
    if it is elsewhere."""
    said: str
    """What it is, and what can be done with it."""


def list_left(store: str) -> tuple[LeftExport, ...]:
    """Return those in a store. Raises GpusnapError."""
    with convert_errors():
        found = Store(store).list_precious(ARCHIVE)
    return tuple(_describe(os.path.join(path, ARCHIVE), store, why) for path, why in found.items())


def list_missing() -> tuple[LeftExport, ...]:
    """Return the places of killed commands where nobody can look for now."""
    ended, problems = places.list_ended(), {}
    for each in ended:
        if (each.path, each.file_system) not in problems:
            problems[each.path, each.file_system] = each.find_problem()
    # If another file system is there now, it may have a store of its own.
    there = {path for (path, _), problem in problems.items() if not problem}
    return tuple(
        LeftExport(
            each.noted,
            "" if each.path in there else each.path,
            f"a killed gpusnap checkpoint wrote to {each.path}, which cannot be examined: {problem}. Run "
            f"gpusnap recover again when it can be; if it is gone for good, rm {shlex.quote(each.noted)} "
            "makes gpusnap forget it",
        )
        for each in ended
        if (problem := problems[each.path, each.file_system])
    )


def list_stores(store: str, missing: Iterable[LeftExport]) -> list[str]:
    """Return this host's store, then those to which killed commands wrote, but for the missing ones.

    `missing`: what `list_missing` returned.
    """
    found = {each.path for each in places.list_ended() if not each.archive} | overrides.list_stores()
    return [store, *sorted(found - {store, *_list_places(missing)})]


def list_left_beside(missing: Iterable[LeftExport] = ()) -> tuple[LeftExport, ...]:
    """Return those that were to get another name. An empty one is left out, but for one that grows.

    `missing`: as in `list_stores`; nobody looks there.
    """
    return tuple(
        _describe(
            archive,
            "",
            f"{archive} is Podman's export of {container or 'a container'}, for a killed gpusnap checkpoint "
            f"--to {shlex.quote(target)}. gpusnap verify {shlex.quote(archive)} checks whether it is "
            f"complete; if it is, mv {shlex.quote(archive)} {shlex.quote(target)} gives it its "
            "name; if not, remove it",
        )
        for archive, (target, container) in sorted(_list_archives(missing).items())
        if _has_content(archive) or is_exporting(archive)
    )


def list_begun() -> tuple[LeftExport, ...]:
    """Return those in stores that a Podman is making now, though it may not have created the archive yet.

    Ask before `list_left`, so that none is missed which Podman creates and completes in between.
    """
    exporting = sorted(list_exporting())
    return tuple(
        LeftExport(archive, store, _describe_unfinished(archive))
        for container, store in sorted(overrides.list_ended())
        for name, archive in exporting
        if name == container and archive.startswith(os.path.join(store, ""))
    )


def _list_places(missing: Iterable[LeftExport]) -> set[str]:
    return {each.store for each in missing if each.store}


def _list_archives(missing: Iterable[LeftExport]) -> dict[str, tuple[str, str]]:
    """Return the path that each was to get, and the name of its container if that is known."""
    absent = _list_places(missing)
    found = {archive: (target, "") for archive, target in overrides.list_archives().items()}
    for each in places.list_ended():
        if each.path not in absent and each.has_archive:
            found[each.archive] = each.target, each.container
    return {path: each for path, each in found.items() if os.path.dirname(path) not in absent}


def remove_empty(missing: Iterable[LeftExport] = ()) -> None:
    """Remove archives beside their place to which Podman has exported nothing, and does not any more.

    `missing`: as in `list_stores`.
    """
    for archive in _list_archives(missing):
        if not is_exporting(archive) and not _has_content(archive):
            try:
                os.unlink(archive)
            except OSError:  # it is named again next time, if it gets content
                continue


def forget(left: Iterable[LeftExport], stores: Collection[str] = ()) -> None:
    """Forget what killed commands ordered, but for the places where some of these are, and these stores."""
    kept = {name for each in left for name in (each.archive, each.store) if name} | set(stores)
    overrides.sweep(kept)
    places.sweep(kept)


def _describe(archive: str, store: str, said: str) -> LeftExport:
    if is_exporting(archive):
        said = _describe_unfinished(archive)
    return LeftExport(archive, store, said)


def _describe_unfinished(archive: str) -> str:
    return f"Podman is still exporting to {archive}: run gpusnap recover again when it has finished"


def _has_content(archive: str) -> bool:
    try:
        return deadlines.ask(partial(os.path.getsize, archive), archive, always=True) > 0
    except OSError:
        return True  # it cannot be known
