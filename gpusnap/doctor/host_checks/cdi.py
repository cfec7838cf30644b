"""CDI specifications, by which Podman and containerd give GPUs to containers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from gpusnap.doctor.base.check import Check, failure, make_refused, ok, plural, warning
from gpusnap.doctor.base.sources import join_root
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.gpu.cdi.folders import FOLDERS, load
from gpusnap.runtime_shim.gpu.cdi.spec import CdiError, Spec

_VERSION = compile_later(r"\.so\.(\d{3,4}(?:\.\d{1,3}){1,2})$")
_MAKE = "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"


def driver_versions(spec: Spec) -> frozenset[str]:
    """Return the driver versions of a specification's libraries."""
    edits = (spec.edits, *(device.edits for device in spec.devices))
    paths = (mount.host_path for each in edits for mount in each.mounts)
    return frozenset(match[1] for path in paths if (match := _VERSION.search(path)))


def list_mounted(folders: Iterable[str] = FOLDERS) -> frozenset[str]:
    """Return the container paths of the files and folders that come with NVIDIA's and AMD's GPUs."""
    specs = load(folders, report=lambda error: None)
    ours = [spec for spec in specs if spec.kind.startswith(("nvidia.com/", "amd.com/"))]
    edits = (each for spec in ours for each in (spec.edits, *(device.edits for device in spec.devices)))
    paths = (os.path.normpath(mount.container_path) for each in edits for mount in each.mounts)
    return frozenset(path for path in paths if path != "/")


def check(driver: str, root: str = "/", folders: Iterable[str] = FOLDERS) -> Iterator[Check]:
    """Check that the files are valid and for the running driver; `driver` is its version, or empty."""
    broken: list[CdiError] = []
    specs = load([join_root(root, folder) for folder in folders], report=broken.append)
    for error in broken:
        yield make_refused("CDI", error, _MAKE)
    ours = [spec for spec in specs if spec.kind.startswith("nvidia.com/")]
    if not driver:
        return
    if not ours:
        if not broken:
            yield warning("CDI", f"no specification for NVIDIA's GPUs in {' or '.join(folders)}", _MAKE)
        return
    for spec in ours:
        yield _check_spec(spec, driver, root)


def _check_spec(spec: Spec, driver: str, root: str) -> Check:
    other = sorted(driver_versions(spec) - {driver})
    names = [device.name for device in spec.devices]
    facts = {"path": spec.path, "kind": spec.kind, "devices": names}
    if other:
        return failure(
            "CDI",
            f"{spec.path} was made for driver {', '.join(other)}, but the running driver is {driver}",
            _MAKE,
            **facts,
            driver=other,
        )
    edits = (spec.edits, *(device.edits for device in spec.devices))
    sources = dict.fromkeys(mount.host_path for each in edits for mount in each.mounts)
    missing = [path for path in sources if not os.path.lexists(join_root(root, path))]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        says = f"{spec.path} mounts {missing[0]}{more}, which this host does not have"
        return failure("CDI", says, _MAKE, **facts, missing=missing)
    return ok("CDI", f"{spec.path}: {spec.kind}, {plural(len(names), 'device')}", **facts)
