"""containerd for `gpusnap install`: a runtime handler of its CRI plugin.

`ctr run --runc-binary gpusnap-runtime` needs nothing of this; Kubernetes and crictl ask for the handler by
its name. containerd's configuration can be added to in these ways:

| /etc/containerd/config.toml | containerd | what is written |
|---|---|---|
| is not there | 1.x | the file itself |
| is not there | 2.x | the file itself, which imports conf.d, and the handler in conf.d |
| imports conf.d | 2.x | the handler in conf.d |
| anything else | any | FRAGMENT, which somebody has to append to it |

An import is not enough for 1.7: there, a plugin's table replaces that of the file before (services/server/
config, mergeConfig), so the handler would replace all other settings of the CRI plugin, including its handler
runc, without which the plugin does not load. For the same reason, a file with a table of handlers but without
runc must also name runc. An imported file must have the version of the file that imports it: 2.1 drops the
tables of the older one.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from gpusnap.engines.install.config_files import HEAD, read
from gpusnap.engines.install.files import join_root
from gpusnap.engines.install.installer import Item
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.errors import GpusnapError

CONFIG = "/etc/containerd/config.toml"
DROP_IN = "/etc/containerd/conf.d/gpusnap.toml"
FRAGMENT = "/etc/gpusnap/containerd.toml"
HANDLER = "gpusnap"
"""The handler's name, for RuntimeClass and `crictl runp --runtime`."""

# Where the CRI plugin's handlers are, by the version of the file.
_PLUGINS = {2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
_MOST_FILES = 256
_IMPORTS = 'imports = ["/etc/containerd/conf.d/*.toml"]'


@dataclass(frozen=True, slots=True)
class HandlerPlan:
    """The files for containerd, and the steps that are left to the user."""

    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()


def plan_handler(
    program: str, *, version: int, root: str = "/", default: bool = False, ours: bool = False
) -> HandlerPlan:
    """Plan the handler for gpusnap-runtime at `program`, as the default one with `default`.

    `version` is containerd's first number; `ours`: its configuration is a file that an earlier call wrote.
    Raises GpusnapError if the configuration cannot be read.
    """
    found = None if ours else read(join_root(root, CONFIG), "containerd")
    if found is None:
        return HandlerPlan(_make_whole(program, version, default))
    form = 2 if found.get("version") == 2 else 3 if found.get("version") == 3 else 0
    if not form:
        raise GpusnapError(
            f"{CONFIG} has version {found.get('version', 1)}, which gpusnap cannot extend",
            hint="convert it to version 2 with `containerd config migrate`, or omit --containerd",
        )
    if version >= 2 and _has_imports(found):
        handler = _handler(program, form, systemd=_uses_systemd(root))
        text = "\n".join([HEAD, f"version = {form}", *_default(form, default), *handler, ""])
        return HandlerPlan((Item(DROP_IN, "containerd", text.encode()),))
    return _explain_by_hand(found, program, form, root, default)


def _make_whole(program: str, version: int, default: bool) -> tuple[Item, ...]:
    if version >= 2:
        main = f"{HEAD}\nversion = 3\n{_IMPORTS}\n"
        text = "\n".join([HEAD, "version = 3", *_default(3, default), *_handler(program, 3), ""])
        return (Item(DROP_IN, "containerd", text.encode()), Item(CONFIG, "containerd", main.encode()))
    lines = [HEAD, "version = 2", *_default(2, default), *_runc(2), *_handler(program, 2), ""]
    return (Item(CONFIG, "containerd", "\n".join(lines).encode()),)


def _explain_by_hand(
    found: Mapping[str, Any], program: str, form: int, root: str, default: bool
) -> HandlerPlan:
    handlers = _handlers(found, form)
    lines = [f"# The handler of gpusnap-runtime; append it to {CONFIG}."]
    lines += [] if handlers else _runc(form)
    text = "\n".join([*lines, *_handler(program, form, systemd=_uses_systemd(root)), ""])
    item = Item(FRAGMENT, "containerd", text.encode())
    named = _program(handlers.get(HANDLER))
    if named == program:
        notes = [f"{CONFIG} already has the handler {HANDLER}"]
    elif named is not None:
        notes = [
            (f"{CONFIG} has a handler {HANDLER} for {named or 'runc'}: replace it with the one in {FRAGMENT}")
        ]
    else:
        notes = [
            (
                f"gpusnap install does not change your {CONFIG}; add the handler to it, and restart "
                f"containerd: cat {join_root(root, FRAGMENT)} >>{join_root(root, CONFIG)}"
            )
        ]
    if default:
        notes.append(
            f'to make it the default, set default_runtime_name = "{HANDLER}" in its {_containerd(form)}'
        )
    return HandlerPlan((item,), tuple(notes))


def files(root: str = "/") -> list[str]:
    """Return the files that containerd reads, importing files first. A file that is no TOML has none."""
    found, waiting = list[str](), [CONFIG]
    while waiting and len(found) < _MOST_FILES:
        path = waiting.pop(0)
        if path in found:
            continue
        found.append(path)
        with suppress(GpusnapError):
            document = read(join_root(root, path), "containerd") or {}
            waiting += [each for pattern in _patterns(document, path) for each in _glob_paths(root, pattern)]
    return found


def _glob_paths(root: str, pattern: str) -> Iterator[str]:
    """Paths of the host."""
    for path in sorted(glob.glob(join_root(root, pattern))):
        yield path if root in ("", "/") else "/" + os.path.relpath(path, root)


def _patterns(found: Mapping[str, Any], path: str) -> list[str]:
    """Return a file's imports as absolute patterns: a relative one is relative to the file's folder."""
    patterns = found.get("imports")
    patterns = patterns if isinstance(patterns, list) else []
    return [os.path.join(os.path.dirname(path), each) for each in patterns if isinstance(each, str)]


def _has_imports(found: Mapping[str, Any]) -> bool:
    return any(fnmatch.fnmatchcase(DROP_IN, each) for each in _patterns(found, CONFIG))


def _table(found: Any, *keys: str) -> Mapping[str, Any]:
    """Return a nested table; an empty one if there is none."""
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _handlers(found: Mapping[str, Any], form: int) -> Mapping[str, Any]:
    return _table(found, "plugins", _PLUGINS[form], "containerd", "runtimes")


def _program(handler: Any) -> str | None:
    """Return the BinaryName of a handler, "" if it has none; None if there is no such handler."""
    if not isinstance(handler, Mapping):
        return None
    options = handler.get("options")
    name = options.get("BinaryName", "") if isinstance(options, Mapping) else ""
    return name if isinstance(name, str) else ""


def _containerd(form: int) -> str:
    return f'[plugins."{_PLUGINS[form]}".containerd]'


def _uses_systemd(root: str) -> bool:
    """Return whether systemd makes the cgroups of the default handler: the kubelet requires the same for all.

    If several files set it, the last one counts. Raises GpusnapError if one cannot be read.
    """
    default, systemd = "runc", dict[str, bool]()
    for path in files(root):
        document = (read(join_root(root, path), "containerd") or {}) if path != DROP_IN else {}
        for form, plugin in _PLUGINS.items():
            named = _table(document, "plugins", plugin, "containerd").get("default_runtime_name")
            default = named if isinstance(named, str) else default
            for name in (handlers := _handlers(document, form)):
                said = _table(handlers, name, "options").get("SystemdCgroup")
                systemd |= {name: said} if isinstance(said, bool) else {}
    return systemd.get(default, False)


def _handler(program: str, form: int, *, systemd: bool = False) -> list[str]:
    table = f'plugins."{_PLUGINS[form]}".containerd.runtimes.{HANDLER}'
    return [
        f"[{table}]",
        '  runtime_type = "io.containerd.runc.v2"',
        f"  [{table}.options]",
        f"    BinaryName = {json.dumps(program)}",
        *(["    SystemdCgroup = true"] if systemd else []),
    ]


def _runc(form: int) -> list[str]:
    table = f'plugins."{_PLUGINS[form]}".containerd.runtimes.runc'
    return [f"[{table}]", '  runtime_type = "io.containerd.runc.v2"']


def _default(form: int, default: bool) -> list[str]:
    return [_containerd(form), f'  default_runtime_name = "{HANDLER}"'] if default else []
