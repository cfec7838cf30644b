"""Chooses the GPUs of a restore: their driver, those given to a pod, requests, and the plan."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from gpusnap.runtime_shim.base.errors import Refused, UsageError
from gpusnap.runtime_shim.gpu import driver_of
from gpusnap.runtime_shim.gpu.api.criu_plugin import KNOWN, Plugin
from gpusnap.runtime_shim.gpu.api.driver import Driver, Host
from gpusnap.runtime_shim.gpu.api.gpu_map import GPU_MAP, GpuMap, is_meant, parse_map
from gpusnap.runtime_shim.gpu.assignment import Plan, plan_assignment
from gpusnap.runtime_shim.records import cri_layout, manifest
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.snapshot.devices import remap

# Of NVIDIA's container toolkit, by its current and its former name.
_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")
# Annotations that containerd's CRI plugin and CRI-O (pkg/annotations) give every container.
_OF_KUBERNETES = (cri_layout.OF_CRI, "io.kubernetes.cri-o.ContainerType")


def choose_driver(record: manifest.Manifest, found: Driver | None) -> Driver | None:
    """Return the driver that restores a checkpoint, with the method that made it, which is the only one.

    `found` is this host's first driver. None if this host has no driver for such a checkpoint.
    """
    if found is not None and found.vendor == record.host.vendor and _name(found.plugin) == record.plugin:
        return found
    return driver_of(record.host.vendor, record.plugin)


def _name(plugin: Plugin | None) -> str:
    return plugin.name if plugin is not None else ""


def driver_for(record: manifest.Manifest, driver: Driver | None) -> Driver | None:
    """Return the driver for the checkpoint's GPUs; None if it has none, or did not use them. May refuse."""
    if not record.processes and (driver is None or driver.vendor != record.host.vendor):
        return None
    if driver is None or driver.vendor != record.host.vendor:
        count, model = len(record.gpus), record.gpus[0].model if record.gpus else "unknown"
        raise Refused(
            f"the checkpoint holds the state of {count} GPU{'s' if count > 1 else ''} ({model}), but this "
            f"host has no {record.host.vendor.upper()} driver",
            hint="restore it on a host with such GPUs",
            code="GPS-401",
        )
    return driver


def list_given(driver: Driver, config: dict[str, Any]) -> Collection[str] | None:
    """Return UUIDs of the GPUs of a pod's container, whose configuration is made anew from the pod's own.

    None if the configuration is the old container's, or leaves its GPUs to a hook of NVIDIA's runtime.
    """
    if containers.bundle_annotations(config).keys().isdisjoint(_OF_KUBERNETES):
        return None
    numbers = {(major, minor) for kind, major, minor, _ in remap.iterate_given(config) if kind == "c"}
    found = {node.gpu for node in driver.nodes() if node.gpu and (node.major, node.minor) in numbers}
    return None if not found and _is_given_by_hook(config) else found


def _is_given_by_hook(config: dict[str, Any]) -> bool:
    """Whether NVIDIA's own runtime has changed the configuration, whose hook gives GPUs at the start."""
    hooks = config.get("hooks") if isinstance(config.get("hooks"), dict) else {}
    entries = [each for name in ("prestart", "createRuntime") for each in (hooks or {}).get(name) or ()]
    paths = [str(each.get("path", "")) for each in entries if isinstance(each, dict)]
    return any(os.path.basename(path) in _HOOKS for path in paths)


def choose(
    record: manifest.Manifest,
    host: Host,
    request: GpuMap,
    otherwise: GpuMap,
    reserved: Mapping[str, int],
    *,
    given: Collection[str] | None = None,
) -> Plan:
    """Make the plan for a checkpoint on this host: by the caller's `request`, or by that of the settings.

    Parts of the settings or the container's annotation for GPUs that the checkpoint does not have are
    ignored, because these apply to more than this checkpoint. With `given`, they do not apply: those GPUs
    were chosen for this one. Raises Refused if the checkpoint's GPUs must stay as they are, and cannot.
    """
    request = make_same_gpu_map(record, host, request) or request
    return plan_assignment(
        record.gpus,
        record.host.driver_version,
        host,
        request=request or (otherwise if given is None else ()),
        reserved=reserved,
        lenient=not request,
        given=given,
    )


def make_same_gpu_map(record: manifest.Manifest, host: Host, request: GpuMap) -> GpuMap:
    """Return the GPU map for a plugin that cannot change GPUs: each GPU stays. Empty for other plugins.

    Raises Refused if this host lacks one of them, or if the request asks for another one.
    """
    plugin = next((each for each in KNOWN if each.name == record.plugin), None)
    if plugin is None or plugin.remaps:
        return ()
    here = {gpu.uuid: gpu for gpu in host.gpus}
    for gpu in record.gpus:
        asked = next((right for left, right in request if is_meant(left, gpu.index, gpu.uuid)), None)
        same = here.get(gpu.uuid)
        if same is None or (asked is not None and not is_meant(asked, same.index, same.uuid)):
            why = "this host does not have it" if same is None else f"the GPU map assigns {asked}"
            raise Refused(
                f"the checkpoint was made with {plugin.what}, which restores a process onto its original "
                f"GPU, {gpu.uuid}, but {why}",
                hint='restore it on its original GPUs; a checkpoint made with nvidia.driver = "native" '
                "can move",
                code="GPS-406",
            )
    return tuple((gpu.uuid, gpu.uuid) for gpu in record.gpus)


def gpu_request(option: str | None) -> GpuMap:
    """Return the caller's own choice of GPUs: --gpu-map, or $GPUSNAP_GPU_MAP, which Podman passes on.

    Raises UsageError.
    """
    for name, text in (("--gpu-map", option), (f"${GPU_MAP}", os.environ.get(GPU_MAP))):
        if text:
            try:
                return parse_map(text)
            except ValueError as error:
                raise UsageError(f"{name} is {text[:200]!r}; it must be {error}", code="GPS-403") from None
    return ()
