"""The keys of the settings: their names, valid values, and which of them an annotation may set.

`TABLE` is the one list of keys; docs/settings.md is checked against it by a test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.gpu.api.gpu_map import GpuMap, parse_map

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_CGROUP_MODES = ("", "ignore", "soft", "full", "strict")
_AMD_CHECKS = ("firmware", "sdma-firmware", "caches", "gws", "vram", "numa", "capability")


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the settings: how its value is checked, and whether an annotation may set it."""

    check: Callable[[Any], Any]
    """Takes the value from TOML; raises ValueError that says what is expected."""
    annotation: bool = False
    parse: Callable[[str], Any] = str
    """Converts an annotation, which is text; if that is impossible, `check` gets the text."""


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\n" in value:
        raise ValueError("a string")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _parse_boolean(text: str) -> bool | str:
    return text == "true" if text in ("true", "false") else text


def _make_whole_check(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return value

    return check


def _parse_whole(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else text


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.001 <= value <= 86400:
        raise ValueError("seconds, from 0.001 to 86400")
    return float(value)


def _parse_seconds(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _size(value: Any) -> int:
    wanted = "a size in bytes such as 1048576, 300M or 2G"
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62:
        return value
    if not isinstance(value, str):
        raise ValueError(wanted)
    digits = value.strip().lower().removesuffix("ib").rstrip("kmgt ")
    unit = value.strip().lower().removesuffix("ib")[len(digits) :].strip()
    if not digits.isascii() or not digits.isdigit() or len(digits) > 19 or unit not in _UNITS:
        raise ValueError(wanted)
    size = int(digits) * _UNITS[unit]
    if size >= 1 << 62:
        raise ValueError(wanted)
    return size


def _make_choice_check(*choices: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError("one of " + ", ".join(repr(choice) for choice in choices))
        return value

    return check


def _path(value: Any) -> str:
    if not isinstance(value, str) or (value and not value.startswith("/")) or "\n" in value:
        raise ValueError("an absolute path")
    return value


def _folder(value: Any) -> str:
    path = _path(value)
    if not path or "\0" in path:
        raise ValueError("the absolute path of a directory")
    return path


def _cuda_checkpoint(value: Any) -> str:
    path = _path(value)
    if path and not path.endswith("/cuda-checkpoint"):  # the plugin knows only that name
        raise ValueError("an absolute path that ends in /cuda-checkpoint")
    return path


def _checks(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(name in _AMD_CHECKS for name in value):
        raise ValueError("a list of " + ", ".join(repr(name) for name in _AMD_CHECKS))
    return tuple(value)


def _runtime(value: Any) -> str:
    if not isinstance(value, str) or "\n" in value or ("/" in value and not value.startswith("/")):
        raise ValueError("a runtime's name or absolute path")
    return value


def _lines(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(x, str) and "\n" not in x for x in value):
        raise ValueError("a list of strings")
    return tuple(value)


def _repositories(value: Any) -> tuple[str, ...]:
    # Imported here, because few settings files have it.
    from gpusnap.oci.base.errors import RegistryError
    from gpusnap.oci.layout.reference import parse_plain

    wanted = 'a list of repositories such as "registry.example/team/app", or with http:// for one without TLS'
    try:
        found = _lines(value)
        references = [parse_plain(text)[0] for text in found]
    except (ValueError, RegistryError):
        raise ValueError(wanted) from None
    if any(each.tag or each.digest for each in references):
        raise ValueError(wanted)
    return found


def _map(value: Any) -> GpuMap:
    if not isinstance(value, str):
        raise ValueError('a list of old=new such as "0=3,1=2"')
    return parse_map(value)


def _chunk_size(value: Any) -> int:
    size = _size(value)
    if not 4096 <= size <= 1 << 30 or size % 4096:
        raise ValueError("a size from 4096 bytes to 1G, a multiple of 4096")
    return size


TABLE: dict[str, Key] = {
    "runtime": Key(_runtime),
    "retries": Key(_make_whole_check(0, 100), annotation=True, parse=_parse_whole),
    "gpu-map": Key(_map, annotation=True),
    "keep-names": Key(_boolean, annotation=True, parse=_parse_boolean),
    "hooks": Key(_lines),
    "nvidia.lock-timeout": Key(_seconds, annotation=True, parse=_parse_seconds),
    "nvidia.allow-nccl": Key(_boolean, annotation=True, parse=_parse_boolean),
    "nvidia.driver": Key(_make_choice_check("native", "criu-plugin")),
    "nvidia.libdir": Key(_path),
    "nvidia.cuda-checkpoint": Key(_cuda_checkpoint),
    "amd.libdir": Key(_path),
    "amd.skip-checks": Key(_checks),
    "amd.buffer": Key(_size),
    "memory.pages": Key(_make_choice_check("chunks", "store", "criu"), annotation=True),
    "memory.chunk-size": Key(_chunk_size),
    "memory.level": Key(_make_whole_check(0, 19), annotation=True, parse=_parse_whole),
    "memory.ceiling": Key(_size),
    "memory.threads": Key(_make_whole_check(0, 1024)),
    "memory.demand-paging": Key(_boolean),
    "memory.parallel-restore": Key(_boolean),
    "memory.sync": Key(_boolean),
    "memory.keep": Key(_boolean),
    "memory.keep-folder": Key(_folder),
    "criu.link-remap": Key(_boolean, annotation=True, parse=_parse_boolean),
    "criu.ghost-limit": Key(_size, annotation=True),
    "criu.cut-files": Key(_boolean, annotation=True, parse=_parse_boolean),
    "criu.timeout": Key(_make_whole_check(1, 86400), annotation=True, parse=_parse_whole),
    "criu.skip-in-flight": Key(_boolean, annotation=True, parse=_parse_boolean),
    "criu.tcp-close": Key(_boolean, annotation=True, parse=_parse_boolean),
    "criu.manage-cgroups": Key(_make_choice_check(*_CGROUP_MODES), annotation=True),
    "criu.libdir": Key(_path),
    "criu.action-script": Key(_path),
    "criu.external": Key(_lines),
    "criu.options": Key(_lines),
    "registry.timeout": Key(_seconds),
    "registry.minimum-speed": Key(_size),
    "suspend.ram": Key(_size),
    "suspend.over": Key(_make_choice_check("refuse", "spill")),
    "store.path": Key(_folder),
    "store.pull-from": Key(_repositories),
    "store.read-rate": Key(_size),
    "metrics.textfile": Key(_path),
    "metrics.journal": Key(_boolean),
}
