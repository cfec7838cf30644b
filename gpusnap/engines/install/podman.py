"""Podman for `gpusnap install`: a drop-in of containers.conf(5), and the hooks if they are requested.

`runtime_supports_json` and `hooks_dir` replace Podman's built-in values, and those of earlier files. The form
`["x", {append=true}]` of newer versions would append, but is an error for Podman 4.3 of Debian 12. So the
drop-in contains Podman's own names, those of the host's other files, and ours; every version accepts that.
Sources: containers/common, pkg/config/default.go (RuntimeSupportsJSON of Podman 4.3, and with youki of 4.9
and 5), new.go (systemConfigs: the order of the files).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpusnap.engines.install.config_files import HEAD, drop_ins, read, toml_list
from gpusnap.engines.install.files import join_root
from gpusnap.engines.install.installer import Item
from gpusnap.hooks import hooksd

DROP_IN = "/etc/containers/containers.conf.d/90-gpusnap.conf"
RUNTIME = "gpusnap-runtime"
"""Its name among Podman's runtimes; archives and images of checkpoints contain it."""
HOOKS_DIRECTORY = "/etc/gpusnap/hooks.d"

_FILES = ("/usr/share/containers/containers.conf", "/etc/containers/containers.conf")
_SUPPORTS_JSON = ("crun", "runc", "kata", "runsc", "youki", "krun")
_HOOKS_DIRECTORIES = hooksd.SHARED_DIRECTORIES


def items(program: str, *, root: str = "/", default: bool = False, hook: str = "") -> list[Item]:
    """Return the drop-in for gpusnap-runtime at `program`, as the runtime of every container with `default`.

    `hook` is the path of gpusnap-hook: then the files of hooks.d are included. Raises GpusnapError if a file
    of Podman's cannot be read.
    """
    engines = [engine for _, engine in _engines(root)]
    json_names = [*_SUPPORTS_JSON, *_find_list(engines, "runtime_supports_json"), RUNTIME]
    lines = [HEAD, "[engine]"]
    if default:
        lines.append(f'runtime = "{RUNTIME}"')
    lines.append(f"runtime_supports_json = {toml_list(json_names)}")
    made = []
    if hook:
        folders = [*_HOOKS_DIRECTORIES, *_find_list(engines, "hooks_dir"), HOOKS_DIRECTORY]
        lines.append(f"hooks_dir = {toml_list(folders)}")
        hooks = hooksd.files(hook)
        made = [Item(f"{HOOKS_DIRECTORY}/{name}", "podman", data) for name, data in hooks.items()]
    lines += ["[engine.runtimes]", f"{RUNTIME} = {toml_list([program])}"]
    return [*made, Item(DROP_IN, "podman", ("\n".join(lines) + "\n").encode())]


def notes(program: str, *, root: str = "/", default: bool = False) -> list[str]:
    """Return notes about other files of Podman's that contradict the drop-in."""
    said = []
    for path, engine in _engines(root):
        last = os.path.dirname(path) == os.path.dirname(DROP_IN) and path > DROP_IN
        other = engine.get("runtimes", {})
        paths = other.get(RUNTIME) if isinstance(other, Mapping) else None
        if paths is not None and paths != [program]:
            which = "it takes precedence" if last else f"{DROP_IN} counts"
            said.append(f"{path} also names {RUNTIME}, as {json.dumps(paths)}; {which}")
        if (
            last
            and "runtime_supports_json" in engine
            and RUNTIME not in _strings(engine["runtime_supports_json"])
        ):
            said.append(f"{path} sets runtime_supports_json without {RUNTIME}: add it there")
        if last and default and engine.get("runtime", RUNTIME) != RUNTIME:
            said.append(f"{path} sets runtime and takes precedence: {RUNTIME} is not Podman's default")
    return said


def files(root: str = "/") -> list[str]:
    """Return the files that Podman reads, in its order."""
    return [*_FILES, *drop_ins(root, os.path.dirname(DROP_IN), ".conf")]


def _engines(root: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield path and table [engine] of each file that Podman reads except ours, in its order."""
    for path in files(root):
        if path == DROP_IN:
            continue
        engine = (read(join_root(root, path), "Podman") or {}).get("engine", {})
        if isinstance(engine, Mapping):
            yield path, engine


def _find_list(engines: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    return [each for engine in engines for each in _strings(engine.get(key))]


def _strings(value: Any) -> list[str]:
    """Return the strings of a list, which may also contain a table {append = true}."""
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
