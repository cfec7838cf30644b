"""Options of `gpusnap checkpoint` for the runtime that Podman runs for it.

Podman runs a runtime with an almost empty environment at checkpoint (libpod, CheckpointContainer). So
settings that differ for this one checkpoint are in a file:

    /run/gpusnap/orders/<container>.json    0600 in 0700; {"owner": [pid, start], "container": …, "pages": …,
                                             "store": …, "staging": …, "force": …, "progress": …,
                                             "stopped": …, "archive": …, "target": …}
    /run/gpusnap/orders/<container>.<pid>-<start>.json    that of a process that has ended: something may be
                                             left where it says, and a later one has taken its name

It counts while the process that wrote it lives, only for that container, and only for descendants of that
process, so not for a Podman that somebody else runs on the same container meanwhile. Only one process at a
time can have such a file for a container: it holds the lock (flock) of the file beside it, <container>.lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from gpusnap.oci.base.dataclass import replace
from gpusnap.oci.base.files import exists
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base import deadlines
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError, advise, reason
from gpusnap.runtime_shim.base.progress import reporter
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.setting_keys import TABLE
from gpusnap.runtime_shim.settings import Settings

if TYPE_CHECKING:
    from gpusnap.runtime_shim.snapshot.memory.handover import Recipient

FOLDER = "/run/gpusnap/orders"
# Seconds for `sweep` to release a lock.
_SWEEPING = 1.0
_ID = compile_later(r"[A-Za-z0-9][\w.+-]{0,250}", re.ASCII)
_LARGEST = 16 << 10
# Far more generations than there are between a command and the runtime of its Podman.
_FARTHEST = 64
_IN_CRIU = "criu"
_UNREADABLE = (GpusnapError, OSError, ValueError, KeyError, TypeError)


@contextmanager
def order(
    container: str,
    *,
    pages: str,
    store: str = "",
    staging: str = "",
    force: bool = False,
    progress: str = "",
    asleep: bool = False,
    leave_stopped: bool = False,
    archive: str = "",
    target: str = "",
    is_needed: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """While the block runs, checkpoints of that container by descendants of this process use these options.

    `container`: its full ID. `pages`: as memory.pages. `store`: as store.path; empty for the settings'.
    `staging`: the name of the staging directory there in which the memory is handed over to this process.
    `force`: as nvidia.allow-nccl; False for the settings'. `progress`: the path of a progress.Board.
    `asleep`: it is suspended and stays so, whatever Podman makes its runtime pause or resume meanwhile.
    `leave_stopped`: with --leave-running, it is left stopped after its dump, for this process to remove.
    `archive`: the path to which Podman exports the checkpoint, if the archive gets the path `target` then.
    `is_needed`: whether the file stays after the block, for `list_stores`.
    Raises ContainerError if another process has such a file for it, GpusnapError.
    """
    path = _path(container)
    document = {
        "owner": state_files.owner(),
        "container": container,
        "pages": pages,
        "store": store,
        "staging": staging,
        "force": force,
        "progress": progress,
        "asleep": asleep,
        "stopped": leave_stopped,
        "archive": archive,
        "target": target,
    }
    with _hold_lock(path, container):
        try:
            _set_aside(path, store)
            state_files.write(path, json.dumps(document).encode())
        except OSError as error:
            raise _make_unwritable_error(path, error) from error
        try:
            yield
        finally:
            if not is_needed():
                with contextlib.suppress(OSError):
                    state_files.remove(path)


def keep_alone(container: str) -> AbstractContextManager[None]:
    """Keep checkpoints of a container from beginning while the block runs, as a resume of it does.

    Such a checkpoint would have its engine pause it afterwards, as it found it. `container`: its full ID.
    Raises ContainerError if a checkpoint is running, GpusnapError.
    """
    return _hold_lock(_path(container), container, patience=_SWEEPING)


def keep_commands_alone(container: str) -> AbstractContextManager[None]:
    """Keep another checkpoint or suspend from beginning while the commands of a container run around one.

    Also around a command after a restore or a resume. The command after one would undo the command before the
    other. `container`: its full ID. Raises ContainerError if another process holds this, GpusnapError.
    """
    more = "; a command of the container itself, such as pre-checkpoint, cannot do this"
    return _hold_lock(_path(f"{container}.commands"), container, patience=_SWEEPING, more=more)


def _hold_lock(
    path: str, container: str, *, patience: float = 0, more: str = ""
) -> AbstractContextManager[None]:
    """Have the lock of a container's orders, or fail once `patience` (seconds) is over.

    `more`: of the hint.
    """
    busy = ContainerError(
        f"another gpusnap checkpoint, suspend or resume of the container {container[:12]} is in progress",
        hint=f"wait until it has finished{more}",
        code="GPS-020",
    )
    return state_files.lock(
        path.removesuffix(".json") + ".lock",
        patience=patience,
        busy=lambda: busy,
        failed=lambda error: _make_unwritable_error(path, error),
    )


def _make_unwritable_error(path: str, error: OSError) -> GpusnapError:
    lack = advise(error)
    return GpusnapError(
        f"{path} cannot be written: {reason(error)}",
        hint=lack or "run gpusnap as root",
        code="" if lack else "GPS-005",
    )


def apply_orders(settings: Settings, container: str) -> Settings:
    """The settings as ordered for a container; as they are if nobody above this process ordered anything.

    An order says where the chunks go: memory that the settings leave in CRIU's images stays there. It may
    also say who is to be told how far the checkpoint is.
    """
    try:
        document = _read_order(container)
        pages, store = TABLE["memory.pages"].check(document["pages"]), str(document["store"])
        force = document.get("force") is True
        progress = document.get("progress")
    except _UNREADABLE:
        return settings
    if isinstance(progress, str) and progress:
        reporter.report_to(progress)
    if force:
        settings = replace(settings, nvidia=replace(settings.nvidia, allow_nccl=True))
    memory = settings.memory
    if memory.pages != _IN_CRIU:
        memory = replace(memory, pages=pages)
    if store:
        return replace(settings, memory=memory, store=replace(settings.store, path=store))
    return replace(settings, memory=memory)


def find_recipient(container: str) -> Recipient | None:
    """The process above this one that ordered that the memory of a container is handed over to it."""
    from gpusnap.runtime_shim.snapshot.memory.handover import Recipient  # a pause does not need it

    try:
        document = _read_order(container)
        pid, start = document["owner"]
        staging = document["staging"]
    except _UNREADABLE:
        return None
    return Recipient(staging, (int(pid), int(start))) if isinstance(staging, str) and staging else None


def find_remover(container: str) -> tuple[int, int] | None:
    """PID and start time of the process above this one for which a container is left stopped; None if none.

    See snapshot/left_stopped.py.
    """
    try:
        document = _read_order(container)
        pid, start = document["owner"]
        return (int(pid), int(start)) if document.get("stopped") is True else None
    except _UNREADABLE:
        return None


def is_ordered_to_stay(container: str) -> bool:
    """Whether somebody above this process ordered that a suspended container stays as it is."""
    try:
        return _read_order(container).get("asleep") is True
    except _UNREADABLE:
        return False


def list_stores() -> set[str]:
    """The stores that orders name, also those of processes that were killed or left memory there."""
    return {store for each in _read_all() if (store := str(each["store"]))}


def list_ended() -> set[tuple[str, str]]:
    """The container and the store of each order of a killed process that names a store."""
    found = set()
    for each in _read_all():
        with contextlib.suppress(KeyError, TypeError, ValueError):
            pid, start = each["owner"]
            if each["store"] and not proc.is_same(int(pid), int(start)):
                found.add((str(each["container"]), str(each["store"])))
    return found


def list_archives() -> dict[str, str]:
    """The archives to which killed processes had Podman export, and the path that each was to get."""
    found = {}
    for each in _read_all():
        with contextlib.suppress(KeyError, TypeError, ValueError):
            pid, start = each["owner"]
            if each["archive"] and not proc.is_same(int(pid), int(start)):
                found[str(each["archive"])] = str(each["target"])
    return {path: target for path, target in found.items() if _may_exist(path)}


def _read_all() -> Iterator[dict[str, Any]]:
    """Yield all orders that name a store, also an empty one."""
    with contextlib.suppress(OSError):
        for name in os.listdir(FOLDER):
            with contextlib.suppress(*_UNREADABLE):
                if name.endswith(".json"):
                    document = state_files.read(os.path.join(FOLDER, name), limit=_LARGEST)
                    yield {**document, "store": document["store"]}


def _set_aside(path: str, store: str) -> None:
    """Keep the order of a process that has ended, if the next one, for that store, does not name the same.

    Under the container's lock. Raises OSError.
    """
    try:
        document = state_files.read(path, limit=_LARGEST)
        pid, start = document["owner"]
        aside = f"{path.removesuffix('.json')}.{int(pid)}-{int(start)}.json"
        keep = document["store"] not in ("", store) or _may_exist(document.get("archive", ""))
    except _UNREADABLE:
        return
    if keep:
        os.rename(path, aside)


def sweep(stores: Collection[str] = ()) -> None:
    """Remove the orders of processes that were killed. What cannot be removed stays, and counts no more.

    Those that name one of these stores, or an archive that exists, stay: something is left there.
    """
    try:
        names = [name for name in os.listdir(FOLDER) if name.endswith((".json", ".json.new", ".lock"))]
    except OSError:
        return
    for container in {name.removesuffix(".new").rpartition(".")[0] for name in names}:
        # Who has the lock lives; one who comes meanwhile waits for nothing and says that another is at work.
        with contextlib.suppress(GpusnapError, OSError), _hold_lock(_path(container), container):
            if not _names_something_left(_path(container), stores):
                state_files.remove(_path(container))


def _may_exist(path: str) -> bool:
    """Whether a file exists; yes if that cannot be told, on a disk that fails or a server that is silent."""
    try:
        return deadlines.ask(partial(exists, path), path, always=True)
    except OSError:
        return True


def _names_something_left(path: str, stores: Collection[str]) -> bool:
    try:
        document = state_files.read(path, limit=_LARGEST)
        return document["store"] in stores or _may_exist(document.get("archive", ""))
    except (*_UNREADABLE, AttributeError):
        return False


def _read_order(container: str) -> dict[str, Any]:
    """The order for a container, if a process above this one wrote it. Raises one of _UNREADABLE."""
    document = state_files.read(_path(container), limit=_LARGEST)
    pid, start = document["owner"]
    if not (proc.is_same(int(pid), int(start)) and _is_below(int(pid))):
        raise KeyError(container)
    return dict(document)


def _is_below(owner: int) -> bool:
    """Whether this process is that one, or was started by it or by one that it started."""
    pid = os.getpid()
    for _ in range(_FARTHEST):
        if pid == owner:
            return True
        pid = proc.parent(pid)
        if pid <= 0:
            break
    return False


def _path(container: str) -> str:
    if not _ID.fullmatch(container):
        raise GpusnapError(f"{container[:80]!r} is not a container ID")
    return os.path.join(FOLDER, f"{container}.json")
