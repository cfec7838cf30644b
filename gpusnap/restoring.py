"""`gpusnap restore`: a container again, from a store, a registry, or an archive.

Podman gets a small archive of the records; gpusnap-runtime finds the memory in the store, and fetches what
that lacks from the registry while CRIU restores.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass

from gpusnap import kept, moving, podman, where
from gpusnap.archives import entries
from gpusnap.containerd_archive import is_layout
from gpusnap.damage import within_artifact
from gpusnap.failures import Damaged, told
from gpusnap.kept import Kept
from gpusnap.members import ARCHIVE, FIRST, LARGEST_DUMP
from gpusnap.progress import Progress, grown
from gpusnap.stand_in import stand_in
from gpusnap.verifying_files import in_archive
from oci.archive import read_member
from oci.errors import ArchiveError, BlobError, DiskError, OciError, RegistryError, StoreError
from oci.image import CRIU
from oci.json_text import parse_json
from oci.store import Staging, Store
from runtime_shim import fetching
from runtime_shim import settings as settings_file
from runtime_shim.choosing import GPU_MAP
from runtime_shim.errors import GpusnapError, Interrupted, Refused, UsageError

__all__ = ["Restored", "Wish", "restore"]

# Podman gives a restore 240 s (libpod, define.ContainerCreateTimeout): what may not come in that time is
# fetched before it begins, and need not be fetched again when it fails.
_ON_THE_WAY = 8 << 30
_SECONDS = 120.0
_DIGEST = re.compile("sha256:[0-9a-f]{64}")
# What went wrong with something that came out of an archive: Podman's unpacking, a blob, an image.
_OF_ITS_CONTENT = re.compile(r"^Podman failed: |sha256:|/checkpoint/|\.img\b")
# Of a container (libpod, define.NameRegex).
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What shall be restored, and how."""

    what: where.Place
    name: str = ""
    gpu_map: str = ""
    tcp_established: bool = False
    tcp_close: bool = False
    ignore_static_ip: bool = False
    ignore_rootfs: bool = False
    plain_http: bool = False

    def options(self) -> list[str]:
        """For Podman."""
        chosen = {
            "--tcp-established": self.tcp_established,
            "--tcp-close": self.tcp_close,
            "--ignore-static-ip": self.ignore_static_ip,
            "--ignore-rootfs": self.ignore_rootfs,
        }
        words = [option for option, wanted in chosen.items() if wanted]
        return [*words, "--name", self.name] if self.name else words


@dataclass(frozen=True, slots=True)
class Restored:
    """A container that runs again."""

    container: podman.Container
    seconds: float
    digest: str = ""
    """Of the checkpoint, where it was an artifact."""
    kept: str = ""
    """The name under which the store has it now, where it came from a registry."""


def restore(wish: Wish, progress: Progress) -> Restored:
    """Have it run again. Raises NotFound, Damaged, Interrupted, GpusnapError."""
    began = time.monotonic()
    digest = name = ""
    settings_file.usable()  # gpusnap-runtime would refuse, and Podman not always show why
    with told():
        match wish.what:
            case where.InFile(path):
                found = _from_file(wish, path, progress)
            case where.InStore():
                found, digest = _from_store(wish, wish.what, progress)
            case where.InRegistry():
                try:
                    found, digest, name = _from_registry(wish, wish.what, progress)
                except RegistryError as error:  # before Podman was asked: what its runtime says is another
                    copy = stand_in(wish.what, error)
                    if copy is None:
                        raise
                    found, digest = _from_store(wish, copy, progress)
    return Restored(podman.container(found), time.monotonic() - began, digest, name)


def _from_file(wish: Wish, path: str, progress: Progress) -> str:
    if os.path.isdir(path):
        raise UsageError(
            f"{path} is a folder, and Podman restores archives",
            hint="a store is named oci:DIR:NAME; a folder of images is restored by gpusnap-runtime restore",
        )
    if is_layout(path):
        raise Refused(
            f"{path} is an image layout, such as containerd exports, which Podman cannot restore",
            hint="ctr images import --no-unpack takes it, and ctr container restore --live restores it",
        )
    _check_dumps(path)
    try:
        return _run(wish, path, {}, progress, lambda: _name_in(path))
    except GpusnapError as error:
        if not isinstance(error, Interrupted) and _OF_ITS_CONTENT.search(str(error)):
            _check_archive(path, error, progress)
        raise


def _check_dumps(path: str) -> None:
    """Raise ArchiveError where one of the engine's records is no file: Podman waits for ever at a FIFO.

    They come first in an archive, so little of it is read.
    """
    wanted = set(FIRST)
    with closing(entries(path)) as found:
        for entry in found:
            if entry.name in wanted and entry.content is None:
                raise ArchiveError(f"{path} is no checkpoint of a container: its {entry.name} is no file")
            wanted.discard(entry.name)
            if not wanted:
                return


def _check_archive(path: str, error: GpusnapError, progress: Progress) -> None:
    """Raise Damaged where the archive is wrong: Podman, and what it runs, name their copies of its parts."""
    progress.stage(f"looking for damage in {path}")
    try:
        found = in_archive(path, lambda done, whole: None).damaged
    except (GpusnapError, OciError, OSError):
        return
    if found:
        first = found[0]
        what = f"the blob {first.digest}: {first.what}" if first.digest else first.what
        raise Damaged(
            f"the archive {path} is damaged: {what}",
            hint="take another copy of it; gpusnap verify names all that is damaged",
        ) from error


def _from_store(wish: Wish, place: where.InStore, progress: Progress) -> tuple[str, str]:
    with kept.held(place) as (store, found):
        found.check_podman()
        with _room(store) as folder:
            archive = os.path.join(folder, ARCHIVE)
            progress.stage("records")
            moving.write_archive(found, store.layout, archive, embed=False, progress=progress)
            environment = {fetching.STORE: store.path}
            try:
                container = _run(wish, archive, environment, progress, lambda: _name_of(found))
            except GpusnapError as error:
                if (damaged := _of_damage(error, found, store)) is not None:
                    raise damaged from error
                raise
            return container, found.root.digest


def _from_registry(wish: Wish, place: where.InRegistry, progress: Progress) -> tuple[str, str, str]:
    store, name = where.default_store(), moving.store_name(place.reference)
    pull_from = where.InRegistry(place.reference, place.plain_http or wish.plain_http).repository
    coming = moving.fetched(
        store,
        place,
        leave=_ON_THE_WAY,
        seconds=_SECONDS,
        check=Kept.check_podman,
        plain_http=wish.plain_http,
        progress=progress,
    )
    with coming as (staging, found, _), _room(store) as folder, ExitStack() as stack:
        before = kept.roots(store)
        archive = os.path.join(folder, ARCHIVE)
        progress.stage("records")
        moving.write_archive(found, staging.layout, archive, embed=False, progress=progress)
        whole = _keep(store, staging, found, name, before)
        if whole:
            kept.hold(store, found.root.digest, stack)
            staging.close()  # others who want the same need not wait
        environment = {fetching.STORE: store.path, fetching.PULL_FROM: pull_from}
        fetched = grown(os.path.dirname(staging.path))
        container = _run(wish, archive, environment, progress, lambda: _name_of(found), fetched)
        whole = whole or _keep(store, staging, found, name, before)
    return container, found.root.digest, name if whole else ""


def _keep(store: Store, staging: Staging, found: Kept, name: str, before: set[str]) -> bool:
    """Name in the store what is all there by now; whether it is. Nothing else depends on it."""
    with suppress(OciError):
        moving.take_chunks(staging, found.artifact.chunks)
        staging.commit(found.root, names=[name], foreign=found.tables)
        kept.forget_pages(store, found.artifact.config, before)
        return True
    return False


def _run(
    wish: Wish,
    archive: str,
    environment: Mapping[str, str],
    progress: Progress,
    name: Callable[[], str],
    measure: Callable[[], int] = lambda: 0,
) -> str:
    """Have Podman do it; where that fails, no container is left. `name`: of the one in the checkpoint."""
    progress.stage("restore")
    chosen = {GPU_MAP: wish.gpu_map} if wish.gpu_map else {}
    before = podman.ids()
    try:
        return podman.restore(
            archive, wish.options(), {**environment, **chosen}, tick=progress.watching(measure)
        )
    except GpusnapError as error:
        wanted = ""
        with suppress(GpusnapError, OciError):
            wanted = wish.name or name()
            _remove_new(wanted, before)
        if _NAME.fullmatch(wanted) and "already in use" in str(error):
            raise GpusnapError(
                f"Podman has a container {wanted} already",
                hint=f"remove it with podman rm {wanted}, or give another name with --name",
            ) from error
        raise


def _of_damage(error: GpusnapError, found: Kept, store: Store) -> Damaged | None:
    """The same error, where it names a chunk that the store lacks, or has wrong: who read it was a child."""
    named = set(_DIGEST.findall(str(error)))
    for each in found.artifact.chunks:
        if each.digest in named:
            try:
                store.layout.check_blob(each)
            except BlobError:
                place = within_artifact(found.artifact, found.record)[each.digest][0]
                return Damaged(
                    f"{error}; that is of {place}", hint="gpusnap verify finds all that is damaged"
                )
    return None


def _remove_new(name: str, before: set[str]) -> None:
    """Remove what Podman leaves of an import that failed: a container that never ran, and its files."""
    left = podman.container(name) if name else None
    if left is not None and left.id not in before and left.status != "running":
        podman.remove(left.id)


def _name_of(found: Kept) -> str:
    return found.artifact.annotations.get(f"{CRIU}container.name", "")


def _name_in(path: str) -> str:
    """The name that an archive's container had; "" where it does not say."""
    try:
        value = parse_json(read_member(path, FIRST[0], limit=LARGEST_DUMP) or b"{}")
        return str(value["name"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


@contextmanager
def _room(store: Store) -> Iterator[str]:
    """A folder for a file that others must not read: in the store, or where that cannot be written to."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(store.stage()).path
        except (DiskError, StoreError):  # of another tool's, on a disk that is read-only, no lock can be had
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpusnap-", dir="/var/tmp"))
        yield folder
