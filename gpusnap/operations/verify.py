"""Checks a checkpoint in any place against its digests, and names the part that a damaged blob belongs to."""

from __future__ import annotations

import io
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING

from gpusnap.base.user_errors import convert_errors
from gpusnap.checkpoints.artifact import hold
from gpusnap.checkpoints.damage import (
    Progress,
    VerifyResult,
    config_of,
    describe_damage,
    map_artifact_blobs,
    map_blobs,
    tables_of,
)
from gpusnap.checkpoints.formats.criu_images import records_fault
from gpusnap.checkpoints.formats.layout_archive import opened_layout, refuse_containerd
from gpusnap.checkpoints.list import NamedDigest, list_named
from gpusnap.checkpoints.locator import InFile, InRegistry, InStore, find, open_store
from gpusnap.checkpoints.offline import find_offline_copy
from gpusnap.oci.base.dataclass import replace
from gpusnap.oci.base.errors import (
    BlobError,
    DigestError,
    LayoutError,
    NotACheckpoint,
    NotInRegistry,
    OciError,
    RegistryError,
)
from gpusnap.oci.base.files import write_all
from gpusnap.oci.base.threads import run_for_each
from gpusnap.oci.chunks import artifact as artifacts
from gpusnap.oci.chunks.artifact import Artifact
from gpusnap.oci.chunks.table import Table
from gpusnap.oci.chunks.verify import CheckProgress, Contents, Fault, verify
from gpusnap.oci.layout.archive import is_layout
from gpusnap.oci.layout.digests import digest_of, get_hex
from gpusnap.oci.layout.documents import INDEX, Descriptor, Index, encode_document
from gpusnap.oci.layout.graph import children, is_document
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.store import Store
from gpusnap.operations.open import manifests, open_repository
from gpusnap.operations.verify_files import in_archive, in_folder
from gpusnap.runtime_shim.process.memory.copy import cores
from gpusnap.runtime_shim.records import manifest
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.runtime.criu import scratch_files

if TYPE_CHECKING:
    from gpusnap.oci.registry.repository import Repository

_CONNECTIONS = 8


def verify_one(
    word: str, *, deep: bool = False, plain_http: bool = False, progress: Progress = lambda done, whole: None
) -> VerifyResult:
    """Check the checkpoint that a word refers to. deep: if it is in a registry, read all blobs.

    Raises NotFound, UsageError, Damaged if nothing of it can be read, GpusnapError.
    """
    place = find(word)
    with convert_errors():
        match place:
            case InStore():
                return _verify_kept(word, place, progress)
            case InRegistry():
                try:
                    with open_repository(place, plain_http=plain_http) as repository:
                        return _in_registry(word, repository, place, deep, progress)
                except RegistryError as error:
                    copy = find_offline_copy(place, error)
                    if copy is None:
                        raise
                    return _verify_kept(f"oci:{copy.store.path}:{copy.wanted}", copy, progress)
            case InFile(path) if is_layout(path):
                with opened_layout(path) as found:
                    refuse_containerd(found)
                    return _in_layout(word, found.layout, found.root, progress)
            case InFile(path):
                return (in_folder if os.path.isdir(path) else in_archive)(path, progress)


def _verify_kept(word: str, place: InStore, progress: Progress) -> VerifyResult:
    store = open_store(place.store)
    found = place.entry().descriptor
    with ExitStack() as stack:
        hold(store, found.digest, stack)
        return _in_layout(word, store.layout, found, progress)


def verify_all(store: Store, progress: Progress = lambda done, whole: None) -> VerifyResult:
    """Check everything that has a name in a store, each blob once. Raises Damaged for a broken index."""
    places: dict[str, list[str]] = defaultdict(list)
    with convert_errors():
        found = list_named(open_store(store))
        tables = (table for each in found for table in tables_of(each.root, store.layout))
        layout, index = _join_all(store, found)
        checked, faults = _check_all(layout, index, tables, progress)
        faults = _select_still_named(store, found, faults)
        for each in found if not faults else ():
            faults += _check_images(each.root, store.layout)
        faults = _select_still_named(store, found, faults)
        for each in found if faults else ():
            name = each.names[0] if each.names else each.root.digest[:19]
            for digest, where in map_blobs(each.root, store.layout).items():
                places[digest] += [f"{name}: {one}" for one in where]
    faulty = tuple(describe_damage(fault, places) for fault in faults)
    note = "" if found else f"{store.path} contains no checkpoint"
    blobs, size = checked.blobs - 1, checked.size - index.size  # the index exists only here
    return VerifyResult(f"oci:{store.path}", "", blobs, size, True, faulty, note)


def _select_still_named(
    store: Store, found: Sequence[NamedDigest], faults: tuple[Fault, ...]
) -> tuple[Fault, ...]:
    """Return the faults of checkpoints that still have a name: gc may have removed blobs of the others.

    Holding each of them would need as many open files.
    """
    if not faults:
        return ()
    waiting = [each.root for each in list_named(store)]
    if {each.digest for each in waiting} >= {each.root.digest for each in found}:
        return faults
    met = {each.digest for each in waiting}
    for at in waiting:
        with suppress(LayoutError, DigestError):
            for each in children(at, store.read(at)):
                if each.digest not in met:
                    met.add(each.digest)
                    waiting.extend([each] if is_document(each) else [])
    return tuple(fault for fault in faults if fault.descriptor.digest in met)


class _Joined(Layout):
    """A layout and one more document: an index of everything to check."""

    def __init__(self, path: str, index: bytes) -> None:
        super().__init__(path)
        self._digest, self._index = digest_of(index), index

    def open_blob(self, digest: str, size: int | None = None) -> io.FileIO:
        """Do the same as Layout.open_blob, but for the index: a file in RAM, which ends with this process."""
        if digest != self._digest:
            return super().open_blob(digest, size)
        file = io.FileIO(os.memfd_create("gpusnap-index"), "r+b")
        try:
            write_all(file.fileno(), self._index)
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file


def _join_all(store: Store, found: Sequence[NamedDigest]) -> tuple[Layout, Descriptor]:
    plain = tuple(replace(each.root, annotations={}) for each in found)
    index = encode_document(Index(plain).to_json())
    return _Joined(store.path, index), Descriptor(INDEX, digest_of(index), len(index))


def _check_all(
    layout: Layout, root: Descriptor, tables: Iterable[Table], progress: Progress
) -> tuple[CheckProgress, tuple[Fault, ...]]:
    last = CheckProgress(0, 0, 0, 0)

    def tell(now: CheckProgress) -> None:
        nonlocal last
        last = now
        progress(now.size, now.total_size)

    faults = verify(layout, root, threads=cores(), tables=tables, progress=tell)
    return last, faults


def _in_layout(word: str, layout: Layout, root: Descriptor, progress: Progress) -> VerifyResult:
    checked, faults = _check_all(layout, root, tables_of(root, layout), progress)
    faults = faults or _check_images(root, layout)
    places = map_blobs(root, layout) if faults else {}
    faulty = tuple(describe_damage(fault, places) for fault in faults)
    return VerifyResult(word, root.digest, checked.blobs, checked.size, True, faulty)


def _check_images(root: Descriptor, layout: Layout) -> tuple[Fault, ...]:
    """Check the records of an artifact with correct blobs: would a restore refuse an image in them?"""
    try:
        artifact = artifacts.read(root, layout.read_blob)
    except (NotACheckpoint, DigestError):
        return ()  # another tool's artifact
    except LayoutError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return ()  # removed meanwhile; other missing blobs have been reported
        return (Fault(root, str(error)),)
    fault = records_fault(artifact, config_of(artifact, layout), layout)
    return (Fault(artifact.records, fault),) if fault and artifact.records is not None else ()


# In a registry


def _in_registry(
    word: str, repository: Repository, place: InRegistry, deep: bool, progress: Progress
) -> VerifyResult:
    root, read = manifests(repository, place.reference.wanted)
    faults: list[Fault] = []
    blobs: dict[str, Descriptor] = {}

    waiting, met = [root], {root.digest}
    for at in waiting:
        try:
            below = children(at, read(at))
        except (LayoutError, DigestError, NotInRegistry) as error:
            faults.append(Fault(at, f"cannot be read: {error}"))
            continue
        for each in below:
            if each.digest not in met:
                met.add(each.digest)
                waiting.extend([each] if is_document(each) else [])
                blobs |= {} if is_document(each) else {each.digest: each}
    with (
        tempfile.TemporaryDirectory(
            prefix=scratch_files.prefix("verify"), dir=scratch_files.find_large()
        ) as folder,
        closing(Layout(folder).create()) as layout,
    ):
        contents = Contents(_remote_tables(root, read, repository, layout) if deep else ())
        faults += _ask_registry(
            repository, tuple(blobs.values()), layout if deep else None, contents, progress
        )
        places = _map_remote_blobs(root, read, repository, layout) if faults else {}
    faulty = tuple(describe_damage(fault, places) for fault in faults)
    named = [*waiting, *blobs.values()]
    return VerifyResult(word, root.digest, len(named), sum(each.size for each in named), deep, faulty)


def _ask_registry(
    repository: Repository,
    blobs: Sequence[Descriptor],
    layout: Layout | None,
    contents: Contents,
    progress: Progress,
) -> list[Fault]:
    """Ask the registry about each blob, or read it into `layout` if given. Raises RegistryError."""
    faults: list[Fault] = []
    lock, whole = threading.Lock(), sum(each.size for each in blobs)
    done = 0

    def check(blob: Descriptor) -> None:
        nonlocal done
        fault = ""
        if not repository.has_blob(blob.digest, blob.size):
            fault = "missing"
        elif layout is not None:
            try:
                repository.fetch_blob(blob, layout)
                fault = contents.fault(layout, blob)
                os.unlink(os.path.join(layout.path, "blobs", "sha256", get_hex(blob.digest)))
            except BlobError as error:
                fault = str(error)
        with lock:
            done += blob.size
            if fault:
                faults.append(Fault(blob, fault))
            progress(done, whole)

    threads = max(1, min(_CONNECTIONS, len(blobs)))
    run_for_each(blobs, check, threads=threads, ending=repository.interrupt)
    return sorted(faults, key=lambda fault: fault.descriptor.digest)


def _remote_tables(
    root: Descriptor, read: Callable[[Descriptor], bytes], repository: Repository, layout: Layout
) -> tuple[Table, ...]:
    with suppress(OciError):
        artifact = artifacts.read(root, read)
        record = _remote_config(artifact, repository, layout)
        return tuple(record.tables) if record is not None else ()
    return ()


def _map_remote_blobs(
    root: Descriptor, read: Callable[[Descriptor], bytes], repository: Repository, layout: Layout
) -> dict[str, list[str]]:
    try:
        artifact = artifacts.read(root, read)
    except OciError:
        return {}
    return map_artifact_blobs(artifact, _remote_config(artifact, repository, layout))


def _remote_config(artifact: Artifact, repository: Repository, layout: Layout) -> Manifest | None:
    if artifact.config.size <= manifest.LARGEST:
        with suppress(OciError):
            repository.fetch_blob(artifact.config, layout)
    return config_of(artifact, layout)
