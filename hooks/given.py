"""Finds the GPUs that a container is given, in its configuration (runtime-spec, config-linux.md, Devices).

NVIDIA: the nodes /dev/nvidia*, and the driver's files as nvidia-ctk's CDI specification mounts them. AMD:
/dev/kfd, with the render nodes in /dev/dri; render nodes alone may belong to any other GPU.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from gpusnap.oci.base.patterns import compile_later

_DRIVER_FILE = compile_later(
    r"""(?x) .*/(?:
        lib(?:cuda|cudadebugger|nvcuvid|nvoptix|nvidia-[\w-]+|(?:GLX|EGL|vdpau|GLESv1_CM|GLESv2)_nvidia)\.so[\w.]*
        | firmware/(?:updates/)?(?:[^/]+/)?nvidia/.+
        | s?bin/nvidia-[\w-]+
        | run/nvidia-(?:persistenced|fabricmanager)/socket
        | proc/driver/nvidia(?:/.*)?
    )"""
)
_VERSIONED = compile_later(r"/lib(?:cuda|nvidia-ml)\.so\.(\d{2,4}(?:\.\d{1,4}){1,2})$")
_CDI = "cdi.k8s.io/"


def is_named_as_drivers(path: str) -> bool:
    """Whether a path ends like that of a file of NVIDIA's driver, wherever it is.

    A mount of such a file gets an option that does no harm to other mounts.
    gpu.nvidia.driver_files.is_driver_file is the stricter check for the manifest of a checkpoint.
    """
    return _DRIVER_FILE.fullmatch(path) is not None


def _is_node(path: str) -> bool:
    return path.startswith("/dev/nvidia") or path == "/dev/kfd"


def _objects(config: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """Return the objects in an array of a configuration that may not have been checked yet."""
    place: Any = config
    for name in names:
        place = place.get(name) if isinstance(place, dict) else None
    return [each for each in place if isinstance(each, dict)] if isinstance(place, list) else []


def _word(entry: dict[str, Any], name: str) -> str:
    value = entry.get(name)
    return value if isinstance(value, str) else ""


def has_gpu(config: dict[str, Any]) -> bool:
    """Whether the configuration gives the container a GPU: a node of one, or the driver's libcuda."""
    if any(_is_node(_word(device, "path")) for device in _objects(config, "linux", "devices")):
        return True
    return any(
        _is_node(path) or "/libcuda.so" in path
        for mount in _objects(config, "mounts")
        for path in (_word(mount, "source"), _word(mount, "destination"))
    )


def nodes(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the GPUs' device nodes, by path in the container: path, major, minor; also mounted ones."""
    found: dict[str, tuple[int, int]] = {}
    for device in _objects(config, "linux", "devices"):
        major, minor = device.get("major"), device.get("minor")
        if isinstance(major, int) and isinstance(minor, int):
            found[_word(device, "path")] = (major, minor)
    for mount in _objects(config, "mounts"):
        numbers = _numbers(_word(mount, "source"))
        if numbers is not None:
            found[_word(mount, "destination")] = numbers
    amd = "/dev/kfd" in found
    return [
        {"path": path, "major": major, "minor": minor}
        for path, (major, minor) in sorted(found.items())
        if _is_node(path) or (amd and path.startswith("/dev/dri/"))
    ]


def _numbers(source: str) -> tuple[int, int] | None:
    """Return major and minor of a node on this host, for a bind mount of it (by a rootless engine)."""
    if not (_is_node(source) or source.startswith("/dev/dri/")):
        return None
    try:
        found = os.stat(source)
    except (OSError, ValueError):
        return None
    return (os.major(found.st_rdev), os.minor(found.st_rdev)) if stat.S_ISCHR(found.st_mode) else None


def cdi_names(config: dict[str, Any]) -> list[str]:
    """Return the CDI devices named by annotations, e.g. nvidia.com/gpu=0 (CDI, SPEC.md); Podman sets none."""
    annotations = config.get("annotations") or {}
    values = (value for name, value in annotations.items() if name.startswith(_CDI))
    return sorted({name.strip() for value in values for name in value.split(",") if name.strip()})


def visible_devices(config: dict[str, Any]) -> str:
    """Return NVIDIA_VISIBLE_DEVICES of the container's environment; "void" from a CDI specification."""
    entries = (config.get("process") or {}).get("env") or ()
    prefix = "NVIDIA_VISIBLE_DEVICES="
    return next((entry.removeprefix(prefix) for entry in reversed(entries) if entry.startswith(prefix)), "")


def driver_version(config: dict[str, Any]) -> str:
    """Return the driver's version, which is in the names of its libraries; empty if none is mounted."""
    for mount in _objects(config, "mounts"):
        for path in (_word(mount, "source"), _word(mount, "destination")):
            if match := _VERSIONED.search(path):
                return match[1]
    return ""
