"""`gpusnap push` and `gpusnap pull`: between a store, or Podman's archives, and a registry."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from gpusnap import convert, kept, where
from gpusnap.failures import told
from gpusnap.kept import Kept
from gpusnap.labels import annotations_of
from gpusnap.members import ARCHIVE, FIRST, LARGEST_DUMP
from gpusnap.progress import Progress
from gpusnap.source import load_manifest, open_repository
from oci import artifact, image, reference, transfer
from oci.archive import Compression, read_member
from oci.errors import BlobError, RegistryError, StagingBusy, StoreError
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
    "taken_in",
    "write_archive",
]

Format = Literal["oci", "cri", "podman"]

_LATEST = "latest"
# Each may cost a request for each blob that is new.
_MOST_SIBLINGS = 4
# Seconds, between looks at a staging that another process has.
_EVERY = 0.2
_PATIENCE = 600.0
# Bytes that any network brings in time.
_NOTHING = 64 << 20
# Bytes of chunks that show how fast they come; whoever fetches the rest fetches these again.
_PROBE = 64 << 20


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
            archive = os.path.join(staging.path, ARCHIVE)
            progress.stage("archive")
            write_archive(found, store.layout, archive, progress=progress)
            annotations = dict(found.artifact.annotations)
        else:
            store = where.default_store().create()
            staging = stack.enter_context(store.stage())
            archive = what.path
            if format == "oci":
                progress.stage("archive")
                root = taken_in(staging, archive, progress)
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
                staging.commit(found.root, names=[name], foreign=found.tables)
                return Pulled(str(what.reference), found.root.digest, moved, store.path, name, file)
    return Pulled(str(what.reference), found.root.digest, moved, file=file)


@contextmanager
def fetched(
    store: Store,
    what: where.InRegistry,
    *,
    leave: int = 0,
    seconds: float = 0,
    plain_http: bool = False,
    progress: Progress,
) -> Iterator[tuple[Staging, Kept, Moved]]:
    """A checkpoint from a registry, in a staging of the store.

    leave: chunks that the store lacks stay away, where they are at most so many bytes together, and would
    come within `seconds`; those that it has are not read then, as they are when they are used. The staging is
    removed at the end of the block, and stays for the next time where that fails. Raises OciError,
    ManifestError, Damaged, NotFound.
    """
    store.create()
    with open_repository(what, plain_http=plain_http) as repository:
        progress.stage(f"pull of {what.reference}")
        root = repository.resolve(_wanted(what.reference))
        staging = _staged(store, root, what.reference, progress)
        try:
            transfer.pull(repository, root.digest, staging.layout, have=_have(staging), wanted=_is_config)
            found = kept.load(root, staging.layout)
            away = {each.digest: each.size for each in _away(found.artifact.chunks, staging, store)}

            def come(wanted: Callable[[Descriptor], bool]) -> Moved:
                have = _have(staging, read=not leave)
                return transfer.pull(
                    repository, root.digest, staging.layout, have=have, wanted=wanted, progress=progress.moved
                )[1]

            if not leave:
                moved = come(lambda one: True)
            else:
                moved = come(lambda one: one.digest not in away)
                if not _may_wait(away, leave, seconds, come):
                    come(lambda one: one.digest in away)
            yield staging, found, moved
        except BaseException:
            staging.close(leave=True)
            raise
        staging.close()


def _away(chunks: Iterable[Descriptor], staging: Staging, store: Store) -> Iterator[Descriptor]:
    """Those that are neither in a staging nor in its store."""
    for each in chunks:
        if not any(layout.has_blob(each.digest, each.size) for layout in (staging.layout, store.layout)):
            yield each


def _may_wait(
    away: Mapping[str, int], leave: int, seconds: float, come: Callable[[Callable[[Descriptor], bool]], Moved]
) -> bool:
    """Whether chunks (digest, bytes) can come later: they are few, and would then come in time.

    Some of them come now, so that it is known how fast they do.
    """
    missing = sum(away.values())
    if missing > leave:
        return False
    if missing <= _NOTHING:
        return True
    probe: set[str] = set()
    size = 0
    for digest, each in away.items():
        if size >= min(missing // 32, _PROBE):
            break
        probe.add(digest)
        size += each
    began = time.monotonic()
    moved = come(lambda one: one.digest in probe)
    return missing * (time.monotonic() - began) <= moved.bytes * seconds


def _staged(store: Store, root: Descriptor, of: Reference, progress: Progress) -> Staging:
    """The staging for what is pulled of it; where another process pulls the same, when that is done.

    What that brings, a second one need not. Raises OciError, such as StagingBusy where that takes too long.
    """
    name, waits = f"pull-{root.digest.partition(':')[2][:32]}", False
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            staging = store.stage(name)
        except StagingBusy:
            if time.monotonic() > end:
                raise
            if not waits:
                progress.stage(f"waiting for another pull of {of}")
            waits = True
            time.sleep(_EVERY)
            continue
        if waits:
            progress.stage(f"pull of {of}")
        return staging


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


def taken_in(staging: Staging, archive: str, progress: Progress) -> Descriptor:
    """An archive as an artifact in a staging; the store may have its chunks. Raises OciError, ImageError."""
    taken = convert.take_in(archive, staging.layout, known=staging.take, progress=progress.chunks)
    take_chunks(staging, taken.chunks)
    parts = artifact.Artifact(taken.config, taken.records, taken.rootfs, taken.chunks, taken.annotations)
    return artifact.write(staging.layout, parts)


def _annotations(archive: str) -> dict[str, str]:
    """What an archive says of itself, from its first entries."""
    config, spec = (read_member(archive, name, limit=LARGEST_DUMP) or b"" for name in FIRST)
    try:
        record = load_manifest(archive)
    except ManifestError:
        record = None
    return annotations_of(config, spec, record, written=os.path.getmtime(archive))


def _wanted(of: Reference) -> str:
    return of.digest or of.tag or _LATEST


def _have(staging: Staging, *, read: bool = True) -> Callable[[Descriptor], bool]:
    """What the store has, and with `read` has right: a pull brings the rest, also in the place of what is
    damaged.
    """

    def have(one: Descriptor) -> bool:
        if not staging.take(one.digest, one.size):
            return False
        if not read:
            return True
        try:
            staging.layout.check_blob(one)
        except BlobError:
            return False
        return True

    return have


def _is_config(one: Descriptor) -> bool:
    return one.media_type == artifact.CONFIG


def _compression(file: str) -> Compression:
    if not file or file.endswith(".tar"):
        return "none"
    if file.endswith((".gz", ".tgz")):
        raise UsageError(f"{file} would be compressed by gzip", hint="name it .tar, or .tar.zst")
    return "zstd"
