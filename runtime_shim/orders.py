"""What `gpusnap checkpoint` asks of the runtime that Podman runs for it.

Podman runs a runtime with an almost empty environment at checkpoint (libpod, CheckpointContainer), so what
shall be otherwise than in the settings, for this one checkpoint, stands in a file:

    /run/gpusnap/orders/<container>.json    0600 in 0700; {"owner": [pid, start], "pages": …, "store": …}

It counts while the process that wrote it lives, and for that container alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from runtime_shim import proc
from runtime_shim.errors import GpusnapError, reason
from runtime_shim.settings import TABLE, Settings

__all__ = ["applied", "ordered"]

FOLDER = "/run/gpusnap/orders"
_ID = re.compile(r"[A-Za-z0-9][\w.+-]{0,250}", re.ASCII)
_LARGEST = 16 << 10


@contextmanager
def ordered(container: str, *, pages: str, store: str = "") -> Iterator[None]:
    """While the block runs, checkpoints of that container go there. Raises GpusnapError.

    `container`: its full ID. `pages`: as memory.pages. `store`: as store.path; empty for the settings'.
    """
    path = _path(container)
    own = proc.process(os.getpid())
    document = {"owner": [os.getpid(), own.start if own else 0], "pages": pages, "store": store}
    try:
        for folder in (os.path.dirname(FOLDER), FOLDER):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(path + ".new", flags, 0o600), "w", encoding="utf-8") as file:
            json.dump(document, file)
        os.replace(path + ".new", path)
    except OSError as error:
        raise GpusnapError(
            f"{path} cannot be written: {reason(error)}", hint="run gpusnap as root"
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def applied(settings: Settings, container: str) -> Settings:
    """The settings as ordered for a container; as they are where nobody who lives has ordered anything."""
    if not _ID.fullmatch(container):
        return settings
    try:
        descriptor = os.open(_path(container), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            document = json.loads(file.read(_LARGEST))
        pid, start = document["owner"]
        pages, store = TABLE["memory.pages"].check(document["pages"]), str(document["store"])
        if not proc.same(int(pid), int(start)):
            return settings
    except (OSError, ValueError, KeyError, TypeError):
        return settings
    memory = replace(settings.memory, pages=pages)
    if store:
        return replace(settings, memory=memory, store=replace(settings.store, path=store))
    return replace(settings, memory=memory)


def _path(container: str) -> str:
    if not _ID.fullmatch(container):
        raise GpusnapError(f"{container[:80]!r} is no container's ID")
    return os.path.join(FOLDER, f"{container}.json")
