"""Corrects the bundle's config.json before a restore.

CDI's mounts (Podman's --device nvidia.com/gpu=…) have options but no `type`, which the runtime specification
allows. crun 1.21 reads the missing type on restore and crashes (criu.c, prepare_restore_mounts; newer
versions check it), so a bind mount gets its type. If the source of a bind mount is a symbolic link
(libcuda.so.1, as people mount it by hand), CRIU's restore fails ("Can't remount"), so the link is resolved.

If the container is restored onto other GPUs, or with another driver, its GPU nodes and the rules of its
device cgroup become this host's, and the mounts of the driver's files get their sources on this host.
Destinations stay, because CRIU asks for each mount by its own. runc gets a hook that brings lo up
(runtime/loopback.py). A container in a pod joins the namespaces that its pod has now (runtime/podman/pod.py).
Nothing else is changed: the file comes from the caller, and what it grants stays as it is.
"""

from __future__ import annotations

import copy
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gpusnap.oci.base.dataclass import dataclass, field
from gpusnap.runtime_shim.base.errors import ContainerError, raise_as
from gpusnap.runtime_shim.gpu.api.device_nodes import Change
from gpusnap.runtime_shim.gpu.api.driver import Node
from gpusnap.runtime_shim.runtime import loopback
from gpusnap.runtime_shim.runtime.container import bundle_namespaces

_Number = tuple[int, int]
_OUR_HOOK = "gpusnap-hook"


@dataclass(frozen=True, slots=True)
class Edits:
    """What the restore changes."""

    changes: tuple[Change, ...] = ()
    """Device nodes."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """This host's file or device, by the destination of a bind mount in config.json."""
    strange: tuple[Node, ...] = ()
    """This host's GPU nodes that the plan does not give to the container: no entry or rule may name them."""
    hook: Mapping[str, Any] | None = None
    """loopback.hook()'s, to run after all others; see `drop_hook`."""
    namespaces: Mapping[str, str] = field(default_factory=dict)
    """The new path of a namespace to join, by the path in config.json (runtime/podman/pod.py)."""


def prepare(
    bundle: str,
    config: dict[str, Any],
    edits: Edits | None = None,
    *,
    noted: Callable[[bytes, bytes], object] = lambda before, after: None,
) -> Callable[[], None]:
    """Change `config` for the restore and write it; return a function that restores the old file.

    `noted` gets the old and the new content before the file is replaced. Raises ContainerError if the bundle
    cannot be written.
    """
    before = copy.deepcopy(config)
    edits = edits or Edits()
    for mount in binds(config):
        if (source := edits.sources.get(str(mount.get("destination")))) is not None:
            mount["source"] = source
        _mend(mount)
        _move_notify_folder(mount, bundle)
    _drop_our_hooks(config)
    if edits.hook is not None:
        _add_hook(config, dict(edits.hook))
    _change_namespaces(config, edits.namespaces)
    _change_devices(config, edits)
    _change_rules(config, edits)
    _allow_devices(config)
    return write(bundle, config, noted=noted) if config != before else lambda: None


def write(
    bundle: str,
    config: Mapping[str, Any],
    *,
    noted: Callable[[bytes, bytes], object] = lambda before, after: None,
) -> Callable[[], None]:
    """Replace the bundle's config.json; return a function that restores the old one; `noted` as in `prepare`.

    Raises ContainerError.
    """
    path = os.path.join(bundle, "config.json")
    with raise_as(ContainerError, f"{path} cannot be prepared for the restore"):
        with open(path, "rb") as file:
            before = file.read()
        after = json.dumps(config).encode()
        noted(before, after)
        _replace(path, after)
    return lambda: _replace(path, before)


def drop_hook(bundle: str, config: dict[str, Any], *, noted: Callable[[bytes, bytes], object]) -> None:
    """Remove the hook that was only for the restore: a checkpoint would carry it to other hosts.

    `config` and `noted` as in `prepare`. Raises ContainerError.
    """
    before = copy.deepcopy(config)
    _drop_our_hooks(config)
    if config != before:
        write(bundle, config, noted=noted)


def put_back(bundle: str, content: bytes) -> None:
    """Restore the old content of the bundle's config.json. Raises OSError."""
    _replace(os.path.join(bundle, "config.json"), content)


def binds(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the bind mounts of a configuration."""
    mounts = config.get("mounts")
    for mount in mounts if isinstance(mounts, list) else ():
        options = mount.get("options") if isinstance(mount, dict) else None
        if isinstance(options, list) and ("bind" in options or "rbind" in options):
            yield mount


def devices(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return linux.devices of a configuration, without invalid entries."""
    linux = config.get("linux")
    found = linux.get("devices") if isinstance(linux, dict) else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def device_rules(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the device rules that a configuration gives a container; the last rule that matches counts.

    These are linux.resources.devices, and one more for each of linux.devices that they omit: `podman update`
    omits them all, and so takes the GPUs away at the next restore.
    """
    found = [each for each in _rules(config) or () if isinstance(each, dict)]
    return [*found, *_list_left_out(config, found)]


def _list_left_out(config: Mapping[str, Any], rules: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a rule for each device of a configuration that its rules do not allow in any way."""
    found: list[dict[str, Any]] = []
    for each in devices(config):
        kind, (major, minor) = str(each.get("type")), _number(each)
        if major >= 0 and not access([*rules, *found], kind, major, minor):
            found.append({"allow": True, "type": kind, "major": major, "minor": minor, "access": "rwm"})
    return found


def access(rules: Iterable[Mapping[str, Any]], kind: str, major: int, minor: int) -> str:
    """Return what rules allow for a device, "c" or "b" by number: a part of "rwm" (runtime-spec, devices)."""
    allowed = ""
    wanted = {"type": kind, "major": major, "minor": minor}
    for rule in rules:
        if all(rule.get(word) in (None, -1, "a", "", wanted[word]) for word in wanted):
            allowed = str(rule.get("access") or "rwm") if rule.get("allow") is True else ""
    return allowed


def _rules(config: Mapping[str, Any]) -> list[Any] | None:
    """Return linux.resources.devices (runtime-spec, config-linux.md) itself; None if it is no list."""
    linux = config.get("linux")
    resources = linux.get("resources") if isinstance(linux, dict) else None
    found = resources.get("devices") if isinstance(resources, dict) else None
    return found if isinstance(found, list) else None


def _mend(mount: dict[str, Any]) -> None:
    """Add what is missing in a bind mount."""
    mount["type"] = mount.get("type") or "bind"
    source = mount.get("source")
    if isinstance(source, str) and os.path.isabs(source) and os.path.islink(source):
        mount["source"] = os.path.realpath(source)


def _move_notify_folder(mount: dict[str, Any], bundle: str) -> None:
    """Take the directory of this container's own notify socket: Podman names that of the checkpointed one.

    They differ if the container has another ID (libpod, mountNotifySocket; conmon, setup_notify_socket).
    """
    own, source = os.path.join(bundle, "notify"), str(mount.get("source"))
    theirs = mount.get("destination") == "/run/notify" and source.endswith("/userdata/notify")
    if theirs:
        with raise_as(ContainerError, f"{own} cannot be read"), suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(own).st_mode):
                mount["source"] = own


def _drop_our_hooks(config: dict[str, Any]) -> None:
    """Remove gpusnap's createRuntime hooks that this host does not have: runc runs them at a restore."""
    stages = config.get("hooks")
    if not isinstance(stages, dict):
        return
    for stage, hooks in [*stages.items()]:
        if not isinstance(hooks, list):
            continue
        stages[stage] = [hook for hook in hooks if not _is_gone(hook) and not loopback.is_hook(hook)]
        if any(map(loopback.is_hook, hooks)) and not stages[stage]:
            del stages[stage]
    if not stages:
        del config["hooks"]


def _is_gone(hook: object) -> bool:
    """Whether it is a hook of gpusnap whose program this host does not have."""
    path = str(hook.get("path")) if isinstance(hook, dict) else ""
    return os.path.basename(path) == _OUR_HOOK and not os.path.exists(path)


def _add_hook(config: dict[str, Any], hook: dict[str, Any]) -> None:
    stages = config.get("hooks")
    if not isinstance(stages, dict):
        stages = config["hooks"] = {}
    hooks = stages.get("createRuntime")
    stages["createRuntime"] = [*(hooks if isinstance(hooks, list) else ()), hook]


def _change_namespaces(config: dict[str, Any], paths: Mapping[str, str]) -> None:
    for each in bundle_namespaces(config):
        if each.get("path") in paths:
            each["path"] = paths[each["path"]]


def _change_devices(config: dict[str, Any], edits: Edits) -> None:
    of = {change.old.path: change.new for change in edits.changes}
    strange = {(node.major, node.minor) for node in edits.strange}
    after: dict[str, dict[str, Any]] = {}
    for entry in devices(config):
        path = str(entry.get("path"))
        if path in of:
            for node in of[path]:
                after[node.path] = entry | {"path": node.path, "major": node.major, "minor": node.minor}
        elif entry.get("type") == "b" or _number(entry) not in strange:
            after.setdefault(path, entry)
    if devices(config):
        config["linux"]["devices"] = list(after.values())


def _number(entry: Mapping[str, Any]) -> _Number:
    major, minor = entry.get("major"), entry.get("minor")
    return (major, minor) if isinstance(major, int) and isinstance(minor, int) else (-1, -1)


def _change_rules(config: dict[str, Any], edits: Edits) -> None:
    """Allowed and forbidden devices by number."""
    rules = _rules(config)
    if rules is None:
        return
    of = _numbers(edits.changes)
    majors = {old[0]: new[0][0] for old, new in of.items()}
    strange = {(node.major, node.minor) for node in edits.strange}
    after: list[Any] = []
    for rule in rules:
        if not isinstance(rule, dict) or rule.get("type") != "c" or not isinstance(rule.get("major"), int):
            after.append(rule)
            continue
        major, minor = rule["major"], rule.get("minor")
        if not isinstance(minor, int) or minor < 0:  # every minor of that major
            new_rules = [rule | {"major": majors.get(major, major)}]
        elif (major, minor) in of:
            new_rules = [rule | {"major": x, "minor": y} for x, y in of[major, minor]]
        else:
            new_rules = [rule] if (major, minor) not in strange else []
        after += new_rules
    rules[:] = after


def _allow_devices(config: dict[str, Any]) -> None:
    """If there are rules, make them allow the devices of the configuration."""
    rules = _rules(config)
    if rules is not None:
        rules += _list_left_out(config, [each for each in rules if isinstance(each, dict)])


def _numbers(changes: Iterable[Change]) -> dict[_Number, Sequence[_Number]]:
    """Return new device numbers by old one. If only a second name disappears, its rule stays."""
    return {
        (change.old.major, change.old.minor): tuple(dict.fromkeys((n.major, n.minor) for n in change.new))
        for change in changes
        if change.new
    }


def _replace(path: str, data: bytes) -> None:
    """Write a file in one step, and keep its mode and owner."""
    before = os.stat(path)
    descriptor, name = tempfile.mkstemp(prefix=".config-", dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, before.st_mode & 0o7777)
            os.fchown(descriptor, before.st_uid, before.st_gid)
            file.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
