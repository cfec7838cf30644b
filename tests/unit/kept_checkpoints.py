"""Stores with small checkpoints in them, and the archives that they are of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from archives import CONFIG_DUMP, CREATED, record, regions, written

from gpusnap.checkpoints.formats.podman import take_in
from gpusnap.oci.chunks import artifact
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.records.artifact import write_artifact
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.snapshot.memory import handover
from gpusnap.runtime_shim.snapshot.memory.handover import Recipient

__all__ = ["an_archive", "hand_over_pages", "keep", "keep_pages", "leave_export", "write_export"]


def an_archive(folder: Path, *, pages: str = "chunks", volumes: Mapping[str, bytes] | None = None) -> str:
    """Podman's of a checkpoint, with its chunks, or with the folder beside it as the store that has them.

    `volumes`: the tar of each.
    """
    source = Layout(folder / "source").create()
    found = record(regions(source), pages=pages)
    more = {f"volumes/{name}.tar": tar for name, tar in (volumes or {}).items()}
    return written(folder / "in.tar", source if pages == "chunks" else None, found, more=more)


def keep(store: Store, archive: str, names: Sequence[str]) -> str:
    """Have a store keep an archive; the digest."""
    with store.create().stage() as staging:
        taken = take_in(archive, staging.layout)
        parts = artifact.Artifact(taken.config, taken.records, taken.rootfs, taken.chunks, taken.annotations)
        root = artifact.write(staging.layout, parts)
        staging.commit(root, names=names, tables=[table for _, table in taken.tables])
    return root.digest


def keep_pages(store: Store, *, salt: int = 0) -> str:
    """Have a store keep what a runtime puts there for `an_archive(pages="store")`; the digest.

    With another `salt` it is that of another checkpoint of the container.
    """
    with store.create().stage() as staging:
        root = write_artifact(staging.layout, record(regions(staging.layout, salt=salt), pages="store"))
        staging.commit(root)
    return root.digest


def hand_over_pages(store: Store, name: str, owner: tuple[int, int] = (0, 0)) -> Manifest:
    """Hand over what a runtime would for `an_archive(pages="store")`; `owner`: the command it is for."""
    with store.create().stage(name) as staging:
        staging.mark_precious("for a test")
        found = record(regions(staging.layout), pages="store")
        handover.hand_over(staging, found, Recipient(name, owner))
    return found


def write_export(path: Path, source: Path, *, pages: str = "store", created: str = CREATED) -> str:
    """Write Podman's archive of the container k; `source`: a new folder for its memory."""
    layout = Layout(source).create()
    config = json.dumps({**CONFIG_DUMP, "name": "k"}).encode()
    return written(
        path,
        layout if pages == "chunks" else None,
        replace(record(regions(layout), pages=pages), created=created),
        more={"config.dump": config},
    )


def leave_export(store: Store, source: Path, *, created: str = CREATED) -> str:
    """Have a store keep Podman's export of the container k for a killed command; its path.

    `keep_pages` puts its memory into the store.
    """
    staging = store.create().stage()
    path = write_export(Path(staging.path, "podman.tar"), source, created=created)
    command = f"podman container restore --import {path}"
    staging.mark_precious(f"what Podman exported of the container k: {command}")
    staging.close(leave=True)
    return path
