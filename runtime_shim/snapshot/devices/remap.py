"""Plans the changes that let a container run on the GPUs of a plan.

    manifest + plan + this host ─→ device nodes ─→ config.json, CRIU's image of /dev, bind-mounted nodes
                                └→ sources of mounts: the driver's files and the GPUs' own directories in
                                /proc

Everything here is decided before the runtime is called, from the manifest and from this host. The checkpoint
itself is never changed. The archive may come from anywhere, but it cannot name a device: a node always
becomes a node of this host for a GPU of the plan, and a device in /dev that neither config.json nor the
manifest knows is refused.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.files import open_below
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, Refused, raise_as
from gpusnap.runtime_shim.gpu.api.device_nodes import Change, plan_changes
from gpusnap.runtime_shim.gpu.api.driver import Driver, Gpu, Host, Node
from gpusnap.runtime_shim.gpu.nvidia.driver_files import DriverFiles, explain_difference, find_counterpart
from gpusnap.runtime_shim.records.manifest import DriverMount, Manifest
from gpusnap.runtime_shim.runtime import bundle
from gpusnap.runtime_shim.runtime.criu.images import dev
from gpusnap.runtime_shim.snapshot.devices import bind_mounted_nodes

_PROC_GPU = compile_later(r"(/proc/driver/nvidia/gpus/)([0-9a-f:.]+)")
_SEEN = 8
"""Names in one message."""


@dataclass(frozen=True, slots=True)
class Remap:
    """All changes of a restore; empty if nothing changes."""

    pairs: tuple[tuple[str, str], ...]
    """(old UUID, new UUID) of every GPU."""
    edits: bundle.Edits
    mounts: tuple[DriverMount, ...]
    """The driver's undeclared mounts, with this host's sources."""
    expected: tuple[Node, ...]
    """The GPU nodes that the container is to have."""
    moved_libraries: bool
    """Whether a file of the driver has another path than at the checkpoint."""

    @property
    def identity(self) -> bool:
        """Whether every GPU stays the same."""
        return all(old == new for old, new in self.pairs)

    def list_pairs(self, uuids: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Return the pairs for a process that could see these GPUs; none if nothing has changed."""
        new = dict(self.pairs)
        return () if self.identity else tuple((uuid, new[uuid]) for uuid in uuids)


def make(
    record: Manifest,
    driver: Driver,
    host: Host,
    pairs: Sequence[tuple[str, str]],
    config: Mapping[str, Any],
    *,
    known: Callable[[], DriverFiles],
    keep_names: bool,
) -> Remap:
    """Return the changes for a restore of `record` with these pairs; `config`: the bundle's, unchanged.

    `known` returns this host's driver files; it is called only if one is not at its old path. Raises Refused.
    """
    if any(old != new for old, new in pairs) and not record.nodes:
        raise Refused(
            "the checkpoint does not list the device nodes of its container, so it cannot move to other GPUs",
            hint="restore it on its original GPUs",
            code="GPS-406",
        )
    here = driver.nodes()
    old = record.nodes
    found = plan_changes(old, here, pairs, keep_names=keep_names)
    expected = _list_nodes_after(old, found)
    bound = {
        str(mount.get("destination")): source
        for mount in bundle.binds(config)
        if isinstance(source := mount.get("source"), str)
    }
    moved = _HostPaths(record, host, pairs, here, known, list(bound.values()))
    at = _mounted_nodes(old, found, here)
    sources = {where: at.get(where) or moved.source(source) for where, source in bound.items()}
    mounts = tuple(replace(m, source=at.get(m.destination) or moved.source(m.source)) for m in record.mounts)
    _refuse_other_builds(record, sources | {mount.destination: mount.source for mount in mounts})
    numbers = {(node.major, node.minor) for node in expected}
    strange = tuple(node for node in here if node.gpu and (node.major, node.minor) not in numbers)
    _refuse_strange_mounts((*sources.values(), *(mount.source for mount in mounts)), strange)
    return Remap(
        pairs=tuple(pairs),
        edits=bundle.Edits(found, sources, strange),
        mounts=mounts,
        expected=expected,
        moved_libraries=moved.libraries,
    )


@dataclass(slots=True)
class _HostPaths:
    """This host's paths for the sources of mounts: a GPU's node, its directory in /proc, or a driver file."""

    record: Manifest
    host: Host
    pairs: Sequence[tuple[str, str]]
    here: Sequence[Node]
    known: Callable[[], DriverFiles]
    among: Sequence[str]
    """The sources of all bind mounts in config.json."""
    libraries: bool = False
    """Whether a file of this host replaces one that is missing here."""

    def source(self, path: str) -> str:
        """Return this host's path for the source of a mount; unchanged if it is no GPU's and no driver's."""
        gpu = self._gpu(path)
        if gpu is not None:
            return next(
                (node.path for node in self.here if node.gpu == gpu and _is_like(node.path, path)), path
            )
        if match := _PROC_GPU.fullmatch(path):
            return match[1] + self._pci(match[2])
        if os.path.exists(path) or not self.record.host.driver_version:
            return path
        old, new = self.record.host.driver_version, self.host.driver_version
        there = find_counterpart(path, old, new, self.known(), among=self.among)
        self.libraries = self.libraries or there is not None
        return there or path

    def _gpu(self, path: str) -> str | None:
        """Return the UUID of the GPU here that replaces the one with this node on the old host."""
        of = dict(self.pairs)
        for gpu in self.record.gpus:
            if path == f"/dev/nvidia{gpu.minor}":
                return of.get(gpu.uuid)
        return next((of.get(n.gpu) for n in self.record.nodes if n.gpu and n.path == path), None)

    def _pci(self, address: str) -> str:
        of, here = dict(self.pairs), {gpu.uuid: gpu for gpu in self.host.gpus}
        for gpu in self.record.gpus:
            target: Gpu | None = here.get(of.get(gpu.uuid, ""))
            if gpu.pci and address.endswith(gpu.pci[-12:]) and target is not None and target.pci:
                return target.pci
        return address


def _mounted_nodes(old: Sequence[Node], found: Sequence[Change], here: Sequence[Node]) -> dict[str, str]:
    """Return this host's node by the path of the container's, in case that is a mount there.

    A node that changes has its new numbers at once, and `settle` moves it. One that stays is that of its
    name, though it may belong to another GPU of the container now.
    """
    of = {(node.major, node.minor): node.path for node in here}
    after = {node.path: node for node in old} | {
        change.old.path: change.new[0] for change in found if change.new
    }
    return {path: of[n.major, n.minor] for path, n in after.items() if (n.major, n.minor) in of}


def _refuse_strange_mounts(sources: Iterable[str], strange: Sequence[Node]) -> None:
    """Refuse a mount of a GPU that the plan does not give to the container."""
    numbers = {(node.major, node.minor): node for node in strange}
    for source in sources:
        try:
            found = os.stat(source)
        except OSError:
            continue
        node = numbers.get((os.major(found.st_rdev), os.minor(found.st_rdev)))
        if stat.S_ISCHR(found.st_mode) and node is not None:
            raise Refused(
                f"the checkpoint asks to mount {source}, the device of GPU {node.gpu}, which does not "
                "belong to it",
                code="GPS-604",
            )


def _is_like(one: str, other: str) -> bool:
    return one.rstrip("0123456789") == other.rstrip("0123456789")


def _list_nodes_after(old: Sequence[Node], found: Sequence[Change]) -> tuple[Node, ...]:
    """Return the container's nodes after the changes, sorted; without their GPUs."""
    gone = {change.old.path for change in found}
    stay = [Node(node.path, node.major, node.minor) for node in old if node.path not in gone]
    return tuple(sorted({*stay, *(node for change in found for node in change.new)}))


def _refuse_other_builds(record: Manifest, sources: Mapping[str, str]) -> None:
    """Refuse if a process has loaded code of the driver that this host has in another build.

    CRIU compares a mapped file by size, mode and build ID (criu/files-reg.c, validate_file), which would fail
    only in the middle of the restore. `sources`: this host's, by destination.
    """
    at = {os.path.normpath(destination): source for destination, source in sources.items()}
    for library in record.libraries:
        path = at.get(library.path)
        if path is None:
            continue
        why = explain_difference(path, library.size, library.build_id, mode=library.mode)
        if why:
            raise Refused(
                f"the container's processes execute {library.path} of driver "
                f"{record.host.driver_version}, but {why}",
                hint="a process cannot change the driver code that it is executing: restore on a host "
                "with the same driver build",
                code="GPS-405",
            )


def image(record: Manifest, image_path: str, found: Remap, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return CRIU's images that are replaced for the restore, by name. Raises ImageError.

    `config`: the bundle's, unchanged: its devices are those that /dev may contain beside a GPU's nodes.
    """
    if not record.dev:
        return {}
    path = os.path.join(image_path, record.dev)
    strange = {(node.major, node.minor) for node in found.edits.strange}
    listed = (each for each in iterate_given(config) if each[0] == "b" or each[1:3] not in strange)
    allowed: tuple[Node | dev.Device, ...] = (*listed, *found.expected)
    with raise_as(
        ImageError, f"the image of the container's /dev, {path}, cannot be read", errors=(OSError, ValueError)
    ):
        raw, _ = open_below(image_path, record.dev)
        with io.BufferedReader(raw) as file:
            new = dev.rewrite(file, found.edits.changes, allowed)
    return {} if new is None else {record.dev: new}


def iterate_given(config: Mapping[str, Any]) -> Iterator[dev.Device]:
    """Yield the devices that config.json gives the container."""
    for entry in bundle.devices(config):
        path, major, minor = entry.get("path"), entry.get("major"), entry.get("minor")
        if isinstance(path, str) and isinstance(major, int) and isinstance(minor, int):
            yield "b" if entry.get("type") == "b" else "c", major, minor, path


def settle(init: int, found: Remap, driver: Driver) -> None:
    """Change in the restored container what no image contains: nodes that are bind mounts. Then check.

    To be called while the GPU processes are stopped. Raises GpusnapError if the container's GPU nodes are not
    those of the plan.
    """
    mounted = {path for path, _, _ in bind_mounted_nodes.mounted_nodes(init)}
    bind_mounted_nodes.replace_nodes(
        init, [change for change in found.edits.changes if change.old.path in mounted]
    )
    if _has_hosts_dev(init):
        return
    now = tuple(sorted(Node(n.path, n.major, n.minor) for n in driver.nodes(init)))
    if now != found.expected:
        raise GpusnapError(
            f"the container has the GPU devices {_names(now)} after the restore, but should have "
            f"{_names(found.expected)}",
            hint="another program changes its /dev",
        )


def _has_hosts_dev(init: int) -> bool:
    """Whether the container was given this host's /dev itself, and so has all of its nodes."""
    with contextlib.suppress(OSError):
        place = f"/proc/{init}/root/dev"
        found = question_process.stat_files(init, [place])[place]
        return not isinstance(found, OSError) and found.st_dev == os.stat("/dev").st_dev
    return False


def _names(nodes: Sequence[Node]) -> str:
    words = [f"{node.path} ({node.major}:{node.minor})" for node in nodes[:_SEEN]]
    return ", ".join(words + ["…"] * (len(nodes) > _SEEN)) or "none"
