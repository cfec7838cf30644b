"""Keeps the remains of a container if its checkpoint failed after Podman had ended the container.

Podman has the checkpoint in its storage, unless the container was to be removed at its end (--rm, which
Quadlet uses for all of its containers). Then Podman's export is the only copy, and is kept. The message says
what was found, not what is assumed.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Literal

from gpusnap.base.user_errors import NotFound, make_told_error
from gpusnap.checkpoints.formats.entries import read_member
from gpusnap.checkpoints.formats.names import FIRST, LARGEST_DUMP
from gpusnap.checkpoints.formats.podman_writer import can_import
from gpusnap.checkpoints.names import container_name
from gpusnap.checkpoints.volumes import label
from gpusnap.container_hooks.commands import run_after_bring_back
from gpusnap.engines import podman, podman_work
from gpusnap.oci.base.dataclass import dataclass, field
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.base.files import is_folder
from gpusnap.oci.tar.archive import entries
from gpusnap.operations import lost_volumes
from gpusnap.operations.checkpointing import archive as archives
from gpusnap.operations.checkpointing.ordered_memory import OrderedMemory
from gpusnap.operations.driver import needed_driver
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, Interrupted, reason
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records import manifest
from gpusnap.runtime_shim.records.manifest import INVENTORY
from gpusnap.runtime_shim.runtime.criu.images.directory import list_versions
from gpusnap.runtime_shim.snapshot import left_stopped

# Podman refuses an archive without these (libpod, prepareCheckpointImport).
_NEEDED = frozenset({"config.dump", "spec.dump", f"checkpoint/{INVENTORY}"})

# Seconds for Podman to notice the end of a container, or to remove it after that, and between two looks.
_REMOVAL, _EVERY = 20.0, 0.1

_Images = Mapping[str, tuple[int, ...]]
_Left = Literal["running", "in Podman", "cut off", "nothing", "removed", "unknown"]


@dataclass(slots=True, kw_only=True)
class Export:
    """A container that Podman is to checkpoint into an archive."""

    found: podman.Container
    archive: str
    """The path to which Podman writes it."""
    keep: Callable[[], str]
    """Keeps the archive permanently, and returns its path."""
    environment: str = ""
    """The prefix that a command for restoring it needs, such as "GPUSNAP_STORE=/mnt/store "."""
    bring_back: bool = False
    """Podman restores the container if it has the checkpoint in its storage, or has exported all of it."""
    ignore_volumes: bool = False
    """The archive is without the files of volumes."""
    left_stopped: bool = False
    """The dump leaves the container stopped, and this process removes it when its checkpoint is stored."""
    dismiss_guardian: Callable[[], object] = lambda: None
    """Prevents that the container runs on if this process is killed."""
    protect: Callable[[], object] = lambda: None
    """Protects the archive, which is all that is left of a container that its dump ends."""
    more: str = ""
    """What else can be done with the archive: a command and its effect; {archive} is replaced by the path."""
    whole: bool = False
    """Podman has written all of it."""
    kept: bool = False
    """It is not removed."""
    first: proc.Process | None = field(init=False, default=None)
    """The first process of the container, before the checkpoint."""
    earlier: _Images | None = field(init=False)
    """The images of an earlier checkpoint in Podman's storage; None if they could not be read."""

    def __post_init__(self) -> None:
        self.earlier = _find_images(self.found.checkpoint_path)
        self.first = proc.process(self.found.init) if self.found.init else None

    def end_at_dump(self, why: GpusnapError) -> None:
        """Let the dump end the container: it cannot be left stopped."""
        note(f"{why}; do not kill Podman until this command has ended", code=why.code)
        self.left_stopped = False
        self.protect()

    def remove_container(self, stored: str) -> None:
        """Remove the container that was left stopped: its checkpoint is stored under that name.

        A signal comes too late then: the container must not run on in between. Raises GpusnapError.
        """
        if not self.left_stopped:
            return
        self.dismiss_guardian()
        with podman_work.ignore_signals():
            try:
                podman.remove_running(self.found.id)
            except GpusnapError as error:
                self._end_it()
                if not self.has_ended:
                    said = f"the checkpoint of {self.found.name} is stored as {stored}, but {error}"
                    raise GpusnapError(said, hint=error.hint, code=error.code) from error
            self.forget_stopped()

    def _end_it(self) -> None:
        """End the container that could not be removed: Podman was killed, or another one depends on it.

        Podman removes it if it can, as every container with --rm.
        """
        with suppress(GpusnapError):
            podman.kill(self.found.id)
            end = time.monotonic() + _REMOVAL
            while not self.has_ended and time.monotonic() < end:
                time.sleep(_EVERY)
        with suppress(GpusnapError):
            podman.remove_running(self.found.id)

    def forget_stopped(self) -> None:
        """Free what would let the container that was left stopped run on: it has ended."""
        with suppress(GpusnapError):  # `gpusnap recover` does it
            left_stopped.forget(self.found.id)

    def bring_back_stopped(self, error: GpusnapError) -> bool:
        """Let the container that was left stopped run on; return whether it does. The error says why not."""
        try:
            left_stopped.bring_back(self.found.id, needed_driver, settings_file.load().memory)
        except Exception as failed:  # of any kind: the user must be told what is left
            why = make_told_error(failed).sentence()
            error.add_hint(
                f"{self.found.name} is stopped, and nothing of it is lost: {why}; gpusnap recover "
                f"{self.found.id[:12]} lets it run on"
            )
            return False
        return True

    @property
    def has_ended(self) -> bool:
        """Return whether the first process has ended, or is about to; another may have its PID by now."""
        first = self.first
        if first is None:
            return bool(self.found.init)
        return not proc.is_still_running(first.pid, first.start)


@contextmanager
def explain_export_errors(export: Export, memory: OrderedMemory | None = None) -> Iterator[None]:
    """Convert errors in the block into one that says how the container can be restored.

    memory: settled after an error. Raises GpusnapError.
    """
    export.kept = True  # until it is certain that nobody needs it
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:  # of any kind: the user must be told what is left
        with podman_work.ignore_signals():  # a second signal would leave the archive without a message
            said, runs = _make_told_error(error), True
            if export.left_stopped and not export.has_ended:
                if memory is not None:
                    memory.leave()
                runs = export.bring_back_stopped(said)
            elif export.left_stopped:  # somebody has killed it; its memory goes with Podman's export
                export.forget_stopped()
            # First: the runtime of a Podman that was killed may end the container at any moment.
            if memory is not None:
                memory.take_left()
            left = _find_left(export)
            if left in ("running", "in Podman", "cut off"):
                export.kept = False
                # First: the disk may be full, and the store needs a little of it.
                with suppress(OSError):
                    os.unlink(export.archive)
            if memory is not None:
                memory.settle(left == "running")
            if left == "running":
                # Otherwise its runtime has reported the state, or has refused before it did anything.
                own = ("Podman failed: ", "podman container checkpoint was interrupted")
                podmans = export.whole or export.left_stopped or str(said).startswith(own)
                podmans |= isinstance(error, KeyboardInterrupt)
                # Podman checkpoints no paused container but a suspended one.
                state = "stays suspended" if export.found.status == "paused" else "continues to run"
                if runs and podmans and state not in said.sentence():
                    said.add_hint(f"{export.found.name} {state}")
                raise said from error
            if left == "removed":  # its volumes, too: the message depends on which are left
                _wait_for_end(export.found)
            after = _make_error_after(export, said, left)
        if export.bring_back and (left == "in Podman" or (left == "removed" and export.kept)):
            after = _bring_back(export, said, after)
        raise after from error
    export.kept = False


def is_whole(archive: str) -> bool:
    """Return whether an archive has the files that Podman needs, and its end; reads all of it."""
    needed = set(_NEEDED)
    try:
        with closing(entries(archive)) as found:
            for entry in found:
                needed.discard(entry.name)
    except OciError:
        return False
    return not needed


def make_import_command(
    archive: str,
    volumes: Collection[str],
    environment: str,
    *,
    name: str,
    config: bytes,
    ignore: bool = False,
) -> str:
    """Return the command that restores a container from its export, as a shell reads it.

    `volumes`: its named volumes, for which Podman is asked. `environment`: as in Export. `name`: that of its
    checkpoints in a store. `config`: its config.dump. What Podman does not import, such as a container of
    Quadlet's, is copied into the store first.
    """
    if not can_import(config):
        return _make_copy_command(archive, environment, f"{name}:kept")
    lost, options = _find_lost_volumes(volumes, ignore=ignore)
    path = shlex.quote(archive)
    commands = [
        f"podman volume create {each} && tar -xOf {path} {label(each)} >{each}.tar && "
        f"podman volume import {each} {each}.tar"
        for each in lost
    ]
    restore = f"{environment}podman container restore --import {path}"
    return " && ".join((*commands, " ".join((restore, *options))))


def _make_copy_command(archive: str, environment: str, target: str) -> str:
    for word in shlex.split(environment):
        target = f"oci:{word.partition('=')[2]}:{target}"
    return (
        shlex.join(("gpusnap", "copy", archive, target)) + " && " + shlex.join(("gpusnap", "restore", target))
    )


def _find_lost_volumes(volumes: Collection[str], *, ignore: bool) -> tuple[list[str], list[str]]:
    """Return the volumes that must be made before an import, and options for it.

    Podman refuses volumes that exist, and these have their content. If none exists, it makes all of them.
    """
    if ignore and volumes:  # their files are not in the archive: Podman makes empty ones
        return [], ["--ignore-volumes"]
    with suppress(GpusnapError):
        lost = [each for each in volumes if not podman.exists("volume", each)]
        if len(lost) < len(volumes):
            return lost, ["--ignore-volumes"]
    return [], []


def _make_told_error(error: BaseException) -> GpusnapError:
    if isinstance(error, OSError):
        return ImageError(f"{error.filename or 'a file'} cannot be used: {reason(error)}")
    if isinstance(error, Exception):
        return make_told_error(error)
    return Interrupted("interrupted during the checkpoint")


def _bring_back(export: Export, error: GpusnapError, after: GpusnapError) -> GpusnapError:
    """Have Podman restore the container; return the error to raise, `after` with the reason if that fails."""
    environment = dict(word.split("=", 1) for word in shlex.split(export.environment))
    try:
        if export.kept:  # Podman has removed it, which was waited for
            lost, options = _find_lost_volumes(export.found.volumes, ignore=export.ignore_volumes)
            with lost_volumes.make(lost, export.archive):
                podman_work.restore(["--import", export.archive, *options], environment)
        else:
            _wait_for_end(export.found)
            podman_work.restore([export.found.id], environment)
        export.kept = False
    except (GpusnapError, KeyboardInterrupt) as failed:
        said = f"{after}; an attempt to restore it failed: {_make_told_error(failed)}"
        return type(error)(said, hint=after.hint, code=after.code)
    run_after_bring_back(export.found)
    said = f"{error}; Podman has restored {export.found.name} from the checkpoint"
    return type(error)(said, hint=error.hint, code=error.code)


def _wait_for_end(found: podman.Container) -> None:
    """Wait for a moment until Podman knows that a container has ended, or has removed it (--rm).

    Before that, it does not restore it: it has not looked after its end if it was killed.
    """
    end = time.monotonic() + _REMOVAL
    with suppress(GpusnapError):  # such as NotFound
        while time.monotonic() < end:
            now = podman.inspect_container(found.id)
            if not found.auto_remove and now.status not in ("running", "paused"):
                return
            time.sleep(_EVERY)


def _find_left(export: Export) -> _Left:
    """Say what is left of the container now."""
    try:
        now = podman.inspect_container(export.found.id)
    except NotFound:
        return "removed"
    except GpusnapError:
        return "unknown"
    # Podman learns of the end a little later.
    if now.status in ("running", "paused") and not export.has_ended:
        return "running"
    if export.found.auto_remove:
        return "removed"  # it will be removed in a moment
    return _in_podman(now.checkpoint_path, export.earlier)


def _find_images(path: str) -> _Images | None:
    try:
        return list_versions(path) if path and is_folder(path) else {}
    except (OSError, ImageError):
        return None


def _in_podman(path: str, earlier: _Images | None) -> _Left:
    images = _find_images(path)
    if images is None or earlier is None:
        return "unknown"
    if images.get(INVENTORY) == earlier.get(INVENTORY):
        return "nothing"  # or an earlier checkpoint
    ours = os.path.join(path, manifest.FOLDER)
    named = os.path.exists(os.path.join(ours, manifest.NAME))
    return "cut off" if os.path.exists(os.path.join(ours, manifest.PENDING)) and not named else "in Podman"


def _make_error_after(export: Export, error: GpusnapError, left: _Left) -> GpusnapError:
    name, kind = export.found.name, type(error)
    again = f"{export.environment}podman container restore {name} restores it"
    there = f"{error}; nothing is lost: Podman has the checkpoint of {name} in its storage"
    if left == "in Podman":
        return kind(there, hint=again, code=error.code)
    if left == "cut off":
        first = f"run gpusnap recover {export.found.id} to complete it, then "
        return kind(f"{there}, but it is incomplete", hint=first + again, code=error.code)
    if export.whole or is_whole(export.archive):
        kept = export.keep()
        archive, unsynced = shlex.quote(kept), ""
        try:
            archives.sync(kept)  # Podman does not
        except OSError as failed:
            unsynced = f", but cannot be flushed to disk: {reason(failed)}"
        config = b""
        with suppress(OciError):
            config = read_member(kept, FIRST[0], limit=LARGEST_DUMP) or b""
        command = make_import_command(
            kept,
            export.found.volumes,
            export.environment,
            name=container_name(name, export.found.id),
            config=config,
            ignore=export.ignore_volumes,
        )
        more = f", and {export.more.format(archive=archive)}" if export.more else ""
        return kind(
            f"{error}; nothing is lost: Podman's export of {name} is kept as {archive}{unsynced}",
            hint=f"{command} restores it{more}",
            code=error.code,
        )
    export.kept = False
    if left == "removed":
        gone = f"the container {name} has stopped, and Podman removes it (--rm) with its checkpoint"
        return kind(f"{error}; {gone}", hint=error.hint, code=error.code)
    if left == "unknown":
        return error
    return kind(
        f"{error}; the container {name} has stopped, and there is no checkpoint of it",
        hint=error.hint,
        code=error.code,
    )
