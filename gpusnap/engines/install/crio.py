"""CRI-O for `gpusnap install`: a drop-in of crio.conf.d(5) with a runtime handler.

CRI-O's packages name a monitor (conmon, outside PATH) in each of their handlers, and CRI-O does not start
if a handler has none and PATH has no conmon; so ours uses that of the default handler. It gets its own
runtime_root: crun and runc cannot read each other's state.
Source: cri-o docs/crio.conf.5.md, crio.runtime.runtimes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from gpusnap.engines.install.config_files import HEAD, drop_ins, read
from gpusnap.engines.install.files import join_root
from gpusnap.engines.install.installer import Item

DROP_IN = "/etc/crio/crio.conf.d/90-gpusnap.conf"
HANDLER = "gpusnap"
"""The handler's name, for RuntimeClass and `crictl runp --runtime`."""

_CONFIG = "/etc/crio/crio.conf"
_ROOT = "/run/crio-gpusnap"


def items(program: str, *, root: str = "/", default: bool = False) -> list[Item]:
    """Return the drop-in for gpusnap-runtime at `program`, as the default handler with `default`.

    Raises GpusnapError if a file of CRI-O's cannot be read.
    """
    lines = [HEAD]
    if default:
        lines += ["[crio.runtime]", f'default_runtime = "{HANDLER}"']
    lines += [f"[crio.runtime.runtimes.{HANDLER}]", f"runtime_path = {json.dumps(program)}"]
    lines += ['runtime_type = "oci"', f'runtime_root = "{_ROOT}"']
    monitor = _monitor(root)
    if monitor:
        lines.append(f"monitor_path = {json.dumps(monitor)}")
    return [Item(DROP_IN, "crio", ("\n".join(lines) + "\n").encode())]


def files(root: str = "/") -> list[str]:
    """Return the files that CRI-O reads, in its order."""
    return [_CONFIG, *drop_ins(root, os.path.dirname(DROP_IN))]


def _monitor(root: str) -> str:
    """Return the monitor of the default handler, or of another; empty if none is named."""
    default, monitors = "", dict[str, str]()
    for path in files(root):
        if path == DROP_IN:
            continue
        runtime = _runtime(read(join_root(root, path), "CRI-O") or {})
        named = runtime.get("default_runtime")
        default = named if isinstance(named, str) else default
        handlers = runtime.get("runtimes")
        for name, handler in handlers.items() if isinstance(handlers, Mapping) else ():
            monitor = handler.get("monitor_path") if isinstance(handler, Mapping) else None
            if isinstance(monitor, str) and monitor:
                monitors[name] = monitor
    return monitors.get(default) or next(iter(monitors.values()), "")


def _runtime(document: Mapping[str, Any]) -> Mapping[str, Any]:
    crio = document.get("crio")
    runtime = crio.get("runtime") if isinstance(crio, Mapping) else None
    return runtime if isinstance(runtime, Mapping) else {}
