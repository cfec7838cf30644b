"""The GPUs in a container's configuration (runtime-spec, config-linux.md, Devices).

NVIDIA: the nodes /dev/nvidia*, and the driver's files as nvidia-ctk's CDI specification mounts them. AMD:
/dev/kfd, with the render nodes in /dev/dri; render nodes alone may belong to any other GPU.

Every container of the host waits for this module's import, so it imports no other that takes long.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False  # not from typing, because every container would have to wait for its import
if TYPE_CHECKING:
    from typing import Any

_DRIVER_FILE = r"""(?x) .*/(?:
        lib(?:cuda|cudadebugger|nvcuvid|nvoptix|nvidia-[\w-]+|(?:GLX|EGL|vdpau|GLESv1_CM|GLESv2)_nvidia)\.so[\w.]*
        | firmware/(?:updates/)?(?:[^/]+/)?nvidia/.+
        | s?bin/nvidia-[\w-]+
        | run/nvidia-(?:persistenced|fabricmanager)/socket
        | proc/driver/nvidia(?:/.*)?
    )"""
_VERSIONED = r"/lib(?:cuda|nvidia-ml)\.so\.(\d{2,4}(?:\.\d{1,4}){1,2})$"
_CDI = "cdi.k8s.io/"
# A part of a node's or of a library's path, in every configuration of a container with a GPU.
_PARTS = (b"nvidia", b"kfd", b"libcuda")


def may_have_gpu(config: bytes) -> bool:
    """Whether a configuration, as JSON, may give the container a GPU; `has_gpu` parses it to be sure."""
    return any(part in config for part in _PARTS)


def is_named_as_drivers(path: str) -> bool:
    """Whether a path ends like that of a file of NVIDIA's driver, wherever it is.

    A mount of such a file gets an option that does no harm to other mounts.
    gpu.nvidia.driver_files.is_driver_file is the stricter check for the manifest of a checkpoint.
    """
    import re

    return re.fullmatch(_DRIVER_FILE, path) is not None


def _is_node(path: str) -> bool:
    return path.startswith("/dev/nvidia") or path == "/dev/kfd"


def _list_objects(config: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """Return the objects in an array of a configuration that may not have been checked yet."""
    found: Any = config
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _get_text(entry: dict[str, Any], name: str) -> str:
    value = entry.get(name)
    return value if isinstance(value, str) else ""


def has_gpu(config: dict[str, Any]) -> bool:
    """Whether the configuration gives the container a GPU: a node of one, or the driver's libcuda."""
    if any(_is_node(_get_text(device, "path")) for device in _list_objects(config, "linux", "devices")):
        return True
    return any(
        _is_node(path) or "/libcuda.so" in path
        for mount in _list_objects(config, "mounts")
        for path in (_get_text(mount, "source"), _get_text(mount, "destination"))
    )


def list_nodes(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the GPUs' device nodes, by path in the container: path, major, minor; also mounted ones."""
    found: dict[str, tuple[int, int]] = {}
    for device in _list_objects(config, "linux", "devices"):
        major, minor = device.get("major"), device.get("minor")
        if isinstance(major, int) and isinstance(minor, int):
            found[_get_text(device, "path")] = (major, minor)
    for mount in _list_objects(config, "mounts"):
        numbers = _stat_node(_get_text(mount, "source"))
        if numbers is not None:
            found[_get_text(mount, "destination")] = numbers
    amd = "/dev/kfd" in found
    return [
        {"path": path, "major": major, "minor": minor}
        for path, (major, minor) in sorted(found.items())
        if _is_node(path) or (amd and path.startswith("/dev/dri/"))
    ]


def _stat_node(source: str) -> tuple[int, int] | None:
    """Return major and minor of a node on this host, for a bind mount of it (by a rootless engine)."""
    if not (_is_node(source) or source.startswith("/dev/dri/")):
        return None
    try:
        found = os.stat(source)
    except (OSError, ValueError):
        return None
    return (os.major(found.st_rdev), os.minor(found.st_rdev)) if stat.S_ISCHR(found.st_mode) else None


def list_cdi_names(config: dict[str, Any]) -> list[str]:
    """Return the CDI devices named by annotations, e.g. nvidia.com/gpu=0 (CDI, SPEC.md); Podman sets none."""
    annotations = config.get("annotations") or {}
    values = (value for name, value in annotations.items() if name.startswith(_CDI))
    return sorted({name.strip() for value in values for name in value.split(",") if name.strip()})


def find_visible_devices(config: dict[str, Any]) -> str:
    """Return NVIDIA_VISIBLE_DEVICES of the container's environment; CDI specifications set it to "void"."""
    entries = (config.get("process") or {}).get("env") or ()
    prefix = "NVIDIA_VISIBLE_DEVICES="
    return next((entry.removeprefix(prefix) for entry in reversed(entries) if entry.startswith(prefix)), "")


def find_driver_version(config: dict[str, Any]) -> str:
    """Return the driver's version, which is in the names of its libraries; empty if none is mounted."""
    import re

    for mount in _list_objects(config, "mounts"):
        for path in (_get_text(mount, "source"), _get_text(mount, "destination")):
            if match := re.search(_VERSIONED, path):
                return match[1]
    return ""
