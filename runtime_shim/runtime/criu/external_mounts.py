"""The driver's mounts that config.json does not list, so that neither crun nor runc declares them to CRIU.

NVIDIA's legacy runtime and some hooks mount driver libraries, firmware and /proc/driver/nvidia into the
container without the runtime's knowledge. CRIU refuses such a mount ("unreachable sharing", "doesn't have a
proper root mount"; criu#2472, cuda-checkpoint#19) unless it is declared as external. A tmpfs that a hook made
inside the container, and binds of its files, are not declared: CRIU dumps them itself.

A manifest from elsewhere must not bring any path of this host into a container, so both ends of such a mount
must be the driver's own files, or nodes of its GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.gpu.nvidia.driver_files import is_driver_file
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records.manifest import DriverMount

# A GPU's node that was bind-mounted and has moved: config.json contains its old name.
_NODE = compile_later(
    r"/dev/(?:nvidia(?:\d{1,3}|ctl|-uvm|-uvm-tools|-modeset)|dri/(?:renderD|card)\d{1,4}|kfd)"
)


def list_undeclared(init: int, config: dict[str, Any]) -> tuple[tuple[DriverMount, ...], bool]:
    """Return the driver's mounts to declare to CRIU, and whether one is in a peer group of the host's."""
    known = {os.path.normpath(str(mount.get("destination", ""))) for mount in config.get("mounts") or ()}
    found: list[DriverMount] = []
    masters = False
    for mount in proc.mounts(init):
        if mount.destination in known or not _is_ours(mount.destination):
            continue
        source = proc.host_path(mount)
        if source is None or not question_process.ask(
            init, mount.destination, _is_same_file, source, f"/proc/{init}/root{mount.destination}"
        ):
            continue
        known.add(mount.destination)  # mounted on itself again, it is one mount to CRIU
        found.append(DriverMount(f"gpusnap-{len(found)}", mount.destination, source))
        masters = masters or bool(mount.tags)
    return tuple(found), masters


def check_mounts(mounts: Sequence[DriverMount], here: Sequence[DriverMount] | None = None) -> None:
    """Refuse a manifest's mounts that are not the driver's, or whose source this host does not have.

    `here`: the same with this host's sources for them, from snapshot/devices/remap.py.
    """
    for mount, ours in zip(mounts, here or mounts, strict=True):
        chosen = ours.source != mount.source  # then it is this host's choice, and not the manifest's
        for path in (mount.destination, mount.source, *(() if chosen else [os.path.realpath(mount.source)])):
            if not _is_ours(path):
                raise Refused(
                    f"the manifest asks to mount {path}, which is not a GPU driver file", code="GPS-604"
                )
        if not os.path.exists(ours.source):
            raise Refused(
                f"the container had the driver's {mount.source} mounted, but this host does not have it",
                hint="install the same driver version here",
                code="GPS-405",
            )


def _is_ours(path: str) -> bool:
    return is_driver_file(path) or bool(_NODE.fullmatch(path))


def _is_same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
