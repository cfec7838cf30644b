"""`gpusnap push` and `gpusnap pull`: between a store, or Podman's archives, and a registry."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from gpusnap import convert, kept, where
from gpusnap.failures import told
from gpusnap.kept import Kept
from gpusnap.labels import annotations_of
from gpusnap.progress import Progress
from gpusnap.source import load_manifest, open_repository
from oci import artifact, image, reference, transfer
from oci.archive import Compression, read_member
from oci.errors import BlobError, RegistryError, StoreError
from oci.layout import Layout
from oci.manifest import Descriptor
from oci.reference import Reference
from oci.store import Staging, Store, check_name
from oci.transfer import Moved
from runtime_shim.errors import ManifestError, UsageError

__all__ = [
    "Format",
    "Pulled",
    "Pushed",
    "fetched",
    "pull",
    "push",
    "push_kept",
    "store_name",
    "take_chunks",
    "write_archive",
]

Format = Literal["oci", "cri", "podman"]

_ARCHIVE = "podman.tar"
_LATEST = "latest"
# Each may cost a request for each blob that is new.
_MOST_SIBLINGS = 4
_LARGEST_DUMP = 16 << 20


@dataclass(frozen=True, slots=True)
class Pushed:
    """What is in a registry now."""

    reference: str
    digest: str
    moved: Moved


@dataclass(frozen=True, slots=True)
class Pulled:
    """What came from a registry, and where it is: in a store under a name, in an archive, or both."""

    reference: str
    digest: str
    moved: Moved
    store: str = ""
    name: str = ""
    file: str = ""


def push(
    what: where.InStore | where.InFile,
    to: where.InRegistry,
    *,
    plain_http: bool = False,
    format: Format = "oci",
    progress: Progress,
) -> Pushed:
    """Bring a checkpoint into a registry, as an artifact or as an ordinary image for an engine.

    What is there already does not go again. Raises NotFound, Damaged, GpusnapError.
    """
    with told(), ExitStack() as stack:
        if isinstance(what, where.InStore):
            store, found = stack.enter_context(kept.held(what))
            if format == "oci":
                return _sent(found.root, store.layout, store, to, plain_http, progress)
            found.check_whole()
            staging = stack.enter_context(store.stage())
            archive = os.path.join(staging.path, _ARCHIVE)
            progress.stage("archive")
            write_archive(found, store.layout, archive, progress=progress)
            annotations = dict(found.artifact.annotations)
        else:
            store = where.default_store().create()
            staging = stack.enter_context(store.stage())
            archive = what.path
            if format == "oci":
                progress.stage("archive")
                root = _taken_in(staging, archive, progress)
                return _sent(root, staging.layout, store, to, plain_http, progress)
            annotations = _annotations(archive)
        progress.stage("image")
        root = image.write_image(staging.layout, archive, format=format, annotations=annotations)
        return _sent(root, staging.layout, store, to, plain_http, progress)


def push_kept(
    store: Store, wanted: str, to: where.InRegistry, *, plain_http: bool, progress: Progress
) -> Pushed:
    """Push what a store has as an artifact. Raises as `push` does."""
    return push(where.InStore(store, wanted), to, plain_http=plain_http, progress=progress)


def pull(
    what: where.InRegistry,
    *,
    file: str = "",
    to: where.InStore | None = None,
    plain_http: bool = False,
    progress: Progress,
) -> Pulled:
    """Bring a checkpoint out of a registry, into a store, or into an archive, or both.

    Into this host's store, unless one of them is given. What a killed pull has brought is not brought again.
    Raises NotFound, Damaged, GpusnapError.
    """
    compress = _compression(file)
    store = to.store if to is not None else where.default_store()
    name = to.wanted if to is not None and to.wanted else ""
    with told():
        name = check_name(name) if name else store_name(what.reference)
        with fetched(store, what, plain_http=plain_http, progress=progress) as (staging, found, moved):
            if file:
                found.check_whole()
                progress.stage("archive")
                write_archive(found, staging.layout, file, compress=compress, progress=progress)
            if to is not None or not file:
                progress.stage("to disk")
                staging.commit(found.root, names=[name], tables=found.tables)
                return Pulled(str(what.reference), found.root.digest, moved, store.path, name, file)
    return Pulled(str(what.reference), found.root.digest, moved, file=file)


@contextmanager
def fetched(
    store: Store,
    what: where.InRegistry,
    *,
    leave: int = 0,
    plain_http: bool = False,
    progress: Progress,
) -> Iterator[tuple[Staging, Kept, Moved]]:
    """A checkpoint from a registry, in a staging of the store.

    leave: chunks that the store lacks stay away, where they are at most so many bytes together. The staging
    is removed at the end of the block, and stays for the next time where that fails. Raises OciError,
    ManifestError, Damaged, NotFound.
    """
    store.create()
    with open_repository(what, plain_http=plain_http) as repository:
        progress.stage(f"pull of {what.reference}")
        root = repository.resolve(_wanted(what.reference))
        staging = store.stage(f"pull-{root.digest.partition(':')[2][:32]}")
        try:
            transfer.pull(repository, root.digest, staging.layout, have=_have(staging), wanted=_is_config)
            found = kept.load(root, staging.layout)
            away = {each.digest for each in found.artifact.chunks if not staging.take(each.digest, each.size)}
            missing = sum(each.size for each in found.artifact.chunks if each.digest in away)
            root, moved = transfer.pull(
                repository,
                root.digest,
                staging.layout,
                have=_have(staging),
                wanted=lambda one: missing > leave or one.digest not in away,
                progress=progress.moved,
            )
            yield staging, found, moved
        except BaseException:
            staging.close(leave=True)
            raise
        staging.close()


def take_chunks(staging: Staging, chunks: Iterable[Descriptor]) -> None:
    """Have in the staging what the store has of them. Raises BlobError for one that is in neither."""
    for each in chunks:
        if not staging.layout.has_blob(each.digest, each.size) and not staging.take(each.digest, each.size):
            raise BlobError(
                f"the chunk {each.digest} of {each.size} bytes is neither in the checkpoint nor in the store "
                f"{os.path.dirname(os.path.dirname(staging.path))}"
            )


def write_archive(
    found: Kept,
    layout: Layout,
    path: str,
    *,
    compress: Compression = "none",
    embed: bool = True,
    progress: Progress,
) -> None:
    """Podman's archive of a checkpoint, self-contained with `embed`. Raises OciError, ImageError."""
    convert.give_out(
        found.artifact,
        layout,
        path,
        config=found.config,
        compress=compress,
        embed=embed,
        progress=progress.chunks,
    )


def store_name(of: Reference) -> str:
    """What a store calls something that is pushed to a reference, or comes from there."""
    try:
        return check_name(str(of))
    except StoreError:  # names of stores are narrower: no brackets, no __
        plain = re.sub(r"[^A-Za-z0-9]*([^A-Za-z0-9])[^A-Za-z0-9]*", _one, str(of)).strip("-._:@/+")
        return check_name(plain)


def _one(match: re.Match[str]) -> str:
    return match[1] if match[1] in "-._:@/+" else "-"


def _sent(
    root: Descriptor, layout: Layout, store: Store, to: where.InRegistry, plain_http: bool, progress: Progress
) -> Pushed:
    tag = "" if to.reference.digest else to.reference.tag or _LATEST
    if to.reference.digest not in ("", root.digest):
        raise UsageError(
            f"{to.reference} names another digest than that of the checkpoint, {root.digest}",
            hint="push it to a tag",
        )
    with open_repository(to, plain_http=plain_http) as repository:
        progress.stage(f"push to {to.reference}")
        moved = transfer.push(
            root,
            layout,
            repository,
            tag=tag,
            mount_from=_siblings(store, to.reference),
            progress=progress.moved,
        )
    name = f"{to.reference.name}:{tag}" if tag else str(to.reference)
    return Pushed(name, root.digest, moved)


def _siblings(store: Store, to: Reference) -> tuple[str, ...]:
    """Repositories of the same registry that may have some of the blobs, as the store's names say."""
    found: dict[str, None] = {}
    for entry in store.entries():
        try:
            other = reference.parse(entry.name)
        except RegistryError:
            continue
        if other.registry == to.registry and other.repository != to.repository:
            found[other.repository] = None
    return tuple(found)[:_MOST_SIBLINGS]


def _taken_in(staging: Staging, archive: str, progress: Progress) -> Descriptor:
    taken = convert.take_in(archive, staging.layout, known=staging.take, progress=progress.chunks)
    take_chunks(staging, taken.chunks)
    parts = artifact.Artifact(taken.config, taken.records, taken.rootfs, taken.chunks, taken.annotations)
    return artifact.write(staging.layout, parts)


def _annotations(archive: str) -> dict[str, str]:
    """What an archive says of itself, from its first entries."""
    config = read_member(archive, "config.dump", limit=_LARGEST_DUMP) or b""
    spec = read_member(archive, "spec.dump", limit=_LARGEST_DUMP) or b""
    try:
        record = load_manifest(archive)
    except ManifestError:
        record = None
    return annotations_of(config, spec, record, written=os.path.getmtime(archive))


def _wanted(of: Reference) -> str:
    return of.digest or of.tag or _LATEST


def _have(staging: Staging) -> Callable[[Descriptor], bool]:
    return lambda one: staging.take(one.digest, one.size)


def _is_config(one: Descriptor) -> bool:
    return one.media_type == artifact.CONFIG


def _compression(file: str) -> Compression:
    if not file or file.endswith(".tar"):
        return "none"
    if file.endswith((".gz", ".tgz")):
        raise UsageError(f"{file} would be compressed by gzip", hint="name it .tar, or .tar.zst")
    return "zstd"
