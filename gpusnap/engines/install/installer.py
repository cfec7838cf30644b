"""Installs and removes files of `gpusnap install` on a host, and keeps the record of them.

A file in one of its recorded states is ours; any other belongs to somebody else, and is neither replaced nor
removed without `force`. The record is written before the first file, with the present and the new states, and
again after the last one, each time atomically: if an installation is killed at any moment, the next one
completes it, and `uninstall` removes its files. The record lists a folder if the installation made it; it is
removed when it is empty. The record's own folder must exist before the record: until the record says whose it
is, and while it is removed, the sticky bit marks it as made by us.

Paths are those of the host; with `root`, the files are in that tree instead, for images of hosts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from gpusnap.engines.install import files
from gpusnap.engines.install.files import check_inside, file_state, join_root, state
from gpusnap.engines.install.record import RECORD, Entry, Record, load, save
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.files import sync_folder
from gpusnap.oci.base.locks import try_exclusive
from gpusnap.runtime_shim.base.errors import GpusnapError, advise, reason

_OWN = os.path.dirname(RECORD)
_OWN_MODE = 0o755


@dataclass(frozen=True, slots=True)
class Item:
    """A file, or with `target` a symbolic link, to install."""

    path: str
    part: str
    """The part of the installation: runtime, settings, podman, containerd, crio."""
    data: bytes = b""
    mode: int = 0o644
    target: str = ""
    yields: bool = False
    """An existing file is kept, whatever its content."""

    @property
    def state(self) -> str:
        """Return its state after the installation."""
        return f"link:{self.target}" if self.target else file_state(self.data, self.mode)


@dataclass(frozen=True, slots=True)
class Change:
    """What was done with a path, or would be."""

    what: str
    """written, replaced, unchanged, kept (an existing file, by intention), removed, gone (it was already
    missing), left (somebody changed it)."""
    path: str


def install(
    items: Sequence[Item],
    *,
    parts: Collection[str] | None = None,
    root: str = "/",
    force: bool = False,
    dry_run: bool = False,
) -> list[Change]:
    """Install the items in their order, and remove stale ones that an earlier call installed for these parts.

    parts: the parts that are installed, if the items do not show them. A stale file that somebody has changed
    since is kept, even with `force`. Raises GpusnapError, before anything is changed, if somebody else's file
    is in the way and `force` is not given, or a link leads out of the tree; also if a file cannot be written,
    after which the same call continues the work.
    """
    parts = {item.part for item in items} if parts is None else parts
    _check_tree(root, (item.path for item in items))
    before = load(root)
    foreseen = [Change(_verdict(item, before, root, force), item.path) for item in items]
    if dry_run:
        stale = _list_stale(items, parts, before)
        return foreseen + [_remove_entry(each, root, False, dry_run=True) for each in stale]
    with _hold_lock(root):
        return _install(items, parts, root, force)


def _check_tree(root: str, paths: Iterator[str]) -> None:
    record = load(root)
    for path in (*paths, *(each.path for each in record.entries), *record.folders):
        check_inside(root, path)


def _install(items: Sequence[Item], parts: Collection[str], root: str, force: bool) -> list[Change]:
    before = load(root)
    plan = [(item, _verdict(item, before, root, force)) for item in items]
    stale = _list_stale(items, parts, before)
    ours = [item for item, what in plan if what in ("written", "replaced") or before.entry(item.path)]
    made = [_OWN] if _is_marked(root) else []
    folders = tuple(dict.fromkeys((*before.folders, *made, *_list_missing(ours, root))))
    under_way = Record(_entries(before, [_make_pending_entry(item, before) for item in ours]), folders)
    save(under_way, root, before)
    if made:
        os.chmod(join_root(root, _OWN), _OWN_MODE)
    changes = []
    for item, what in plan:
        if what in ("written", "replaced"):
            _put(item, root)
        changes.append(Change(what, item.path))
    changes += [_remove_entry(each, root, False, dry_run=False) for each in stale]
    done = _entries(under_way, [Entry(item.path, item.part, (item.state,)) for item in ours])
    kept = tuple(each for each in done if each not in stale)
    save(Record(kept, folders), root, under_way)
    return changes


def _entries(before: Record, new: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return a record's entries with new ones replaced or appended: the last one is removed first."""
    by_path = {each.path: each for each in new}
    places = [by_path.pop(each.path, each) for each in before.entries]
    return (*places, *by_path.values())


def _verdict(item: Item, before: Record, root: str, force: bool) -> str:
    path = join_root(root, item.path)
    now = state(path)
    entry = before.entry(item.path)
    if now is None:
        return "written"
    if now == item.state:
        return "unchanged"
    if entry is not None and now in entry.states:
        return "replaced"
    if item.yields:
        return "kept"
    if force and now != "other":
        return "replaced"
    raise GpusnapError(
        f"{path} already exists, and differs from what gpusnap would write",
        hint="inspect it, and move it away"
        if now == "other"
        else "inspect it, and give --force to replace it",
    )


def _make_pending_entry(item: Item, before: Record) -> Entry:
    entry = before.entry(item.path)
    earlier = entry.states if entry is not None else ()
    return Entry(item.path, item.part, tuple(dict.fromkeys((*earlier, item.state))))


def _list_stale(items: Sequence[Item], parts: Collection[str], before: Record) -> list[Entry]:
    paths = {item.path for item in items}
    return [each for each in before.entries if each.part in parts and each.path not in paths]


def _list_missing(items: Sequence[Item], root: str) -> Iterator[str]:
    """Yield the folders to make, each before its contents."""
    seen: set[str] = set()
    for item in items:
        wanted = []
        folder = os.path.dirname(item.path)
        while folder not in seen and not os.path.isdir(join_root(root, folder)):
            seen.add(folder)
            wanted.append(folder)
            folder = os.path.dirname(folder)
        yield from reversed(wanted)


def uninstall(*, root: str = "/", force: bool = False, dry_run: bool = False) -> list[Change]:
    """Remove everything in the record, the last first, and then the record.

    Files that somebody changed are kept without `force`. Raises GpusnapError if something cannot be removed;
    then the record is unchanged, and the same call continues the work.
    """
    _check_tree(root, iter(()))
    record = load(root)
    if dry_run:
        return [_remove_entry(each, root, force, dry_run=True) for each in reversed(record.entries)]
    path = join_root(root, RECORD)
    if not os.path.lexists(path):
        # A call that was killed at its very beginning, or at its very end, left only this.
        files.unlink(files.make_pending_name(path))
        _leave(root)
        return []
    with _hold_lock(root):
        record = load(root)
        changes = [_remove_entry(each, root, force, dry_run=False) for each in reversed(record.entries)]
        for folder in reversed(record.folders):
            files.remove_folder(join_root(root, folder))
        files.unlink(files.make_pending_name(path))
        if _OWN in record.folders:
            os.chmod(join_root(root, _OWN), _OWN_MODE | stat.S_ISVTX)
        files.unlink(path)
        _leave(root)
    return changes


def _remove_entry(entry: Entry, root: str, force: bool, *, dry_run: bool) -> Change:
    """Remove it, unless it is somebody else's; return what was done."""
    path = join_root(root, entry.path)
    now = state(path)
    if not dry_run:
        files.unlink(files.make_pending_name(path))
    if now is None:
        return Change("gone", entry.path)
    if now not in entry.states and (not force or now == "other"):
        return Change("left", entry.path)
    if not dry_run:
        files.unlink(path)
    return Change("removed", entry.path)


def _put(item: Item, root: str) -> None:
    path = join_root(root, item.path)
    try:
        files.make_folder(os.path.dirname(path))
        if item.target:
            files.put_link(path, item.target)
        else:
            files.put_file(path, item.data, item.mode)
    except OSError as error:
        raise GpusnapError(
            f"{path} cannot be written: {reason(error)}",
            hint=advise(error) or "run it as root",
            code="GPS-005",
        ) from error


def _is_marked(root: str) -> bool:
    """Return whether the record's folder was made by us, and there is no record yet."""
    try:
        return bool(os.stat(join_root(root, _OWN)).st_mode & stat.S_ISVTX)
    except OSError:
        return False


def _leave(root: str) -> None:
    """Remove the record's folder if it was made by us, and is empty."""
    if _is_marked(root):
        files.remove_folder(join_root(root, _OWN))
        with suppress(OSError):
            os.chmod(join_root(root, _OWN), _OWN_MODE)


@contextmanager
def _hold_lock(root: str) -> Iterator[None]:
    """Exclude other installations. Makes and marks the record's folder."""
    folder = join_root(root, _OWN)
    try:
        files.make_folder(os.path.dirname(folder))
        with suppress(FileExistsError):
            os.mkdir(folder, _OWN_MODE | stat.S_ISVTX)
            sync_folder(os.path.dirname(folder))
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise GpusnapError(
            f"the directory {folder} cannot be created: {reason(error)}",
            hint=advise(error) or "run it as root",
            code="GPS-005",
        ) from error
    try:
        if not try_exclusive(descriptor):
            raise GpusnapError(
                "another gpusnap install or uninstall is running", hint="run it again when that has finished"
            )
        yield
    finally:
        os.close(descriptor)
