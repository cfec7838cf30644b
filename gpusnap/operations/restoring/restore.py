"""`gpusnap restore`: restores a container from a store, a registry, or an archive."""

from __future__ import annotations

import time
from contextlib import suppress

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import convert_errors
from gpusnap.checkpoints import locator, migrations
from gpusnap.checkpoints.formats.entries import read_member
from gpusnap.checkpoints.formats.names import FIRST, LARGEST_DUMP
from gpusnap.checkpoints.offline import find_offline_copy
from gpusnap.container_hooks.commands import run_after_restore
from gpusnap.container_hooks.pairs import CHECKPOINT
from gpusnap.engines import podman
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import OciError, RegistryError
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.chunks import artifact as artifacts
from gpusnap.oci.layout.image_marks import CRIU
from gpusnap.oci.store.tags import LATEST, base
from gpusnap.operations.restoring import in_podman, in_use
from gpusnap.operations.restoring.podman_restore import PodmanRestore, RestoredContainer, RestoreRequest
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted, make_unforeseen
from gpusnap.runtime_shim.base.log import note


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """A container that runs again."""

    container: str
    """Its ID."""
    name: str
    """The name of the container."""
    seconds: float
    digest: str = ""
    """The digest of the checkpoint, if it was an artifact."""
    kept: str = ""
    """Its name in the store, if it came from a registry."""
    source: locator.ResolvedName | None = None
    """How the word was resolved, if it came from this host's store."""


def restore(
    request: RestoreRequest, progress: Progress, *, asked: podman.Listing | None = None
) -> RestoreResult:
    """Restore a container. `asked`: Podman's list of containers, if it was already requested.

    Raises NotFound, Damaged, Interrupted, GpusnapError.
    """
    began = time.monotonic()
    kept_as = ""
    source: locator.ResolvedName | None = None
    job = PodmanRestore(request, progress)
    in_use.check_name(request.name)
    settings_file.load_usable()  # gpusnap-runtime would refuse, and Podman does not always show the reason
    try:
        with convert_errors():
            match request.what:
                case locator.InFile(path):
                    found = job.restore_file(path)
                case locator.InStore():
                    source = in_podman.resolve(request.what)
                    if _is_newest(request.what.wanted, source) and source.entry.name != request.what.wanted:
                        migrations.check_ahead(source.place.store.path, source.entry.name)
                    found = job.restore_from_store(source.place, asked)
                case locator.InRegistry():
                    try:
                        found, kept_as = job.restore_from_registry(request.what)
                    except RegistryError as error:
                        # Only if Podman was not called: what its runtime does may have no such errors.
                        copy = find_offline_copy(request.what, error) if job.container is None else None
                        if copy is None:
                            raise
                        source = copy.resolve()
                        found = job.restore_from_store(source.place)
    except (Exception, KeyboardInterrupt) as error:
        if job.container is None:
            raise
        if isinstance(error, KeyboardInterrupt | Interrupted):
            _forget_migration(job)
            raise _make_interrupted(job.container) from error
        found = job.container
        _note_afterwards(error)
    _forget_migration(job)
    name = _run_command(found, progress)
    if isinstance(request.what, locator.InStore) and source is not None:
        # Last: until here, a user waits for the container.
        with suppress(Exception, KeyboardInterrupt):
            _note_later(request.what.wanted, source)
    return RestoreResult(found.id, name, time.monotonic() - began, job.digest, kept_as, source)


def _is_newest(wanted: str, source: locator.ResolvedName) -> bool:
    """Return whether a word was a name without a tag, which means the newest checkpoint of that name."""
    name = wanted.removesuffix(f":{LATEST}")
    return bool(name) and base(name) == name == base(source.entry.name)


def _note_later(wanted: str, source: locator.ResolvedName) -> None:
    """Note a later checkpoint that was not completed, unless a tag or a digest said which one is meant."""
    name = base(source.entry.name)
    if _is_newest(wanted, source) and in_podman.has_later_export(source, name):
        note(f"a later checkpoint of {name} was not completed: gpusnap recover {name} names it")


def _forget_migration(job: PodmanRestore) -> None:
    """The container runs here, so it does not run on the host that it was being migrated to."""
    if job.digest and job.request.not_migrated:
        try:
            migrations.forget(job.digest)
        except (GpusnapError, OSError) as error:
            _note_afterwards(error)


def _make_interrupted(found: RestoredContainer) -> Interrupted:
    """The error of a signal that came when the container was running already."""
    name = found.name or found.id
    error = Interrupted(f"interrupted, but the container {name} is restored already")
    if found.annotated:
        error.add_hint(f"if it has a command {CHECKPOINT.after}, that was not run: gpusnap recover runs it")
    return error


def _note_afterwards(error: Exception) -> None:
    """Print an error after the container runs already, for example about removing temporary files."""
    said = error if isinstance(error, GpusnapError) else make_unforeseen(error)
    note(f"the container is restored, but not all is tidied up: {said.sentence()}")


def _run_command(found: RestoredContainer, progress: Progress) -> str:
    """Run the container's command after a restore, if it has one; return the container's name."""
    if found.name and not found.annotated:
        return found.name
    try:
        container = podman.inspect_container(found.id)
    except GpusnapError as error:
        if found.annotated:
            raise GpusnapError(
                f"the container is restored, but no command of its own was run in it: {error}",
                hint=error.hint,
                code=error.code,
            ) from error
        _note_afterwards(error)
        return found.id
    run_after_restore(container, progress)
    return container.name


def find_container_name(what: locator.Place) -> str:
    """Return the name of a checkpoint's container; if no store or file has it, a word for the checkpoint."""
    match what:
        case locator.InFile(path):
            with suppress(GpusnapError, OciError, OSError):
                return _read_name(path) or path
            return path
        case locator.InStore(store, wanted):
            name = base(wanted)
            with suppress(GpusnapError, OciError, OSError):
                entry = what.entry()
                name = base(entry.name) or name
                notes = artifacts.read(entry.descriptor, store.read).annotations
                return notes.get(f"{CRIU}container.name", "") or name
            return name
        case locator.InRegistry(reference):
            return str(reference)


def _read_name(path: str) -> str:
    """Return the name that an archive's container had; "" if the archive has none."""
    try:
        value = parse_json(read_member(path, FIRST[0], limit=LARGEST_DUMP) or b"{}")
        return str(value["name"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
