"""CDI, the container device interface: what a file of it says that a GPU adds to a container.

Format and rules are those of CDI's SPEC.md and its Go library (specs-go/config.go and version.go, pkg/cdi's
spec.go, container-edits.go and cache.go), versions 0.3.0 to 1.1.0. As there, an unknown field makes a file
invalid, and so does a field that is newer than the file's version. The paths in a spec come from its vendor:
whoever opens one must check it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpusnap.oci.base.dataclass import dataclass, field, replace
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.gpu.cdi.strict_yaml import Unquoted, from_yaml, make_printable

_VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
LARGEST = 16 << 20
"""Bytes of a file."""
_ITEMS = 4096  # in any list; nvidia-ctk writes about 60 mounts and a few hundred devices at most
_TEXT = 128 << 10  # MAX_ARG_STRLEN of the kernel's binfmts.h: no argument or variable may be longer

# Every field, and its first version; blank means that it was always there.
_SPEC = {"cdiVersion": "", "kind": "", "annotations": "0.6.0", "devices": "", "containerEdits": ""}
_DEVICE = {"name": "", "annotations": "0.6.0", "containerEdits": ""}
_EDITS = {
    **dict.fromkeys(("env", "deviceNodes", "mounts", "hooks"), ""),
    # SPEC.md has both spellings, and Go accepts both.
    **dict.fromkeys(("additionalGids", "additionalGIDs", "intelRdt"), "0.7.0"),
    "netDevices": "1.1.0",
}
_NODE = {
    **dict.fromkeys(("path", "type", "major", "minor", "fileMode", "permissions", "uid", "gid"), ""),
    "hostPath": "0.5.0",
}
_MOUNT = {"hostPath": "", "containerPath": "", "options": "", "type": "0.4.0"}
_HOOK = dict.fromkeys(("hookName", "path", "args", "env", "timeout"), "")
_RDT = {
    **dict.fromkeys(("closID", "l3CacheSchema", "memBwSchema", "enableCMT", "enableMBM"), "0.7.0"),
    **dict.fromkeys(("schemata", "enableMonitoring"), "1.1.0"),
}
_DROPPED = {"enableCMT", "enableMBM"}  # with 1.1.0
_NET = {"hostInterfaceName": "1.1.0", "name": "1.1.0"}

_HOOKS = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
_KIND = compile_later(r"[A-Za-z](?:[\w.-]{0,251}[A-Za-z0-9])?/[A-Za-z](?:[\w.-]{0,61}[A-Za-z0-9])?", re.ASCII)
_NAME = compile_later(r"[A-Za-z0-9](?:[\w.:-]{0,253}[A-Za-z0-9])?", re.ASCII)
_ID = 2**32 - 1
_MAJOR, _MINOR = 2**12 - 1, 2**20 - 1  # MAJOR and MINOR of the kernel's kdev_t.h
_UNFIT = compile_later("[\0\ud800-\udfff]")  # JSON can spell half a character


class CdiError(GpusnapError):
    """A CDI file cannot be read, or violates the format; the message names file and field."""

    code = "GPS-409"


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node of the container; None or empty for fields that the spec omits."""

    path: str
    host_path: str
    """Its path on the host: `path`, unless the spec says otherwise."""
    type: str
    major: int | None
    minor: int | None
    file_mode: int | None
    permissions: str
    """Permissions of the device cgroup: of the letters r, w, m; empty: all three; none: none."""
    uid: int | None
    gid: int | None


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount into the container."""

    host_path: str
    container_path: str
    type: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hook:
    """An OCI hook; `name` is when it runs (createContainer)."""

    name: str
    path: str
    args: tuple[str, ...]
    env: tuple[str, ...]
    timeout: int | None
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Edits:
    """The changes of the container; intelRdt and netDevices are checked, but not kept."""

    env: tuple[str, ...] = ()
    nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()
    additional_gids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Device:
    """What a container gets if it requests `vendor/class=name`."""

    name: str
    edits: Edits


@dataclass(frozen=True, slots=True)
class Spec:
    """One file. `edits` are for every container that gets any of its devices."""

    path: str
    version: str
    kind: str
    """vendor/class: nvidia.com/gpu."""
    devices: tuple[Device, ...]
    edits: Edits


def parse(data: bytes, path: str) -> Spec:
    """Parse the spec in `data`: JSON if `path` ends so, else YAML. Raises CdiError, which names `path`."""
    if len(data) > LARGEST:
        raise CdiError(f"{path}: is larger than {LARGEST >> 20} MiB")
    try:
        text = data.decode("utf-8")
        content = parse_json(text) if path.endswith(".json") else from_yaml(text)
    except ImportError as error:
        raise CdiError(
            "this host's CDI files are YAML, but the Python package that reads YAML is missing",
            hint="install PyYAML (python3-yaml)",
            code="GPS-002",
        ) from error
    except RecursionError:
        raise CdiError(f"{path}: is nested too deeply") from None
    except ValueError as error:
        raise CdiError(f"{path}: {' '.join(str(error).split())[:300]}") from error
    return _spec(content, path)


@dataclass(frozen=True, slots=True)
class _Object:
    """One object of the file: its fields that are not null, and its place."""

    path: str
    version: str = ""
    """The version of the whole file."""
    place: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def wrong(self, what: str, name: str = "", *, hint: str = "") -> CdiError:
        place = ".".join(part for part in (self.place, name) if part)
        return CdiError(f"{self.path}: {place}: {what}" if place else f"{self.path}: {what}", hint=hint)

    def object(self, name: str, known: Mapping[str, str]) -> _Object:
        return self._make_inner(self.fields.get(name, {}), name, known)

    def objects(self, name: str, known: Mapping[str, str]) -> list[_Object]:
        return [self._make_inner(each, f"{name}[{at}]", known) for at, each in enumerate(self.items(name))]

    def _make_inner(self, value: Any, name: str, known: Mapping[str, str]) -> _Object:
        place = f"{self.place}.{name}" if self.place else name
        return _Object(self.path, self.version, place).check_fields(value, known)

    def check_fields(self, value: Any, known: Mapping[str, str]) -> _Object:
        """Return the same with `value`'s fields, which must all be `known`."""
        if not isinstance(value, dict):
            raise self.wrong("is not an object with fields")
        for name, each in value.items():
            if name not in known:
                raise self.wrong(f"unknown field {make_printable(name)}")
            if known[name] and each:  # as in CDI's library, an empty value needs no version
                self.need(known[name], name)
            if name in _DROPPED and self.version == "1.1.0":
                raise self.wrong("is no longer a field in CDI 1.1.0", name)
        fields = {name: each for name, each in value.items() if each is not None}
        return replace(self, fields=fields)

    def need(self, version: str, name: str, what: str = "") -> None:
        """Refuse a field that is newer than the file's version."""
        if _VERSIONS.index(version) > _VERSIONS.index(self.version):
            raise self.wrong(
                f"{what}was added in CDI {version}, but the file's cdiVersion is {self.version}",
                name,
                hint=f"set cdiVersion to {version} or later",
            )

    def items(self, name: str) -> list[Any]:
        value = self.fields.get(name, [])
        if not isinstance(value, list):
            raise self.wrong("is not a list", name)
        if len(value) > _ITEMS:
            raise self.wrong(f"has {len(value)} entries, but more than {_ITEMS} are refused", name)
        return value

    def text(self, name: str, *, needed: bool = False) -> str:
        text = self._text(self.fields.get(name, ""), name)
        if needed and not text:
            raise self.wrong("is missing", name)
        return text

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(self._text(each, f"{name}[{at}]") for at, each in enumerate(self.items(name)))

    def variables(self, name: str) -> tuple[str, ...]:
        found = self.texts(name)
        for at, each in enumerate(found):
            if each.find("=") <= 0:
                raise self.wrong(f"{make_printable(each)} is not in the form NAME=VALUE", f"{name}[{at}]")
        return found

    def _text(self, value: Any, name: str) -> str:
        if not isinstance(value, str):
            raise self.wrong("is not a string", name)
        if len(value) > _TEXT or _UNFIT.search(value):
            raise self.wrong(
                "is too long, or has a character that is not allowed in a path or an argument", name
            )
        return str(value)

    def number(self, name: str, top: int, *, low: int = 0) -> int | None:
        value = self.fields.get(name)
        return None if value is None else self._number(value, name, top, low)

    def numbers(self, name: str, top: int) -> tuple[int, ...]:
        return tuple(self._number(v, f"{name}[{at}]", top, 0) for at, v in enumerate(self.items(name)))

    def _number(self, value: Any, name: str, top: int, low: int) -> int:
        if isinstance(value, Unquoted):
            value = value.parse_whole()
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= top:
            raise self.wrong(f"is not an integer from {low} to {top}", name)
        return value


def _spec(content: Any, path: str) -> Spec:
    version = content.get("cdiVersion") if isinstance(content, dict) else None
    number = version.removeprefix("v") if isinstance(version, str) else ""
    top = _Object(path, number)
    # First of all, because the error of a newer file is its version.
    if isinstance(content, dict) and number not in _VERSIONS:
        known = f"{_VERSIONS[0]} to {_VERSIONS[-1]}"
        what = "is missing" if version is None else f"{make_printable(version)} is not a known version"
        raise top.wrong(f"{what} ({known})", "cdiVersion")
    top = top.check_fields(content, _SPEC)
    kind = top.text("kind", needed=True)
    if not _KIND.fullmatch(kind):
        raise top.wrong(f"{make_printable(kind)} is not in the form vendor/class (nvidia.com/gpu)", "kind")
    if "." in kind.partition("/")[2]:
        top.need("0.6.0", "kind", "a dot in its class ")
    _annotations(top)
    edits = _edits(top)
    devices = tuple(map(_device, top.objects("devices", _DEVICE)))
    if not devices:
        raise top.wrong("lists no device", "devices")
    names = [device.name for device in devices]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise top.wrong(f"the device {make_printable(twice)} is listed twice", "devices")
    return Spec(path, number, kind, devices, edits)


def _annotations(holder: _Object) -> None:
    value = holder.fields.get("annotations", {})
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise holder.wrong("is not a map of strings", "annotations")


def _device(found: _Object) -> Device:
    name = found.text("name", needed=True)
    if not _NAME.fullmatch(name):
        raise found.wrong(f"{make_printable(name)} is not a valid name for a device", "name")
    if name[0].isdigit():
        found.need("0.5.0", "name", "to begin with a digit ")
    _annotations(found)
    edits = _edits(found)
    if not any(found.object("containerEdits", _EDITS).fields.values()):
        raise found.wrong("does not edit the container", "containerEdits")
    return Device(name, edits)


def _edits(holder: _Object) -> Edits:
    edits = holder.object("containerEdits", _EDITS)
    _check_unkept(edits)
    return Edits(
        edits.variables("env"),
        tuple(map(_node, edits.objects("deviceNodes", _NODE))),
        tuple(map(_mount, edits.objects("mounts", _MOUNT))),
        tuple(map(_hook, edits.objects("hooks", _HOOK))),
        edits.numbers("additionalGids", _ID) + edits.numbers("additionalGIDs", _ID),
    )


def _node(node: _Object) -> DeviceNode:
    path = node.text("path", needed=True)
    kind, permissions = node.text("type"), node.text("permissions")
    if kind not in ("", "b", "c", "u", "p"):
        raise node.wrong(f"{make_printable(kind)} is not a valid type for a device node: b, c, u, p", "type")
    if permissions != "none" and set(permissions) - set("rwm"):
        raise node.wrong(f"{make_printable(permissions)} must be a combination of r, w, m", "permissions")
    major, minor = node.number("major", _MAJOR), node.number("minor", _MINOR)
    mode, uid, gid = (node.number(name, _ID) for name in ("fileMode", "uid", "gid"))
    return DeviceNode(path, node.text("hostPath") or path, kind, major, minor, mode, permissions, uid, gid)


def _mount(mount: _Object) -> Mount:
    host, container = mount.text("hostPath", needed=True), mount.text("containerPath", needed=True)
    return Mount(host, container, mount.text("type"), mount.texts("options"))


def _hook(hook: _Object) -> Hook:
    name, path = hook.text("hookName", needed=True), hook.text("path", needed=True)
    if name not in _HOOKS:
        raise hook.wrong(f"{make_printable(name)} is not one of {', '.join(_HOOKS)}", "hookName")
    if not path.startswith("/"):
        raise hook.wrong(f"{make_printable(path)} is not an absolute path", "path")
    timeout = hook.number("timeout", _ID, low=1)
    return Hook(name, path, hook.texts("args"), hook.variables("env"), timeout)


def _check_unkept(edits: _Object) -> None:
    """Check the fields of intelRdt and netDevices, which no GPU uses, and nothing more."""
    rdt = edits.object("intelRdt", _RDT)
    for name in ("closID", "l3CacheSchema", "memBwSchema"):
        rdt.text(name)
    rdt.texts("schemata")
    for net in edits.objects("netDevices", _NET):
        net.text("hostInterfaceName", needed=True)
        net.text("name", needed=True)
