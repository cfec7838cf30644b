"""`gpusnap checkpoint`: a running container becomes an artifact in a store or a registry, or an archive.

Podman does the checkpoint, and gpusnap-runtime puts all memory straight into the store, so that what Podman
exports is small; that is taken apart into the records of the same artifact. An error after Podman ended the
container loses nothing: the checkpoint is in Podman's storage, too.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from gpusnap import convert, kept, moving, podman, where
from gpusnap.failures import failure, told
from gpusnap.moving import Pushed
from gpusnap.progress import Progress, Tick, grown
from oci import artifact
from oci.errors import OciError
from oci.manifest import Descriptor
from oci.store import Staging, Store, check_name
from runtime_shim import manifest, orders
from runtime_shim.errors import GpusnapError, ImageError, Interrupted, UsageError, reason

__all__ = ["Made", "Wish", "checkpoint"]

_ARCHIVE = "podman.tar"
_COMPRESSION = {".tar": "none", ".tar.gz": "gzip", ".tgz": "gzip", ".tar.zst": "zstd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What shall be checkpointed, how, and where to; without `to`, into this host's store."""

    container: str
    to: where.Place | None = None
    name: str = ""
    leave_running: bool = False
    tcp_established: bool = False
    file_locks: bool = False
    ignore_rootfs: bool = False
    plain_http: bool = False

    def options(self) -> list[str]:
        """For Podman."""
        chosen = {
            "--leave-running": self.leave_running,
            "--tcp-established": self.tcp_established,
            "--file-locks": self.file_locks,
            "--ignore-rootfs": self.ignore_rootfs,
        }
        return [option for option, wanted in chosen.items() if wanted]


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint that was made. Sizes are bytes."""

    container: podman.Container
    seconds: float
    gpu_memory: int
    size: int
    """Of all blobs, or of the archive."""
    new: int
    """Of these, bytes that the store did not have."""
    name: str = ""
    digest: str = ""
    store: str = ""
    file: str = ""
    """The archive; then the three above are empty."""
    pushed: Pushed | None = None


def checkpoint(wish: Wish, progress: Progress) -> Made:
    """Make it. Raises NotFound, ContainerError, Interrupted, GpusnapError."""
    began = time.monotonic()
    if isinstance(wish.to, where.InRegistry) and wish.to.reference.digest:
        raise UsageError(f"{wish.to.reference} names a digest, which no checkpoint has before it is made")
    found = podman.container(wish.container)
    podman.check(found)
    if isinstance(wish.to, where.InFile):
        return _to_file(wish, found, wish.to.path, progress, began)
    made = _to_store(wish, found, progress, began)
    if not isinstance(wish.to, where.InRegistry):
        return made
    try:
        pushed = moving.push_kept(
            Store(made.store), made.digest, wish.to, plain_http=wish.plain_http, progress=progress
        )
    except (GpusnapError, KeyboardInterrupt) as error:
        said = error if isinstance(error, GpusnapError) else Interrupted("it was interrupted")
        plain_http = " --plain-http" if wish.plain_http or wish.to.plain_http else ""
        raise type(said)(
            f"the checkpoint is in {made.store} as {made.name}, and was not pushed: {said}",
            hint=f"gpusnap push {made.name} {wish.to.reference}{plain_http} goes on",
        ) from error
    return Made(
        found,
        time.monotonic() - began,
        made.gpu_memory,
        made.size,
        made.new,
        made.name,
        made.digest,
        made.store,
        pushed=pushed,
    )


def _to_store(wish: Wish, found: podman.Container, progress: Progress, began: float) -> Made:
    store = wish.to.store if isinstance(wish.to, where.InStore) else where.default_store()
    with told():
        name = _name(wish, found)
        store.create()
        with store.stage() as staging:
            before, blobs = kept.roots(store), _blobs(store)
            archive = os.path.join(staging.path, _ARCHIVE)
            progress.stage(f"checkpoint of {found.name}")
            tick = progress.watching(grown(os.path.dirname(staging.path)))
            with orders.ordered(found.id, pages="store", store=store.path):
                _run(wish, found, archive, ["--compress", "none"], tick)
            with _nothing_lost(wish, found, store, before):
                progress.stage("records")
                root = _taken_in(staging, archive, progress)
                progress.stage("to disk")
                staging.commit(root, names=[name])
                whole = kept.load(root, store.layout)
                kept.forget_pages(store, whole.artifact.config, before)
    parts = {each.digest: each.size for each in (*whole.artifact.blobs(), *whole.artifact.documents)}
    return Made(
        container=found,
        seconds=time.monotonic() - began,
        gpu_memory=whole.gpu_memory,
        size=sum(parts.values()),
        new=sum(size for digest, size in parts.items() if digest.partition(":")[2] not in blobs),
        name=name,
        digest=root.digest,
        store=store.path,
    )


def _taken_in(staging: Staging, archive: str, progress: Progress) -> Descriptor:
    """The archive as an artifact in the staging; the chunks are in the store already."""
    taken = convert.take_in(archive, staging.layout, known=staging.take, progress=progress.chunks)
    os.unlink(archive)
    moving.take_chunks(staging, taken.chunks)
    return artifact.write(
        staging.layout,
        artifact.Artifact(taken.config, taken.records, taken.rootfs, taken.chunks, taken.annotations),
    )


def _to_file(wish: Wish, found: podman.Container, path: str, progress: Progress, began: float) -> Made:
    path = os.path.abspath(path)
    folder, name = os.path.split(path)
    if not os.path.isdir(folder):
        raise GpusnapError(f"{path} cannot be written: {folder} is no folder")
    beside = os.path.join(folder, f".{name[:200]}.{secrets.token_hex(4)}")
    progress.stage(f"checkpoint of {found.name}")
    tick = progress.watching(lambda: _size(beside))
    try:
        with orders.ordered(found.id, pages="chunks"):
            _run(wish, found, beside, ["--compress", _compression(path)], tick)
        with _nothing_lost(wish, found, None, set()), _writing(path):
            _put(beside, path)
    finally:
        with suppress(OSError):
            os.unlink(beside)
    return Made(
        found, time.monotonic() - began, _gpu_memory(found), size=_size(path), new=_size(path), file=path
    )


def _run(wish: Wish, found: podman.Container, archive: str, options: list[str], tick: Tick) -> None:
    """Have Podman do it; an error says where the container is."""
    try:
        podman.checkpoint(found.id, archive, [*options, *wish.options()], tick=tick)
    except GpusnapError as error:
        if _runs(found):
            raise
        raise _with_hint(error, found, wish) from error


def _runs(found: podman.Container) -> bool:
    """Whether it does still; also where Podman cannot say."""
    with suppress(GpusnapError):
        return podman.container(found.id).status == "running"
    return True


@contextmanager
def _nothing_lost(
    wish: Wish, found: podman.Container, store: Store | None, before: set[str]
) -> Iterator[None]:
    """What goes wrong from here on costs no container: say how it comes back."""
    try:
        yield
    except (GpusnapError, OciError, OSError, KeyboardInterrupt) as error:
        if isinstance(error, OciError):
            said = failure(error)
        elif isinstance(error, GpusnapError):
            said = error
        elif isinstance(error, OSError):
            said = ImageError(f"{error.filename or 'a file'} cannot be used: {reason(error)}")
        else:
            said = Interrupted("the checkpoint was interrupted before it was kept")
        if wish.leave_running:
            if store is not None:
                with suppress(OciError):
                    kept.forget_pages(store, None, before)
            raise said from error
        raise _with_hint(said, found, wish) from error


def _with_hint(error: GpusnapError, found: podman.Container, wish: Wish) -> GpusnapError:
    environment = ""
    if isinstance(wish.to, where.InStore):
        environment = f"GPUSNAP_STORE={wish.to.store.path} "
    return type(error)(
        f"{error}; nothing is lost: Podman has the checkpoint of {found.name} in its storage",
        hint=f"{environment}podman container restore {found.name} brings it back",
    )


def _name(wish: Wish, found: podman.Container) -> str:
    """What it is called in the store. Raises StoreError."""
    given = wish.name
    if not given and isinstance(wish.to, where.InStore):
        given = wish.to.wanted
    if given:
        return check_name(given)
    if isinstance(wish.to, where.InRegistry):
        return moving.store_name(wish.to.reference)
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    plain = re.sub(r"[^A-Za-z0-9._-]|(?<=[._-])[._-]+", "", found.name).strip("._-")
    return check_name(f"{plain or found.id[:12]}:{now}")


def _compression(path: str) -> str:
    endings = sorted(_COMPRESSION, key=len, reverse=True)
    return next((_COMPRESSION[each] for each in endings if path.endswith(each)), "zstd")


def _put(beside: str, path: str) -> None:
    """Make the archive durable, and give it its name."""
    with open(beside, "rb") as file:
        os.fsync(file.fileno())
    os.replace(beside, path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ImageError(f"{path} cannot be written: {reason(error)}") from error


def _blobs(store: Store) -> set[str]:
    try:
        return set(os.listdir(os.path.join(store.path, "blobs", "sha256")))
    except OSError:
        return set()


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _gpu_memory(found: podman.Container) -> int:
    """By the manifest that Podman keeps; 0 where there is none."""
    with suppress(GpusnapError):
        path = podman.container(found.id).checkpoint_path
        if path and manifest.belongs(path):
            return sum(gpu.memory_used for gpu in manifest.read(path).gpus)
    return 0
