"""A sysfs as amdgpu and its compute part make it, for hosts that nobody here has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["APU", "MI210", "MI300X", "Chip", "tree"]


@dataclass(frozen=True, slots=True)
class Chip:
    """What a node of the topology says of its GPU; names and numbers as such GPUs have them."""

    name: str
    target: int
    device: int
    simds: int
    memory: int
    product: str = ""


MI300X = Chip("ip discovery", 90402, 0x74A1, 1216, 191 << 30, "AMD Instinct MI300X OAM")
MI210 = Chip("aldebaran", 90010, 0x740F, 416, 64 << 30, "AMD Instinct MI210")
APU = Chip("raven", 90002, 0x15D8, 20, 0)


def tree(root: Path, chips: Sequence[tuple[Chip, int]], *, first_minor: int = 128, cpus: int = 1) -> str:
    """Write a host with so many processors and these GPUs, each with its unique_id (0: it has none)."""
    nodes = root / "class" / "kfd" / "kfd" / "topology" / "nodes"
    for number in range(cpus):
        _node(nodes / str(number), 0, "", {"cpu_cores_count": 64, "simd_count": 0}, heap=(0, 256 << 30))
    for at, (chip, unique) in enumerate(chips):
        minor, bus = first_minor + at, 0x41 + at
        values = {
            "cpu_cores_count": 8 if chip is APU else 0,
            "simd_count": chip.simds,
            "gfx_target_version": chip.target,
            "vendor_id": 0x1002,
            "device_id": chip.device,
            "location_id": bus << 8,
            "domain": 0,
            "drm_render_minor": minor,
            "unique_id": unique,
            "local_mem_size": 0,
        }
        heap = (1, chip.memory) if chip.memory else (0, 32 << 30)
        _node(nodes / str(cpus + at), 30000 + at, chip.name, values, heap=heap)
        device = root / "devices" / f"0000:{bus:02x}:00.0"
        device.mkdir(parents=True)
        (device / "mem_info_vram_total").write_text(f"{chip.memory or 1 << 30}\n")
        (device / "mem_info_vram_used").write_text(f"{(at + 1) << 20}\n")
        if chip.product:
            (device / "product_name").write_text(chip.product + "\n")
        drm = root / "class" / "drm" / f"renderD{minor}"
        drm.mkdir(parents=True)
        (drm / "device").symlink_to(device)
    return str(root)


def _node(folder: Path, gpu_id: int, name: str, values: dict[str, int], *, heap: tuple[int, int]) -> None:
    bank = folder / "mem_banks" / "0"
    bank.mkdir(parents=True)
    (folder / "gpu_id").write_text(f"{gpu_id}\n")
    (folder / "name").write_text(f"{name}\n")
    (folder / "properties").write_text("".join(f"{key} {value}\n" for key, value in values.items()))
    (bank / "properties").write_text(f"heap_type {heap[0]}\nsize_in_bytes {heap[1]}\nflags 0\nwidth 4096\n")
