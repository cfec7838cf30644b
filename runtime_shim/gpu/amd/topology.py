"""AMD's GPUs as the kernel shows them: the KFD topology and the DRM devices in sysfs.

    /sys/class/kfd/kfd/topology/nodes/<n>/gpu_id       0 for a processor; empty or closed where the device
                                                       cgroup keeps a GPU from us
                                      …/name           code name of the chip, such as aldebaran
                                      …/properties     lines of a word and a number: simd_count,
                                                       gfx_target_version, unique_id, drm_render_minor, …
                                      …/mem_banks/<m>/properties    heap_type, size_in_bytes
    /sys/class/kfd/kfd/proc/<pid>/vram_<gpu_id>        bytes that a process has there
    /sys/class/drm/renderD<minor>/device               the PCI device: mem_info_vram_total and …_used,
                                                       product_name

(Documentation/gpu/amdgpu and drivers/gpu/drm/amd/amdkfd/kfd_topology.c of Linux.) If a GPU is split into
partitions (MI300X in CPX mode), each partition is a node with a render node of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.gpu.api.driver import Gpu

SYS = "/sys"
_MACHINE = "/etc/machine-id"

# kfd_topology.h, HSA_MEM_HEAP_TYPE_FB_PUBLIC and …_PRIVATE: the GPU's own memory.
_HEAPS = (1, 2)
_DIGITS = compile_later(r"\d{1,7}")
_VERSION = compile_later(r"[0-9]+(?:\.[0-9]+)*")
_MOST = 1 << 16
"""Bytes of a file in sysfs, which has at most a page."""


@dataclass(frozen=True, slots=True)
class AmdGpu:
    """A GPU, or a partition of one, that KFD lists."""

    gpu: Gpu
    """`minor` is that of its render node."""
    gpu_id: int
    """KFD's own number for it: unchanged until the driver is reloaded."""
    node: int
    """The node of the topology."""


def gpus(sys: str = "") -> tuple[AmdGpu, ...]:
    """Return the GPUs in the order of the topology, which is that of ROCm's numbers; none without KFD.

    Processors, and nodes that this process may not see, are omitted. `sys`: the path of sysfs, if not SYS.
    """
    sys = sys or SYS
    folder = f"{sys}/class/kfd/kfd/topology/nodes"
    found: list[AmdGpu] = []
    seen: dict[str, int] = {}
    for node in sorted(int(name) for name in _names(folder) if _DIGITS.fullmatch(name)):
        place = f"{folder}/{node}"
        gpu_id = _number(_text(f"{place}/gpu_id"))
        properties = _properties(f"{place}/properties")
        minor = properties.get("drm_render_minor", 0)
        if not gpu_id or not properties.get("simd_count") or not minor:
            continue
        unique = _find_unique_number(properties, sys, minor)
        again = seen.get(unique, 0)  # partitions have the number of their chip
        seen[unique] = again + 1
        found.append(AmdGpu(_gpu(place, properties, _part(unique, again), len(found), sys=sys), gpu_id, node))
    return tuple(found)


def vram_used(pids: Iterable[int], found: Iterable[AmdGpu], sys: str = "") -> dict[int, dict[str, int]]:
    """Return bytes of GPU memory by PID and UUID, for processes that have used KFD.

    KFD names a process by its PID on the host (kfd_process.c, kfd_create_process_sysfs).
    """
    sys = sys or SYS
    used: dict[int, dict[str, int]] = {}
    known = tuple(found)
    for pid in pids:
        place = f"{sys}/class/kfd/kfd/proc/{pid}"
        if os.path.isdir(place):
            used[pid] = {
                each.gpu.uuid: _number(_text(f"{place}/vram_{each.gpu_id}")) or 0
                for each in known
                if os.path.exists(f"{place}/vram_{each.gpu_id}")
            }
    return used


def driver_version(sys: str = "") -> str:
    """Return amdgpu's version if it has one (in AMD's own packages), else that of the kernel.

    Only numbers with dots, so that two versions can be compared.
    """
    own = _text(f"{sys or SYS}/module/amdgpu/version").strip()
    match = _VERSION.match(own) or _VERSION.match(os.uname().release)
    return match[0] if match else "0"


def _gpu(place: str, properties: Mapping[str, int], uuid: str, index: int, *, sys: str) -> Gpu:
    minor = properties["drm_render_minor"]
    device = f"{sys}/class/drm/renderD{minor}/device"
    total = _bank_bytes(place) or _number(_text(f"{device}/mem_info_vram_total")) or 0
    target = _target(properties.get("gfx_target_version", 0))
    name = _text(f"{device}/product_name").strip() or _text(f"{place}/name").strip() or target
    return Gpu(
        uuid=uuid,
        minor=minor,
        index=index,
        # The marketing name alone does not distinguish boards with more or fewer compute units.
        model=f"{name} ({properties.get('device_id', 0):04x}, {properties['simd_count']} SIMDs)",
        compute_capability=target,
        memory_total=total,
        # For all partitions together, if there are several.
        memory_used=min(total, _number(_text(f"{device}/mem_info_vram_used")) or 0),
        mig=False,
        compute_mode="default",
        pci=_pci(properties, device),
    )


def _bank_bytes(place: str) -> int:
    """Return the size of the memory banks that are the GPU's own; an APU has none."""
    banks = f"{place}/mem_banks"
    each = (_properties(f"{banks}/{name}/properties") for name in _names(banks) if _DIGITS.fullmatch(name))
    return sum(bank.get("size_in_bytes", 0) for bank in each if bank.get("heap_type") in _HEAPS)


def _target(version: int) -> str:
    """Return gfx90a for 90010, in the format of compilers: major, minor, and stepping in hexadecimal."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _pci(properties: Mapping[str, int], device: str) -> str:
    """Return the address: the device's own, or KFD's (location_id is bus, device and function)."""
    with suppress(OSError):
        name = os.path.basename(os.readlink(device))
        if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", name):
            return name
    domain, place = properties.get("domain", 0) & 0xFFFF, properties.get("location_id", 0)
    return f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"


def _find_unique_number(properties: Mapping[str, int], sys: str, minor: int) -> str:
    """Return 16 digits: the chip's own number, as in ROCm's names for GPUs.

    APUs and virtual functions lack it. They get one that is valid only on this host, and so never looks like
    a GPU of another host.
    """
    if unique := properties.get("unique_id", 0):
        return f"{unique & (1 << 64) - 1:016x}"
    place = _pci(properties, f"{sys}/class/drm/renderD{minor}/device")
    return hashlib.sha256(f"{_text(_MACHINE).strip()} {place}".encode()).hexdigest()[:16]


def _part(unique: str, number: int) -> str:
    """Return ROCm's name for a GPU, GPU- and 16 digits; for a further partition, one derived from it."""
    if number:
        unique = hashlib.sha256(f"{unique} {number}".encode()).hexdigest()[:16]
    return f"GPU-{unique}"


def _properties(path: str) -> dict[str, int]:
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and _is_number(pair[1])}


def _number(text: str) -> int | None:
    return int(text) if _is_number(text.strip()) else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(path: str) -> str:
    """Read a file of sysfs; empty if it does not exist or is not readable."""
    try:
        with open(path, "rb") as file:
            return file.read(_MOST).decode("utf-8", "replace")
    except OSError:
        return ""
