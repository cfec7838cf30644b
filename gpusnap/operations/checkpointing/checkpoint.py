"""`gpusnap checkpoint`: a running container becomes an artifact in a store or a registry, or an archive.

Podman makes the checkpoint, and gpusnap-runtime writes all memory directly to the store, so Podman's export
is small. gpusnap splits that export into records, and commits them and the memory as one artifact. An error
after Podman ended the container loses nothing, because the checkpoint is in Podman's storage, too. Podman
would remove that together with a container with --rm. Such a container is left stopped after its dump, and
removed when its checkpoint is stored; see runtime_shim/snapshot/left_stopped.py. If that is not possible,
Podman's export is kept after an error; see failed_export.py. Such a container is lost only if Podman is
killed or its own export fails, so gpusnap checks for room first; see disk_space.py.
"""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from gpusnap.base.progress import Progress, Tick, board, watch_growth
from gpusnap.base.user_errors import NotFound, convert_errors, make_told_error
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.formats.entries import read_member
from gpusnap.checkpoints.formats.names import ARCHIVE, CONFIG, FIRST
from gpusnap.checkpoints.names import dated_name, store_name
from gpusnap.checkpoints.statistics import measure_stopped
from gpusnap.container_hooks.commands import run_around_checkpoint
from gpusnap.engines import podman, podman_objects, podman_work, systemd_unit
from gpusnap.oci.base.dataclass import dataclass, field, replace
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.base.files import list_names
from gpusnap.oci.layout.documents import empty_descriptor
from gpusnap.oci.store.index import check_name
from gpusnap.oci.store.staging import Staging
from gpusnap.oci.store.store import Store
from gpusnap.oci.tar.archive import entries
from gpusnap.operations import disk_space
from gpusnap.operations.checkpointing import archive as archives
from gpusnap.operations.checkpointing import places
from gpusnap.operations.checkpointing.failed_export import Export, explain_export_errors
from gpusnap.operations.checkpointing.guardian import guard
from gpusnap.operations.checkpointing.ordered_memory import OrderedMemory
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base import stop_signals
from gpusnap.runtime_shim.base.errors import (
    AlreadyPaused,
    ContainerError,
    GpusnapError,
    ImageError,
    Interrupted,
    UsageError,
)
from gpusnap.runtime_shim.base.import_ahead import import_meanwhile
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.base.threads import run_meanwhile
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records import manifest, manifest_file, manifest_json
from gpusnap.runtime_shim.shim import overrides
from gpusnap.runtime_shim.snapshot import left_stopped
from gpusnap.runtime_shim.snapshot.memory.destination import StoreDestination
from gpusnap.runtime_shim.snapshot.records import suspensions

if TYPE_CHECKING:
    from gpusnap.operations.push_pull import PushResult

_BLOBS = ("blobs", "sha256")
_AFTERWARDS = ("gpusnap.operations.sources",)
"""Modules for what follows Podman's checkpoint. They are imported (0.05 s) while Podman begins, because an
upgrade of gpusnap may replace or remove their files before Podman has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """What to checkpoint, how, and to which place; without `to`, into this host's store."""

    container: str
    to: locator.Place | None = None
    name: str = ""
    leave_running: bool = False
    tcp_established: bool = False
    file_locks: bool = False
    ignore_rootfs: bool = False
    ignore_volumes: bool = False
    force: bool = False
    plain_http: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    asleep: bool = False
    """The container is suspended, and remains suspended."""
    bring_back: bool = False
    """If it fails after it has ended the container, Podman restores that; only for a store."""

    def leaves_stopped(self, found: podman.Container) -> bool:
        """Return whether the container is to be left stopped after its dump, and then removed.

        With `tcp_established`, the other ends of its connections must not notice how it is removed.
        """
        return found.auto_remove and not self.leave_running and not self.tcp_established

    def options(self) -> list[str]:
        """Return the options for Podman."""
        chosen = {
            "--leave-running": self.leave_running,
            "--tcp-established": self.tcp_established,
            "--file-locks": self.file_locks,
            "--ignore-rootfs": self.ignore_rootfs,
            "--ignore-volumes": self.ignore_volumes,
        }
        return [option for option, wanted in chosen.items() if wanted]


@dataclass(frozen=True, slots=True)
class CheckpointResult:
    """A checkpoint that was made. Sizes are in bytes."""

    container: podman.Container
    seconds: float
    gpu_memory: int
    size: int
    """Size of all blobs, or of the archive."""
    new: int
    """Size of the blobs that the store did not have."""
    name: str = ""
    digest: str = ""
    store: str = ""
    file: str = ""
    """The path of the archive; then the three fields above are empty."""
    pushed: PushResult | None = None
    pause: float | None = None
    """Seconds for which the processes were stopped, or until they had ended; None if unknown."""

    @property
    def is_suspended(self) -> bool:
        """Return whether the container is suspended, and has not ended meanwhile.

        Podman checkpoints no other container that is paused.
        """
        return self.container.status == "paused" and proc.is_running(self.container.init)


def checkpoint(
    request: CheckpointRequest, progress: Progress, asked: podman.Inspection | None = None
) -> CheckpointResult:
    """Make a checkpoint. Raises NotFound, ContainerError, Interrupted, GpusnapError.

    `asked`: Podman's description of the container, if it was already requested.
    """
    began = time.monotonic()
    if isinstance(request.to, locator.InRegistry) and request.to.reference.digest:
        raise UsageError(
            f"{request.to.reference} names a digest, but a checkpoint has no digest until it is made",
            code="GPS-102",
        )
    settings_file.load_usable()  # gpusnap-runtime would refuse, and Podman does not always show the reason
    found = find_container(request.container, asked)
    asleep = _is_suspended(found)
    if asleep:
        request = replace(request, leave_running=True, asleep=True)
    podman.check(found, asleep=asleep)
    podman_objects.check_options(found, force=request.force)
    if not request.leave_running:
        systemd_unit.note_restart(found)
    # A suspended container can run no command.
    commands = (
        nullcontext()
        if asleep
        else run_around_checkpoint(found, progress, leave_running=request.leave_running)
    )
    path = os.path.abspath(request.to.path) if isinstance(request.to, locator.InFile) else ""
    if path:
        locator.check_new_file(path)
    if isinstance(request.to, locator.InRegistry):
        progress.stage(f"asking {request.to.reference.registry}")
        _ask(request.to, plain_http=request.plain_http)
    made: CheckpointResult | None = None
    try:
        with commands:
            if path:
                made = _to_file(request, found, path, progress, began)
            else:
                made = _to_store(request, found, progress, began)
    except ContainerError as error:
        if made is not None:  # only the command after it failed
            error.add_hint(f"the checkpoint is {made.file or f'{made.name} in {made.store}'}")
        raise
    assert made is not None
    if not isinstance(request.to, locator.InRegistry):
        return made
    try:
        from gpusnap.operations import push_pull

        made_there = locator.InStore(Store(made.store), made.digest)
        pushed = push_pull.push(made_there, request.to, plain_http=request.plain_http, progress=progress)
    except (GpusnapError, ImportError, KeyboardInterrupt) as error:
        said = make_told_error(error) if isinstance(error, Exception) else stop_signals.make_interrupted()
        plain_http = " --plain-http" if request.plain_http or request.to.plain_http else ""
        raise type(said)(
            f"the checkpoint is in {made.store} as {made.name}, but was not pushed: {said}",
            hint=f"gpusnap push {made.name} {request.to.reference}{plain_http} continues it",
            code=said.code or "GPS-710",
        ) from error
    return replace(made, seconds=time.monotonic() - began, pushed=pushed)


def find_container(name: str, asked: podman.Inspection | None = None) -> podman.Container:
    """Return Podman's container; `asked`: Podman's answer about it, if it was already requested.

    Raises NotFound, which says so if the name is that of a task of containerd's; GpusnapError.
    """
    try:
        return asked.container() if asked is not None else podman.inspect_container(name)
    except NotFound as error:
        from gpusnap.operations.suspending.targets import is_task  # modules that nothing else here needs

        if not is_task(name):
            raise
        raise NotFound(
            f"Podman has no container {name}, but containerd has a task of that name",
            hint="ctr container checkpoint --task makes a checkpoint of it: see docs/containerd.md",
        ) from error


def _ask(to: locator.InRegistry, *, plain_http: bool) -> None:
    """Check that the registry answers and authorizes us before the container is stopped."""
    from gpusnap.operations import open as source

    with convert_errors(), source.open_repository(to, plain_http=plain_http, mirrors=False) as repository:
        empty = empty_descriptor()
        repository.has_blob(empty.digest, empty.size, pushing=True)


def _to_store(
    request: CheckpointRequest, found: podman.Container, progress: Progress, began: float
) -> CheckpointResult:
    store = request.to.store if isinstance(request.to, locator.InStore) else locator.default_store()
    with convert_errors(option="--to oci:DIR"):
        names = _store_names(request, found)
        disk_space.check(
            found,
            store.path,
            rootfs=not request.ignore_rootfs,
            volumes=not request.ignore_volumes,
            twice=True,
            gpus=False,
        )
        store.create()  # it writes, and would otherwise report only that its own few bytes do not fit
        with (
            _open_staging(request, found, store) as (staging, export),
            OrderedMemory(store) as memory,
            ExitStack() as order,
        ):
            blobs = set(list_names(os.path.join(store.path, *_BLOBS)))
            view = order.enter_context(ExitStack())
            shown = view.enter_context(board())
            path = shown.path if shown is not None else ""
            measure = watch_growth(os.path.dirname(staging.path))
            tick = progress.follow(shown, f"checkpoint of {found.name}", measure)
            # By it, `gpusnap recover` finds another store after a reboot.
            if not locator.is_default(store.path):
                order.enter_context(places.remember(store.path, is_needed=memory.is_left))
            # Last: nobody needs the request before Podman runs.
            order.enter_context(
                overrides.order(
                    found.id,
                    pages=StoreDestination.kind,
                    store=store.path,
                    staging=memory.name,
                    force=request.force,
                    progress=path,
                    asleep=request.asleep,
                    leave_stopped=export.left_stopped,
                    # By it, `gpusnap recover` finds the store; so it stays until the memory is committed.
                    is_needed=memory.is_left,
                )
            )
            if export.left_stopped:
                export.dismiss_guardian = order.enter_context(guard(found.id))
            with explain_export_errors(export, memory):
                _run(request, export, ["--compress", "none"], tick, progress)
                view.close()
                progress.stage("records")
                from gpusnap.operations import sources

                whole_in = memory.take() or staging
                root, volumes = sources.take_in(
                    whole_in, export.archive, progress, request.labels, written=store.open_known_chunks()
                )
                progress.stage("to disk")
                whole = kept.load(root, whole_in.layout)
                tables = [*whole.tables, *(each.table for each in volumes)]
                whole_in.commit(root, names=names, tables=tables)
                export.remove_container(names[0])
                memory.finish()
    parts = {each.digest: each.size for each in (*whole.artifact.blobs(), *whole.artifact.documents)}
    return CheckpointResult(
        container=found,
        seconds=time.monotonic() - began,
        gpu_memory=whole.gpu_memory,
        size=sum(parts.values()),
        new=sum(size for digest, size in parts.items() if digest.partition(":")[2] not in blobs),
        name=names[0],
        digest=root.digest,
        store=store.path,
        pause=measure_stopped(whole.record.timing) if whole.record is not None else None,
    )


@contextmanager
def _open_staging(
    request: CheckpointRequest, found: podman.Container, store: Store
) -> Iterator[tuple[Staging, Export]]:
    """Open a staging directory with the archive; it is kept if nothing else is left of the container."""
    staging = store.stage()
    archive = os.path.join(staging.path, ARCHIVE)
    environment = (
        f"GPUSNAP_STORE={shlex.quote(store.path)} " if isinstance(request.to, locator.InStore) else ""
    )
    volumes = ", with --ignore-volumes if all of its volumes still exist" if found.volumes else ""
    # Podman does not import what Quadlet has created; for an archive, gpusnap says what to do.
    command = "gpusnap restore" if systemd_unit.has_created(found) else "podman container restore --import"
    why = (
        f"what Podman exported of the container {found.name}: {environment}{command} {archive} "
        f"restores it{volumes}; when it is no longer needed, remove {staging.path}"
    )

    def keep() -> str:
        # Free the room for the mark first: what was made of the archive so far is useless.
        for name in list_names(os.path.join(staging.path, *_BLOBS)):
            with suppress(OSError):
                os.unlink(os.path.join(staging.path, *_BLOBS, name))
        with suppress(OciError):
            staging.mark_precious(why)
        return archive

    export = Export(
        found=found,
        archive=archive,
        keep=keep,
        environment=environment,
        bring_back=request.bring_back,
        ignore_volumes=request.ignore_volumes,
        left_stopped=request.leaves_stopped(found),
        protect=lambda: staging.mark_precious(why),
    )
    if isinstance(request.to, locator.InRegistry):
        export.more = f"gpusnap push {{archive}} {request.to.reference} pushes it"
    try:
        if found.auto_remove and not request.leave_running and not export.left_stopped:
            export.protect()  # even if we are killed, too
        yield staging, export
    finally:
        if not export.kept:
            with suppress(OciError):
                staging.unmark_precious()
        staging.close(leave=export.kept)


def _to_file(
    request: CheckpointRequest, found: podman.Container, path: str, progress: Progress, began: float
) -> CheckpointResult:
    folder, name = os.path.split(path)
    disk_space.check(
        found,
        folder,
        rootfs=not request.ignore_rootfs,
        volumes=not request.ignore_volumes,
        twice=False,
        gpus=True,
    )
    token = secrets.token_hex(4)
    beside = os.path.join(folder, f".{name[:200]}.{token}")
    aside = os.path.join(folder, f"checkpoint-of-{found.name[:200]}-{token}{archives.ending(path)}")
    # Now: after Podman has ended the container it would be too late for this error.
    with archives.explain_write_errors(path):
        os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def keep() -> str:
        with suppress(OSError):
            os.rename(beside, aside)
            return aside
        return beside

    export = Export(
        found=found,
        archive=beside,
        keep=keep,
        ignore_volumes=request.ignore_volumes,
        left_stopped=request.leaves_stopped(found),
    )
    compression = ["--compress", archives.compression(path)]
    try:
        with ExitStack() as order:
            shown = order.enter_context(board())
            board_path = shown.path if shown is not None else ""
            tick = progress.follow(shown, f"checkpoint of {found.name}", lambda: archives.size(beside))
            order.enter_context(places.remember(folder, archive=beside, target=path, container=found.name))
            order.enter_context(
                overrides.order(
                    found.id,
                    pages="chunks",
                    force=request.force,
                    progress=board_path,
                    asleep=request.asleep,
                    leave_stopped=export.left_stopped,
                    archive=beside,  # by it, `gpusnap recover` finds what a killed command leaves
                    target=path,
                )
            )
            if export.left_stopped:
                export.dismiss_guardian = order.enter_context(guard(found.id))
            order.enter_context(explain_export_errors(export))
            _run(request, export, compression, tick, progress)
            memory = _measure_gpu_memory(export)
            with archives.explain_write_errors(path):
                put = archives.put(beside, path, aside)
            export.remove_container(put)
    finally:
        if not export.kept:
            with suppress(OSError):
                os.unlink(beside)
    if put != path:
        raise GpusnapError(
            f"{path} was created by another process in the meantime, and gpusnap does not overwrite "
            f"files: the checkpoint of {found.name} is complete, and kept as {put}",
            hint="rename that file as you like",
            code="GPS-103",
        )
    return CheckpointResult(
        found, time.monotonic() - began, memory, size=archives.size(path), new=archives.size(path), file=path
    )


def _run(
    request: CheckpointRequest, export: Export, options: list[str], tick: Tick, progress: Progress
) -> None:
    """Run Podman's checkpoint, and check that it made the requested one."""
    words = [*options, *request.options()]

    def run(*more: str) -> bool:
        return podman_work.checkpoint(
            export.found, export.archive, [*words, *more], tick=tick, say=progress.say
        )

    later = (*_AFTERWARDS, *(left_stopped.WAY_BACK if export.left_stopped else ()))
    with (
        run_meanwhile(manifest_json.prepare, name="gpusnap-checks"),
        import_meanwhile(*later),
        _show_as_running(export.found) if request.asleep else nullcontext(),
    ):
        try:
            came = run("--leave-running") if export.left_stopped else run()
        except GpusnapError as error:
            if not export.left_stopped or error.code != left_stopped.CODE:
                raise
            export.end_at_dump(error)
            came = run()
    missing = set(FIRST)
    with convert_errors(), closing(entries(export.archive)) as found:
        while missing and (entry := next(found, None)) is not None:
            missing.discard(entry.name)
    if missing:
        raise ImageError(
            f"Podman's export of {export.found.name} does not contain {min(missing)}", code="GPS-907"
        )
    export.whole = True
    if came:
        raise Interrupted("interrupted during the checkpoint")


def _is_suspended(found: podman.Container) -> bool:
    """Return whether a container is suspended. Raises GpusnapError while that changes."""
    suspension = suspensions.find_by_container(found.id)
    if suspension is None or not suspension.is_alive:
        return False
    if suspension.stage is not suspensions.Stage.SUSPENDED:
        suspension.check_not_at_work()
        raise suspensions.make_unfinished_error(suspension)
    return True


@contextmanager
def _show_as_running(found: podman.Container) -> Iterator[None]:
    """Make Podman regard a suspended container as running, because it checkpoints no other.

    A request tells its runtime to change nothing, so the container stays frozen all the time. A resume waits
    while the request exists. Raises ContainerError if a resume came first.
    """
    if not _is_suspended(found):
        raise ContainerError(
            f"the container {found.name} was resumed before its checkpoint began",
            hint="run the same command again",
            code="GPS-206",
        )
    try:
        podman.go_on(found.id)
        yield
    finally:
        try:
            podman.pause(found.id)
        except AlreadyPaused:  # Podman was interrupted before it did what go_on asks for
            pass
        except GpusnapError as error:  # its processes are stopped in any case, and the checkpoint can be made
            if proc.is_running(found.init):  # nobody has ended it meanwhile
                note(
                    f"Podman lists the suspended container {found.name} as running: {error}; gpusnap recover "
                    "corrects that",
                    code="GPS-021",
                )


def _measure_gpu_memory(export: Export) -> int:
    """Return the container's GPU memory in bytes. Raises ImageError for an archive that lacks it."""
    record = _record_of(export)
    if record is not None and record.pages == StoreDestination.kind:
        raise ImageError(
            f"Podman's export of {export.found.name} does not contain its memory, which is in a store",
            hint="gpusnap checkpoint without --to keeps both together",
            code="GPS-608",
        )
    return sum(gpu.memory_used for gpu in record.gpus) if record is not None else 0


def _record_of(export: Export) -> manifest.Manifest | None:
    """Return the manifest from Podman's storage, else from the archive; None without a GPU."""
    with suppress(GpusnapError):
        now = podman.inspect_container(export.found.id)
        path = now.checkpoint_path
        if path and os.path.isdir(path):
            return manifest_file.read(path) if manifest_file.is_ours(path) else None
    with convert_errors():
        data = read_member(export.archive, CONFIG, limit=manifest.LARGEST)
    return manifest_json.decode(data, f"{CONFIG} in Podman's export") if data is not None else None


def _store_names(request: CheckpointRequest, found: podman.Container) -> list[str]:
    """Return its names in the store; the first is the one to show. Raises StoreError.

    A checkpoint for a registry gets the usual name as well: NAME alone means the newest checkpoint of that
    name.
    """
    given = request.name
    if not given and isinstance(request.to, locator.InStore):
        given = request.to.wanted
    if given:
        return [check_name(given)]
    names = [dated_name(found.name, found.id, datetime.now(UTC))]
    if isinstance(request.to, locator.InRegistry):
        names.append(store_name(request.to.reference))
    return names
