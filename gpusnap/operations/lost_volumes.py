"""Makes volumes of a container from its checkpoint while Podman still has other volumes of it.

A restore of Podman's takes all volumes from the checkpoint or none (--ignore-volumes). But with --rm, Podman
removes those that have no name of their own with the container, and keeps the others (podman-run(1), --rm).
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
from gpusnap.oci.tar.archive import entries
from gpusnap.runtime_shim.base.errors import GpusnapError, advise, reason
from gpusnap.runtime_shim.base.stop_signals import put_off_signals
from gpusnap.runtime_shim.runtime.criu import scratch_files


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


def _make_one(name: str, made: list[str]) -> None:
    """Make an empty one, and note it also after Ctrl-C: otherwise the next restore would use it as it is."""
    with put_off_signals():
        podman_objects.make_volume(name)
        made.append(name)


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
                _make_one(name, made)
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
        code="GPS-518",
    )
