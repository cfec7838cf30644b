"""`gpusnap push` and `gpusnap pull`: between a store, or Podman's archives, and a registry."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Literal

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import convert_errors
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.artifact import ArtifactParts
from gpusnap.checkpoints.formats import containerd_images as images
from gpusnap.checkpoints.formats import podman
from gpusnap.checkpoints.formats.annotations import annotations_of
from gpusnap.checkpoints.formats.containerd_writer import origin
from gpusnap.checkpoints.formats.entries import read_member
from gpusnap.checkpoints.formats.layout_archive import InLayout
from gpusnap.checkpoints.formats.names import ARCHIVE, FIRST, LARGEST_DUMP
from gpusnap.checkpoints.names import store_name
from gpusnap.checkpoints.offline import raise_named
from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.errors import BlobError, RegistryError
from gpusnap.oci.layout import reference
from gpusnap.oci.layout import single_layer_image as image
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.layout.reference import Reference
from gpusnap.oci.store.index import check_name
from gpusnap.oci.store.store import Store
from gpusnap.oci.tar.archive import Compression
from gpusnap.operations.disk_space import check_archive
from gpusnap.operations.open import load_manifest, open_repository
from gpusnap.operations.pull import Referrers, fetch
from gpusnap.operations.sources import Local, layout_of, open_local
from gpusnap.runtime_shim.base.errors import ManifestError, Refused, UsageError

if TYPE_CHECKING:
    from gpusnap.oci.registry.copy import TransferTotals

Format = Literal["oci", "cri", "podman"]

# Each may cost one request for each new blob.
_MOST_SIBLINGS = 4


@dataclass(frozen=True, slots=True)
class PushResult:
    """A checkpoint that is now in a registry."""

    reference: str
    digest: str
    moved: TransferTotals


@dataclass(frozen=True, slots=True)
class PullResult:
    """A checkpoint from a registry, now in a store under a name, in an archive, or in containerd."""

    reference: str
    digest: str
    moved: TransferTotals
    store: str = ""
    name: str = ""
    file: str = ""
    image: images.ImportedImage | None = None
    """The image in containerd."""
    packed: images.ImportedImage | None = None
    """The image in the file: `ctr images import` sets these names."""


def push(
    what: locator.InStore | locator.InFile | locator.InContainerd,
    to: locator.InRegistry,
    *,
    plain_http: bool = False,
    format: Format = "oci",
    packing: image.Packing = "gzip",
    progress: Progress,
) -> PushResult:
    """Copy a checkpoint to a registry, as an artifact or as an ordinary image for an engine.

    packing: the compression of that image's layer. Blobs that the registry has are not sent again. Raises
    NotFound, Damaged, GpusnapError.
    """
    with convert_errors(), ExitStack() as stack:
        if format == "oci":
            source = stack.enter_context(open_local(what, progress))
            return send(source, to, plain_http, progress)
        found: ArtifactParts | None = None
        if isinstance(what, locator.InStore):
            store, found = stack.enter_context(kept.hold_artifact(what))
            layout = store.layout
        else:
            place = layout_of(what, stack)
            _check_format(what, place, format)
            store = locator.default_store().create()
            if place is not None:
                layout = place.layout
                found = kept.load(place.root, layout)
        staging = stack.enter_context(store.stage())
        if found is not None:
            found.check_podman()
            archive = os.path.join(staging.path, ARCHIVE)
            progress.stage("archive")
            podman.give_out(found.artifact, layout, archive, config=found.config, progress=progress.at)
            annotations = dict(found.artifact.annotations)
        else:
            assert isinstance(what, locator.InFile)
            archive = what.path
            annotations = _annotations(archive)
        progress.stage("image")
        root = image.write_image(
            staging.layout, archive, format=format, annotations=annotations, packing=packing
        )
        return send(Local(root, staging.layout, store), to, plain_http, progress)


def _check_format(
    what: locator.InStore | locator.InFile | locator.InContainerd, source: InLayout | None, format: Format
) -> None:
    """Raise Refused if no image of that format can be made."""
    if isinstance(what, locator.InContainerd) or (source is not None and source.kind == "containerd"):
        raise Refused(
            f"a containerd checkpoint cannot be converted to an image for {format}",
            hint="push it without --format, for containerd on another host",
            code="GPS-607",
        )
    if source is not None and source.kind == "image":
        raise Refused(
            f"{source.layout.path} already contains a checkpoint as an image for an engine",
            hint="push it as it is, without --format",
            code="GPS-606",
        )


def pull(
    what: locator.InRegistry,
    *,
    file: str = "",
    to: locator.InStore | locator.InContainerd | None = None,
    plain_http: bool = False,
    progress: Progress,
) -> PullResult:
    """Copy a checkpoint from a registry to a store, an archive or containerd, or to two of these.

    The destination is this host's store unless one is given. Blobs that a killed pull has fetched are not
    fetched again. Raises NotFound, Damaged, GpusnapError.
    """
    _compression(file)
    if file:
        locator.check_new_file(file)
    store = to.store if isinstance(to, locator.InStore) else locator.default_store()
    name = to.wanted if isinstance(to, locator.InStore) else ""
    with convert_errors():
        call_it = store_name(what.reference)
        name = check_name(name) if name else call_it
        referrers = Referrers()

        def check(found: ArtifactParts) -> None:
            """Check by the manifest, before all has arrived."""
            if isinstance(to, locator.InContainerd):
                found.check_containerd()
                images.check_target(to)
            elif file:
                found.check_whole()
            if file and found.artifact.is_image:
                images.check_file(file)

        def look(found: ArtifactParts, layout: Layout) -> None:
            """Check by the beginning of the records."""
            # A large manifest of the base image is a blob of its own: if that has not arrived, it is checked
            # later.
            with suppress(BlobError):
                of = origin(found, layout)
                if file:
                    # Not a name of the maker's choice, as an import replaces images.
                    images.check_names(of, call_it)
                if isinstance(to, locator.InContainerd):
                    images.check_base(of, to)

        incoming = fetch(
            store,
            what,
            check=check,
            look=look if file or isinstance(to, locator.InContainerd) else None,
            after=referrers if isinstance(to, locator.InStore) or not (file or to) else None,
            plain_http=plain_http,
            progress=progress,
        )
        with _name_in_errors(what), incoming as (staging, found, moved):
            done = PullResult(str(what.reference), found.root.digest, moved, file=file)
            if file:
                progress.stage("archive")
                done = replace(done, packed=write_file(found, staging.layout, file, call_it, progress))
            if isinstance(to, locator.InContainerd):
                progress.stage("into containerd")
                done = replace(done, image=images.bring(found, staging.layout, to, progress))
            elif to is not None or not file:
                progress.stage("to disk")
                staging.commit(found.root, names=[name], also=referrers.found, foreign=found.tables)
                done = replace(done, store=store.path, name=name)
    return done


@contextmanager
def _name_in_errors(what: locator.InRegistry) -> Iterator[None]:
    """Add to an error of the registry's which checkpoint this host's store has under that name."""
    try:
        yield
    except RegistryError as error:
        raise_named(what, error)
        raise


def write_file(
    found: ArtifactParts, layout: Layout, path: str, name: str, progress: Progress
) -> images.ImportedImage | None:
    """Write the archive for the engine that made the checkpoint, Podman or containerd (ctr).

    name: of ctr's image. Returns the image that ctr will make, if any. Raises OciError, ImageError,
    UsageError.
    """
    compress = _compression(path)
    check_archive(found.parts, path)
    if found.artifact.is_image:
        return images.write(found, layout, path, name, progress)
    podman.give_out(
        found.artifact, layout, path, config=found.config, compress=compress, progress=progress.at
    )
    return None


def send(
    source: Local,
    to: locator.InRegistry,
    plain_http: bool,
    progress: Progress,
    *,
    also: Sequence[Descriptor] | None = None,
    mount_from: Sequence[str] = (),
) -> PushResult:
    """Copy a checkpoint to a registry together with its referrers, or with `also` if given.

    mount_from: repositories of the same registry that have its blobs, as for copy.push.
    """
    from gpusnap.oci.registry import copy as transfer
    from gpusnap.oci.registry import referrers

    root, layout = source.root, source.layout
    tag = "" if to.reference.digest else to.reference.tag or reference.LATEST
    if to.reference.digest not in ("", root.digest):
        raise UsageError(
            f"{to.reference} names another digest than the checkpoint's, {root.digest}",
            hint="push it to a tag",
            code="GPS-102",
        )
    with open_repository(to, plain_http=plain_http, mirrors=False) as repository:
        progress.stage(f"push to {to.reference}")
        moved = transfer.push(
            root,
            layout,
            repository,
            tag=tag,
            mount_from=(*mount_from, *_siblings(source.store, to.reference)),
            progress=progress.show_transfer,
        )
        if more := source.referrers() if also is None else also:
            progress.stage(f"push of its referrers to {to.reference}")
            moved = transfer.add(moved, referrers.push(more, layout, repository))
    name = f"{to.reference.name}:{tag}" if tag else str(to.reference)
    return PushResult(name, root.digest, moved)


def _siblings(store: Store, to: Reference) -> tuple[str, ...]:
    """Return repositories of the same registry that may have some of the blobs, by the names in the store."""
    found: dict[str, None] = {}
    for entry in store.entries():
        try:
            other = reference.parse(entry.name)
        except RegistryError:
            continue
        if other.registry == to.registry and other.repository != to.repository:
            found[other.repository] = None
    return tuple(found)[:_MOST_SIBLINGS]


def _annotations(archive: str) -> dict[str, str]:
    """Return the annotations of an archive, from its first entries."""
    config, spec = (read_member(archive, name, limit=LARGEST_DUMP) or b"" for name in FIRST)
    try:
        record = load_manifest(archive)
    except ManifestError:
        record = None
    return annotations_of(config, spec, record, written=os.path.getmtime(archive))


def _compression(file: str) -> Compression:
    if not file or file.endswith(".tar"):
        return "none"
    if file.endswith((".gz", ".tgz")):
        raise UsageError(f"{file} would be compressed by gzip", hint="name it .tar, or .tar.zst")
    return "zstd"
