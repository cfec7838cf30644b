"""Makes volumes of a container from its checkpoint while Podman still has other volumes of it.

A restore of Podman's takes all volumes from the checkpoint or none (--ignore-volumes). But with --rm, Podman
removes those that have no name of their own with the container, and keeps the others (podman-run(1), --rm).

While a volume is being filled, it has a file .gpusnap-incomplete, which whoever fills it has locked. No
restore uses a volume that has this file, or one that was made and is still empty: gpusnap was killed then.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress

from gpusnap.base.user_errors import Killed, convert_errors
from gpusnap.checkpoints.volumes import name_of
from gpusnap.engines import podman_objects, podman_work
from gpusnap.oci.base.locks import try_exclusive
from gpusnap.oci.tar.archive import entries
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused, advise, reason
from gpusnap.runtime_shim.base.stop_signals import put_off_signals
from gpusnap.runtime_shim.runtime.criu import scratch_files

CODE = "GPS-518"
_MARK = ".gpusnap-incomplete"


def find_filled(names: Collection[str]) -> list[str]:
    """Return the volumes among these, which exist, but for those that were made and never filled.

    Raises Refused for one that has only some of its files, and GpusnapError if Podman does not answer.
    """
    made = podman_objects.list_made() if names else {}
    return [name for name in names if name not in made or _is_filled(name, made[name])]


def _is_filled(name: str, folder: str) -> bool:
    mark = os.path.join(folder, _MARK)
    try:
        if not os.path.lexists(mark):
            return bool(os.listdir(folder))
        with open(mark, "rb") as file:
            being_made = not try_exclusive(file.fileno())
    except OSError as error:
        raise GpusnapError(
            f"the volume {name} cannot be read: {folder}: {reason(error)}", code=CODE
        ) from error
    if being_made:
        raise Refused(
            f"another gpusnap restore is filling the volume {name}", hint="wait until it has ended", code=CODE
        )
    raise Refused(
        f"the volume {name} lacks files: gpusnap was killed while it filled it from a checkpoint",
        hint=f"podman volume rm {name} removes it, and the next restore makes it again; or complete its "
        f"files, and remove {mark}",
        code=CODE,
    )


@contextmanager
def make(names: Collection[str], archive: str) -> Iterator[None]:
    """Make these volumes from an archive of Podman's; they are removed again if the block fails.

    Raises GpusnapError, also if the archive does not have the files of one.
    """
    made: list[str] = []
    try:
        if names:
            _make_all(set(names), archive, made)
        yield
    except Killed:
        raise  # Podman may still be at work
    except BaseException:
        with podman_work.ignore_signals():
            for name in made:
                with suppress(GpusnapError):
                    podman_objects.remove_volume(name)
        raise


@contextmanager
def _make_one(name: str, made: list[str]) -> Iterator[None]:
    """Make an empty one, and mark it as incomplete while the block fills it.

    It is noted as made also after Ctrl-C. One that a killed gpusnap has made is used, if it is still empty.
    """
    with put_off_signals():
        there = podman_objects.list_made()
        if name not in there:
            podman_objects.make_volume(name)
            made.append(name)
            there = podman_objects.list_made()
        if name not in there:
            raise GpusnapError(
                f"the volume {name} was removed while it was made from the checkpoint",
                hint="run the same command again",
                code=CODE,
            )
        mark = os.path.join(there[name], _MARK)
        descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if name not in made:
            made.append(name)
    try:
        try_exclusive(descriptor)
        yield
        os.unlink(mark)
    finally:
        os.close(descriptor)


def _make_all(wanted: set[str], archive: str, made: list[str]) -> None:
    prefix = scratch_files.prefix("volume")
    try:
        with (
            tempfile.TemporaryDirectory(prefix=prefix, dir=scratch_files.find_large()) as folder,
            convert_errors(),
            closing(entries(archive)) as found,
        ):
            for entry in found:
                name = name_of(entry.name)
                if name not in wanted or entry.content is None:
                    continue
                path = os.path.join(folder, "files.tar")
                with open(path, "wb") as file:
                    shutil.copyfileobj(entry.content, file)
                with _make_one(name, made):
                    podman_objects.fill_volume(name, path)
                wanted.discard(name)
                if not wanted:
                    return
    except OSError as error:
        raise GpusnapError(
            f"the volume {min(wanted)} cannot be made from the checkpoint: {error.filename or 'a file'}: "
            f"{reason(error)}",
            hint=advise(error) or "TMPDIR names another directory for large temporary files",
            code="GPS-007",
        ) from error
    raise GpusnapError(
        f"the checkpoint does not have the files of the volume {min(wanted)}",
        hint=f"podman volume create {min(wanted)} makes an empty one",
        code=CODE,
    )
