"""Opens a checkpoint for reading: an archive, a directory of images, a store, or a registry.

From a registry, only the manifests and the config are read. Anything else is fetched on demand, into a
temporary directory.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from gpusnap.base.user_errors import NoManifest, convert_errors
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints.artifact import hold
from gpusnap.checkpoints.formats.engine_images import archive_of, blob_path
from gpusnap.checkpoints.formats.entries import read_member
from gpusnap.checkpoints.formats.layout_archive import opened_layout, refuse_containerd
from gpusnap.checkpoints.formats.names import CONFIG, PIECE
from gpusnap.checkpoints.locator import InFile, InRegistry, InStore, find, open_store
from gpusnap.checkpoints.offline import find_offline_copy
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import ArchiveError, EngineImage, NotAnArchive, RegistryError
from gpusnap.oci.chunks import artifact as artifacts
from gpusnap.oci.chunks.artifact import Artifact
from gpusnap.oci.layout.archive import is_layout
from gpusnap.oci.layout.blobs import Blobs
from gpusnap.oci.layout.documents import EMPTY, Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import ManifestError
from gpusnap.runtime_shim.records import manifest, manifest_file, manifest_json

if TYPE_CHECKING:
    from gpusnap.oci.registry.repository import Repository


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint that is an artifact."""

    root: Descriptor
    artifact: Artifact
    where: str
    """The folder of its store, the file of its layout, or its repository."""
    names: tuple[str, ...]
    blobs: Blobs
    """The blobs, for reading."""
    store: Store | None
    """None if it is in no store."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in any place; messages call it by the word that the user gave."""

    word: str
    manifest: manifest.Manifest | None
    """None for a container without GPU state."""
    stored: StoredCheckpoint | None = None
    path: str = ""
    """The path of an archive or a directory; empty for an artifact."""


@contextmanager
def open_checkpoint(word: str, *, plain_http: bool = False) -> Iterator[Checkpoint]:
    """Open the checkpoint that a word refers to; in a store, gc keeps it until the block ends.

    If a registry does not answer, opens the copy in this host's store, with a note on stderr.

    Raises NotFound, UsageError, Damaged, ManifestError, GpusnapError.
    """
    place = find(word)
    with ExitStack() as stack:
        stack.enter_context(convert_errors())
        match place:
            case InStore():
                yield _in_store(word, place, stack)
            case InRegistry():
                try:
                    found = _in_registry(word, place, stack, plain_http=plain_http)
                except RegistryError as error:
                    copy = find_offline_copy(place, error)
                    if copy is None:
                        raise
                    found = _in_store(word, copy, stack)
                yield found
            case InFile(path):
                if is_layout(path):
                    yield _in_layout(word, path, stack)
                else:
                    yield Checkpoint(word, _in_file(path), path=path)


def get_manifest(checkpoint: Checkpoint) -> manifest.Manifest:
    """Return its manifest. Raises NoManifest, and ManifestError for an incomplete directory."""
    if checkpoint.manifest is not None:
        return checkpoint.manifest
    if checkpoint.stored is not None:
        raise NoManifest(
            f"{checkpoint.word} is the checkpoint of a container without GPU state",
            hint="gpusnap inspect shows its contents",
        )
    if os.path.isdir(checkpoint.path):
        return load_manifest(checkpoint.path)
    raise _no_manifest(checkpoint.path)


def load_manifest(path: str) -> manifest.Manifest:
    """Return the manifest of an archive or a directory.

    Raises NoManifest if an archive has none, ManifestError if it is broken or a directory has none;
    NotAnArchive.
    """
    if os.path.isdir(path):
        return manifest_file.read(_images(path))
    try:
        data = read_member(path, CONFIG, limit=manifest.LARGEST)
    except NotAnArchive:
        raise
    except ArchiveError as error:
        raise ManifestError(str(error)) from error
    if data is None:
        raise _no_manifest(path)
    return manifest_json.decode(data, f"{path}: {CONFIG}")


@contextmanager
def open_repository(
    place: InRegistry, *, plain_http: bool = False, mirrors: bool = True
) -> Iterator[Repository]:
    """Open a reference's repository, see gpusnap.oci.registry.find. Raises RegistryError, SettingsError."""
    from gpusnap.oci.registry import find as registries

    limits = settings_file.load().registry.limits
    plain_http = plain_http or place.plain_http
    found = registries.repository(place.reference, plain_http=plain_http, mirrors=mirrors, limits=limits)
    with found as repository:
        yield repository


def _images(path: str) -> str:
    """Return the directory of images: `path` itself, or the one in an unpacked archive at `path`."""
    inner = os.path.join(path, "checkpoint")
    return inner if not manifest_file.is_ours(path) and manifest_file.is_ours(inner) else path


def _in_file(path: str) -> manifest.Manifest | None:
    if os.path.isdir(path) and not manifest_file.is_ours(_images(path)):
        return None
    try:
        return load_manifest(path)
    except NoManifest:
        return None


def _no_manifest(path: str) -> NoManifest:
    return NoManifest(
        f"{path} holds no {CONFIG}",
        hint="it is the checkpoint of a container without a GPU, was not made by gpusnap, or is truncated",
    )


def _in_store(word: str, place: InStore, stack: ExitStack) -> Checkpoint:
    store = open_store(place.store)
    root = place.entry().descriptor
    hold(store, root.digest, stack)
    same = [entry.name for entry in store.entries() if entry.descriptor.digest == root.digest]
    names = tuple(sorted(name for name in same if name))
    try:
        found = kept.load(root, store.layout)
    except EngineImage:
        layer = archive_of(root, store.read)
        return _in_image(word, blob_path(store.layout, layer.digest))
    return Checkpoint(
        word,
        found.record,
        StoredCheckpoint(found.root, found.artifact, store.path, names, store.layout, store),
    )


def _in_layout(word: str, path: str, stack: ExitStack) -> Checkpoint:
    """Open a checkpoint in an image layout in a file."""
    place = stack.enter_context(opened_layout(path))
    refuse_containerd(place)
    if place.kind == "image":
        layer = archive_of(place.root, place.layout.read_blob)
        with place.layout.open_blob(layer.digest, layer.size) as file:
            copy = _make_temporary(stack)
            with copy.receive(layer) as incoming:
                while piece := file.read(PIECE):
                    incoming.write(piece)
        return _in_image(word, blob_path(copy, layer.digest))
    found = kept.load(place.root, place.layout)
    return Checkpoint(
        word, found.record, StoredCheckpoint(place.root, found.artifact, path, (), place.layout, store=None)
    )


def _in_image(word: str, path: str) -> Checkpoint:
    """Open a checkpoint in the layer of an ordinary image, which is one of Podman's archives."""
    return Checkpoint(word, _in_file(path), path=path)


def _make_temporary(stack: ExitStack) -> Layout:
    from gpusnap.runtime_shim.runtime.criu import scratch_files

    folder = tempfile.TemporaryDirectory(
        prefix=scratch_files.prefix("layout"), dir=scratch_files.find_large()
    )
    return stack.enter_context(closing(Layout(stack.enter_context(folder)).create()))


def _in_registry(word: str, place: InRegistry, stack: ExitStack, *, plain_http: bool) -> Checkpoint:
    repository = stack.enter_context(open_repository(place, plain_http=plain_http))
    wanted = place.reference.wanted
    root, read = manifests(repository, wanted)
    layout = _make_temporary(stack)
    try:
        config = artifacts.read(root, read).config
    except EngineImage:
        layer = archive_of(root, read)
        repository.fetch_blob(layer, layout)
        return _in_image(word, blob_path(layout, layer.digest))
    if config.media_type != EMPTY and config.size <= manifest.LARGEST:
        repository.fetch_blob(config, layout)
    found = kept.load(root, layout, read)
    names = (f"{place.reference.name}:{place.reference.tag}",) if place.reference.tag else ()
    blobs = _Remote(repository, layout)
    return Checkpoint(
        word,
        found.record,
        StoredCheckpoint(root, found.artifact, place.reference.name, names, blobs, store=None),
    )


def manifests(repository: Repository, wanted: str) -> tuple[Descriptor, Callable[[Descriptor], bytes]]:
    """Return the descriptor of a tag or digest, and a function that reads manifests below it, each once."""
    root, content = repository.read_manifest(wanted)
    documents = {root.digest: content}

    def read(document: Descriptor) -> bytes:
        if document.digest not in documents:
            documents[document.digest] = repository.read_manifest(document.digest)[1]
        return documents[document.digest]

    return root, read


class _Remote:
    """`gpusnap.oci.layout.blobs.Blobs` of a repository: fetches and checks each blob at its first use."""

    def __init__(self, repository: Repository, layout: Layout) -> None:
        self._repository, self._layout = repository, layout

    def open_blob(self, digest: str, size: int | None = None) -> io.FileIO:
        if size is not None and not self._layout.has_blob(digest, size):
            wanted = Descriptor("application/octet-stream", digest, size)
            self._repository.fetch_blob(wanted, self._layout)
        return self._layout.open_blob(digest, size)

    def check_blob(self, wanted: Descriptor) -> None:
        with self.open_blob(wanted.digest, wanted.size):
            self._layout.check_blob(wanted)
