"""Reads from an export that a killed command left whose it is, and which memory its restore needs.

Of a container with --rm, the export is all that says so. What is read is at its beginning: Podman writes
config.dump before CRIU's images, and these in the order of their names, so that gpusnap/manifest.json comes
before the memory in pages-1.img (libpod, exportCheckpoint; containers/storage, TarWithOptions). An export in
a store is not compressed, so that the rest is skipped without being read.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from contextlib import closing
from functools import partial

from gpusnap.checkpoints import locator
from gpusnap.checkpoints.formats.annotations import time_of
from gpusnap.checkpoints.formats.entries import entries
from gpusnap.checkpoints.formats.names import BLOBS, CONFIG, FIRST, LARGEST_DUMP
from gpusnap.checkpoints.names import container_name
from gpusnap.engines.podman import is_exporting
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.chunks.table import descriptors
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.operations.checkpointing.failed_export import make_import_command
from gpusnap.operations.checkpointing.left_exports import LeftExport
from gpusnap.runtime_shim.base import deadlines
from gpusnap.runtime_shim.base.errors import GpusnapError, reason
from gpusnap.runtime_shim.records import manifest, manifest_json
from gpusnap.runtime_shim.snapshot.memory.destination import StoreDestination


@dataclass(frozen=True, slots=True)
class ExportedContainer:
    """A container that Podman can restore from an export."""

    id: str
    name: str
    created: str
    """When its checkpoint was made (RFC 3339)."""
    volumes: Collection[str]
    """The names of its named volumes."""
    left: LeftExport
    needed: tuple[Descriptor, ...]
    """The chunks that its restore reads from a store."""
    store: str
    """The path of the store that has them, or may have them."""
    config: bytes = b""
    """Its config.dump."""

    @property
    def chunks(self) -> frozenset[str]:
        """The digests of these chunks."""
        return frozenset(each.digest for each in self.needed)

    def make_command(self) -> str:
        """Return the command with which Podman restores it; Podman is asked for its volumes."""
        variable = "" if locator.is_default(self.store) else f"GPUSNAP_STORE={shlex.quote(self.store)} "
        name = container_name(self.name, self.id)
        return make_import_command(self.left.archive, self.volumes, variable, name=name, config=self.config)


def read(left: LeftExport, store: str, *, within: float = deadlines.PATIENCE) -> ExportedContainer:
    """Read an export. `store`: the path of the store that its command names.

    Raises GpusnapError if it cannot be read, or not `within` that many seconds.
    """
    unfinished = is_exporting(left.archive)
    try:
        return deadlines.ask(partial(_read, left, store), left.archive, within=within)
    except TimeoutError:
        why = f"{left.archive} could not be read within {within:g} s"
    except OSError as error:
        why = f"{left.archive}: {reason(error)}"
    except (OciError, GpusnapError) as error:
        why = str(error)
    if unfinished:
        raise GpusnapError(
            f"Podman is still exporting to {left.archive}: which memory its restore needs is not known yet",
            hint="wait until it has finished, and try again",
        )
    raise GpusnapError(
        f"what Podman exported for a killed gpusnap checkpoint cannot be examined: {why}",
        hint="if it is of no use, remove it",
    )


def _read(left: LeftExport, store: str) -> ExportedContainer:
    missing, found, created = {FIRST[0], CONFIG}, dict[str, bytes](), ""
    with closing(entries(left.archive)) as members:
        for member in members:
            if member.name in missing and member.content is not None:
                limit = LARGEST_DUMP if member.name == FIRST[0] else manifest.LARGEST
                found[member.name] = member.content.read(limit)
                missing.discard(member.name)
                created = created or time_of(member.info.mtime)
            elif member.name.startswith(f"{BLOBS}/") and not left.store:
                missing.discard(CONFIG)  # with --to FILE, the memory is in the archive
            if not missing:
                break
    needed: tuple[Descriptor, ...] = ()
    if CONFIG in found:
        record = manifest_json.decode(found[CONFIG], f"{left.archive}: {CONFIG}")
        created = record.created
        if record.pages == StoreDestination.kind:
            needed = tuple(descriptors(record.tables))
    try:
        config = parse_json(found.get(FIRST[0], b""))
        volumes = [str(each["volumeName"]) for each in config.get("namedVolumes") or ()]
        container_id, name = str(config["id"]), str(config["name"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise GpusnapError(f"{left.archive}: {FIRST[0]} does not name a container: {error!r}") from error
    return ExportedContainer(
        container_id, name, created, volumes, left, needed, store, found.get(FIRST[0], b"")
    )
