"""A restore with Podman: what it is restored from, and the container once it runs.

Podman gets a small archive of the records; gpusnap-runtime finds the memory in the store, and fetches missing
chunks from the registry while CRIU restores.

A restore from this host's store is the one whose user waits for each module. What only the other ways and the
explanations of failures need is imported there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

from gpusnap.base.progress import Progress, board, watch_growth
from gpusnap.base.user_errors import Damaged, Killed
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints import locator, migrations
from gpusnap.checkpoints.artifact import ArtifactParts
from gpusnap.checkpoints.formats.annotations import CONTAINER_ID, CREATED
from gpusnap.checkpoints.formats.engine_images import archive_of, blob_path
from gpusnap.checkpoints.formats.entries import entries
from gpusnap.checkpoints.formats.names import ARCHIVE, PIECE
from gpusnap.checkpoints.formats.podman import give_out
from gpusnap.checkpoints.names import store_name
from gpusnap.container_hooks import pairs
from gpusnap.engines import podman, podman_objects, podman_work
from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.errors import (
    BlobError,
    DiskError,
    EngineImage,
    LayoutError,
    OciError,
    StoreError,
)
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.layout.archive import is_layout
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.staging import Staging
from gpusnap.oci.store.store import Store
from gpusnap.oci.tar.archive import Entry
from gpusnap.operations import lost_volumes
from gpusnap.operations.restoring import in_place, in_use, volumes
from gpusnap.operations.restoring.volumes import PodmanObjects, VolumeChoice, find_objects
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted, Refused, UsageError
from gpusnap.runtime_shim.base.progress import VARIABLE
from gpusnap.runtime_shim.gpu.api.gpu_map import GPU_MAP
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.snapshot.loading import source
from gpusnap.runtime_shim.snapshot.loading.start import LoadProcess

if TYPE_CHECKING:
    from gpusnap.checkpoints.formats.layout_archive import InLayout

# What is fetched while Podman restores: at most so many bytes, which should arrive within so many seconds.
# Podman gives a restore 240 s (libpod, define.ContainerCreateTimeout), and a network may become slower. The
# rest is fetched before, and need not be fetched again if the restore fails.
_MOST_MEANWHILE = 8 << 30
_SECONDS_TO_ARRIVE = 120.0
# Podman rejects its own archive of such a container (libpod, Container.validate):
# checkpoints/formats/podman_writer.py.
_SPLIT = "--cgroup-mode=split"
# Podman's states of a container whose import failed (libpod, define.ContainerStatus).
_NEVER_RAN = ("configured", "created", "initialized")
_DIGEST = compile_later("sha256:[0-9a-f]{64}")
# Errors that concern a part of an archive: Podman's unpacking, a blob, an image.
_OF_ITS_CONTENT = compile_later(r"^Podman failed: |sha256:|/checkpoint/|\.img\b")


@dataclass(frozen=True, slots=True)
class RestoredContainer:
    """A container that Podman has restored."""

    id: str
    name: str
    """As the checkpoint, or whoever wished it, has it; "" if that is not known."""
    annotated: bool
    """It may have a command to be run now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What to restore, and how."""

    what: locator.Place
    name: str = ""
    gpu_map: str = ""
    tcp_established: bool = False
    tcp_close: bool = False
    ignore_static_ip: bool = False
    ignore_static_mac: bool = False
    file_locks: bool = False
    pod: str = ""
    publish: tuple[str, ...] = ()
    ignore_rootfs: bool = False
    ignore_volumes: bool = False
    plain_http: bool = False
    not_migrated: bool = False
    """The caller has checked that the container runs on no host to which it was being migrated."""

    def options(self) -> list[str]:
        """Return the options for Podman."""
        chosen = {
            "--tcp-established": self.tcp_established,
            "--tcp-close": self.tcp_close,
            "--ignore-static-ip": self.ignore_static_ip,
            "--ignore-static-mac": self.ignore_static_mac,
            "--file-locks": self.file_locks,
            "--ignore-rootfs": self.ignore_rootfs,
            "--ignore-volumes": self.ignore_volumes,
        }
        words = [option for option, wanted in chosen.items() if wanted]
        for ports in self.publish:
            words += ["--publish", ports]
        words += ["--pod", self.pod] if self.pod else []
        return [*words, "--name", self.name] if self.name else words


@dataclass(slots=True)
class PodmanRestore:
    """A restore: what was asked for, and how far it has come."""

    request: RestoreRequest
    progress: Progress
    container: RestoredContainer | None = None
    """The container, once it runs: after any later error, it is restored."""
    digest: str = ""
    """The digest of the checkpoint, if it is an artifact or an image."""

    def restore_file(self, path: str) -> RestoredContainer:
        """Restore from Podman's archive, or from an image layout in a file."""
        if os.path.isdir(path):
            raise UsageError(
                f"{path} is a directory, but Podman restores archives",
                hint="write a store as oci:DIR:NAME; gpusnap-runtime restore restores a directory of images",
                code="GPS-102",
            )
        if not is_layout(path):
            return self._restore_archive(path)
        from gpusnap.checkpoints.formats.layout_archive import opened_layout

        with opened_layout(path) as found:
            self.digest = found.root.digest
            return self._restore_layout(path, found)

    def restore_from_store(
        self, place: locator.InStore, asked: podman.Listing | None = None
    ) -> RestoredContainer:
        """Restore from a store; `asked`: Podman's list of containers, if it was already requested."""
        try:
            return self._restore_artifact(place, asked)
        except EngineImage:
            store, root = place.store, place.entry().descriptor
            with ExitStack() as stack:
                kept.hold(store, root.digest, stack)
                layer = archive_of(root, store.read)
                self.progress.stage("records")
                store.layout.check_blob(layer)
                self.digest = root.digest
                return self._restore_archive(blob_path(store.layout, layer.digest))

    def restore_from_registry(self, place: locator.InRegistry) -> tuple[RestoredContainer, str]:
        """Restore from a registry; return the container, and the checkpoint's name in the store, if kept."""
        try:
            return self._pull_and_restore(place)
        except EngineImage as image:
            return self._restore_image(place, image), ""

    def _check_here(self, found: ArtifactParts) -> None:
        """Raise Refused for a checkpoint that is not Podman's, or whose container may run on another host."""
        self.digest = found.root.digest
        if not self.request.not_migrated:
            notes = found.artifact.annotations
            migrations.check_last(notes.get(CONTAINER_ID, ""), notes.get(CREATED, ""))
            migrations.check(self.digest)
        found.check_podman()

    def _restore_layout(self, path: str, found: InLayout) -> RestoredContainer:
        """Restore from an image layout in a file; the store gets nothing of it."""
        if found.kind == "containerd":
            raise Refused(
                f"{path} is an image layout, such as containerd exports, which Podman cannot restore",
                hint="ctr images import --no-unpack imports it, and ctr container restore --live restores it",
                code="GPS-607",
            )
        layout = found.layout
        with _make_folder(locator.default_store()) as folder:
            if found.kind == "image":
                layer = archive_of(found.root, layout.read_blob)
                inner = Layout(os.path.join(folder, "layer")).create()
                self.progress.stage("records")
                with layout.open_blob(layer.digest, layer.size) as file, inner.receive(layer) as incoming:
                    while piece := file.read(PIECE):
                        incoming.write(piece)
                return self._restore_archive(blob_path(inner, layer.digest))
            whole = kept.load(found.root, layout)
            self._check_here(whole)
            archive, choice = self._build_archive(whole, layout, folder, embed=True)
            return self._run(archive, {}, choice)

    def _restore_archive(self, path: str) -> RestoredContainer:
        self.progress.stage(f"looking through {path}")
        found = _check_files(path)
        if found.notifies:
            raise GpusnapError(
                "Podman cannot import a container that reports its state to systemd (--sdnotify=container, "
                "Notify=true): its archive has no directory for the socket",
                hint=f"run gpusnap copy {path} NAME, then gpusnap restore NAME: from a store it can be "
                "restored",
            )
        choice = volumes.choose(found, ignore=self.request.ignore_volumes)
        try:
            return self._run(path, {}, choice)
        except GpusnapError as error:
            if not isinstance(error, Interrupted) and _OF_ITS_CONTENT.search(str(error)):
                _check_archive(path, error, self.progress)
            if _SPLIT in str(error):
                raise GpusnapError(
                    f"Podman cannot import a Quadlet container (--cgroups=split): {error}",
                    hint=f"run gpusnap copy {path} NAME, then gpusnap restore NAME: from a store it can be "
                    "restored",
                ) from error
            raise

    def _restore_artifact(self, place: locator.InStore, asked: podman.Listing | None) -> RestoredContainer:
        # Podman answers while the checkpoint is read.
        with (
            podman.Listing() if asked is None else nullcontext(asked) as listing,
            kept.hold_artifact(place) as (store, found),
        ):
            self._check_here(found)
            memory = settings_file.load().memory
            with (
                LoadProcess(found.record, store.layout.path, memory) as loading,
                _make_folder(store) as folder,
            ):
                archive, choice = self._build_archive(found, store.layout, folder)
                environment = {
                    source.STORE: store.path,
                    source.ARTIFACT: found.root.digest,
                    **loading.environment(),
                }
                try:
                    return self._run(archive, environment, choice, ids=listing.ids)
                except GpusnapError as error:
                    if (damaged := _explain_damage(error, found, store)) is not None:
                        raise damaged from error
                    raise

    def _build_archive(
        self, found: ArtifactParts, layout: Layout, folder: str, *, embed: bool = False
    ) -> tuple[str, VolumeChoice]:
        """Make Podman's archive of the records, or with `embed` of everything, and choose its volumes."""
        archive = os.path.join(folder, ARCHIVE)
        self.progress.stage("archive" if embed else "records")
        inside = volumes.find_in_artifact(found.artifact, layout)
        choice = volumes.choose(inside, ignore=self.request.ignore_volumes)
        give_out(
            found.artifact,
            layout,
            archive,
            config=found.config,
            embed=embed,
            volumes=not choice.ignore or bool(choice.missing),
            progress=self.progress.at,
        )
        return archive, choice

    def _pull_and_restore(self, place: locator.InRegistry) -> tuple[RestoredContainer, str]:
        from gpusnap.operations import pull

        store, name = locator.default_store(), store_name(place.reference)
        pull_from = replace(place, plain_http=place.plain_http or self.request.plain_http).repository
        incoming = pull.fetch(
            store,
            place,
            leave=_MOST_MEANWHILE,
            seconds=_SECONDS_TO_ARRIVE,
            check=self._check_here,
            plain_http=self.request.plain_http,
            progress=self.progress,
        )
        with incoming as (staging, found, _), _make_folder(store) as folder, ExitStack() as stack:
            before = kept.roots(store)
            archive, choice = self._build_archive(found, staging.layout, folder)
            whole = _keep(store, staging, found, name, before)
            if whole:
                kept.hold(store, found.root.digest, stack)
                staging.close()  # others that want the same need not wait
            environment = {source.STORE: store.path, source.PULL_FROM: pull_from}
            if whole:
                environment[source.ARTIFACT] = found.root.digest
            fetched = watch_growth(os.path.dirname(staging.path))
            container = self._run(archive, environment, choice, fetched)
            whole = whole or _keep(store, staging, found, name, before)
        return container, name if whole else ""

    def _restore_image(self, place: locator.InRegistry, image: EngineImage) -> RestoredContainer:
        """Restore from an ordinary image in a registry; the store gets nothing of it."""
        from gpusnap.operations.open import open_repository

        with (
            locator.default_store().create().stage() as staging,
            open_repository(place, plain_http=self.request.plain_http) as repository,
        ):
            root, content = repository.read_manifest(image.manifest)
            layer = archive_of(root, lambda _: content)
            self.progress.stage(f"pull of {place.reference}")
            repository.fetch_blob(layer, staging.layout, step=lambda at: self.progress.at(at, layer.size))
            self.digest = root.digest
            return self._restore_archive(blob_path(staging.layout, layer.digest))

    def _run(
        self,
        archive: str,
        environment: Mapping[str, str],
        choice: VolumeChoice,
        measure: Callable[[], int] = lambda: 0,
        ids: Callable[[], set[str]] = podman.ids,
    ) -> RestoredContainer:
        """Run Podman's restore; if that fails, remove the new container and its new volumes.

        `choice`: what happens to the container's volumes; `ids`: of all containers.
        """
        self.progress.stage("restore")
        name = self.request.name or choice.of.name
        chosen = {GPU_MAP: self.request.gpu_map} if self.request.gpu_map else {}
        wanted = replace(self.request, ignore_volumes=choice.ignore)
        before = ids()
        ended = in_place.find(archive, wanted.options(), before)
        if ended is not None:
            choice, shown_name = volumes.keep_volumes(choice), ended.container.name
        else:
            wanted = replace(wanted, pod=volumes.choose_pod(choice.of, wanted.pod))
            shown_name = name if in_use.is_name(name) else ""

        def restored(container: str) -> None:
            self.container = RestoredContainer(container, shown_name, choice.of.annotated)
            if choice.of.annotated and container != known:
                pairs.note_ahead(container, pairs.CHECKPOINT)

        # A container with another name gets another ID.
        is_known = choice.of.annotated and name == choice.of.name
        known = choice.of.container if is_known and (ended or choice.of.container not in before) else ""
        known = known if podman.RANDOM_ID.fullmatch(known) else ""
        with volumes.report_kept_volumes(choice), self._note_command(known), board() as shown:
            if shown is not None:
                chosen[VARIABLE] = shown.path
            tick = self.progress.follow(shown, "restore", measure)
            variables = {**environment, **chosen}

            def has_begun() -> bool:
                return shown is not None and shown.read() is not None

            run = partial(
                podman_work.restore,
                environment=variables,
                tick=tick,
                say=self.progress.say,
                has_begun=has_begun,
                restored=restored,
            )
            if ended is not None:
                in_place.restore(ended, run)
            else:
                with lost_volumes.make(choice.missing, archive):
                    _import(lambda: run(["--import", archive, *wanted.options()]), name, before)
        assert self.container is not None
        return self.container

    @contextmanager
    def _note_command(self, container: str) -> Iterator[None]:
        """Note that the command after a restore is due, unless the block fails before the container runs.

        `container`: its ID; "" if it has no such command, or no known ID yet.
        """
        earlier = pairs.find(container, pairs.CHECKPOINT)
        noted = bool(container) and pairs.note_ahead(container, pairs.CHECKPOINT)
        try:
            yield
        except Killed:
            raise  # Podman's runtime may complete it
        except BaseException:
            if noted and self.container is None:
                pairs.put_back(container, pairs.CHECKPOINT, earlier)
            raise


def _check_files(path: str) -> PodmanObjects:
    """Check all entries of an archive; return its volumes, pod and name.

    Raises ImageError for a link in place of a file, ArchiveError if not everything can be checked.

    Podman would wait forever at a FIFO, and follow a link out of the folder when it unpacks what is below. It
    reads parts that we do not: after a header that no checkpoint has, or with another compression.
    """
    from gpusnap.checkpoints.formats.criu_images import Links

    links = Links(path)

    def checked() -> Iterator[Entry]:
        for entry in found:
            links.check(entry)
            yield entry

    with closing(entries(path)) as found:
        return find_objects(checked())


def _check_archive(path: str, error: GpusnapError, progress: Progress) -> None:
    """Raise Damaged if the archive is wrong: Podman's errors name temporary copies of its parts."""
    from gpusnap.operations.verify_files import in_archive

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
            hint="use another copy of it; gpusnap verify lists all damage",
        ) from error


def _keep(store: Store, staging: Staging, found: ArtifactParts, name: str, before: set[str]) -> bool:
    """Name the checkpoint in the store if it is complete by now; return whether it is."""
    from gpusnap.operations import sources

    with suppress(OciError):
        sources.take_chunks(staging, found.artifact.chunks)
        pages = kept.pages_of(found, staging.layout, before)
        staging.commit(found.root, names=[name], foreign=found.tables, completes=pages)
        return True
    return False


def _import(work: Callable[[], object], name: str, before: set[str]) -> None:
    """Let Podman create a container from an archive; if that fails, remove it and its new volumes.

    `name`: the name that it gets; `before`: the IDs of all containers.
    """
    try:
        work()
    except Killed:
        raise  # the runtime may still be at work in the new container
    except (GpusnapError, KeyboardInterrupt) as error:
        refused = in_use.explain(error, name) if isinstance(error, GpusnapError) else None
        if refused is None or not in_use.is_container_in_use(error):  # else that container is somebody else's
            with podman_work.ignore_signals(), suppress(GpusnapError):
                _remove_new(name, before)
        if refused is not None:
            raise refused from error
        raise


def _explain_damage(error: GpusnapError, found: ArtifactParts, store: Store) -> Damaged | None:
    """Return an error for a missing or damaged chunk that a child process's error names; None for others."""
    from gpusnap.checkpoints.damage import map_artifact_blobs

    named = set(_DIGEST.findall(str(error)))
    for each in found.artifact.chunks:
        if each.digest in named:
            try:
                store.layout.check_blob(each)
            except BlobError:
                place = map_artifact_blobs(found.artifact, found.record)[each.digest][0]
                return Damaged(f"{error} (in {place})", hint="gpusnap verify lists all damage")
    return None


def _remove_new(name: str, before: set[str]) -> None:
    """Remove what a failed import of Podman's leaves: a container that never ran, its files and new volumes.

    Another gpusnap may be restoring a container of that name: Podman refuses to remove it once it runs. It
    also refuses to remove a volume that another container uses.
    """
    left = podman.inspect_container(name) if name else None
    if left is not None and left.id not in before and left.status in _NEVER_RAN:
        created = podman_objects.list_created_with(left)
        podman.remove(left.id)
        for volume in created:
            with suppress(GpusnapError):
                podman_objects.remove_volume(volume)


@contextmanager
def _make_folder(store: Store) -> Iterator[str]:
    """Make a folder for a private file: in the store, or elsewhere if that is not writable."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(store.stage()).path
        # No store, another tool's, one that is busy, or on a disk that is full or cannot be written to.
        except (DiskError, LayoutError, StoreError):
            prefix = scratch_files.prefix("records")
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=prefix, dir=scratch_files.find_large())
            )
        yield folder
