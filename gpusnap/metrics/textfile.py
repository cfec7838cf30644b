"""Metrics for node_exporter's textfile collector: one file in Prometheus' text format.

The file also stores the counts: each writer reads it, adds to it, and replaces it, while it holds the lock of
a file beside it. Lines of other writers are dropped. Format:
prometheus.io/docs/instrumenting/exposition_formats, text format 0.0.4.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gpusnap.engines.install.files import put_file
from gpusnap.oci.base.files import is_folder, read_below
from gpusnap.oci.base.locks import lock_exclusively
from gpusnap.oci.base.patterns import compile_later

NAME = "gpusnap.prom"
_LOCK = ".gpusnap.prom.lock"
_PATIENCE = 5.0
_LARGEST = 4 << 20
# A host that runs a container for each job makes new names forever; those that were seen last are kept.
_MOST_CONTAINERS = 256

METRICS: Mapping[str, tuple[str, str]] = {
    "gpusnap_checkpoints_total": ("counter", "Checkpoints made by gpusnap."),
    "gpusnap_restores_total": ("counter", "Restores done by gpusnap."),
    "gpusnap_failures_total": ("counter", "Checkpoints and restores that failed, by error code."),
    "gpusnap_checkpoint_written_bytes_total": (
        "counter",
        "Bytes added on disk by checkpoints.",
    ),
    "gpusnap_checkpoint_seconds": ("gauge", "Duration of the last checkpoint."),
    "gpusnap_checkpoint_pause_seconds": ("gauge", "How long the last checkpoint stopped the processes."),
    "gpusnap_checkpoint_size_bytes": ("gauge", "Size of the last checkpoint."),
    "gpusnap_checkpoint_new_bytes": ("gauge", "Bytes added by the last checkpoint."),
    "gpusnap_checkpoint_gpu_memory_bytes": ("gauge", "GPU memory in the last checkpoint."),
    "gpusnap_last_checkpoint_timestamp_seconds": ("gauge", "Time of the last checkpoint."),
    "gpusnap_last_restore_timestamp_seconds": ("gauge", "Time of the last restore."),
    "gpusnap_last_failure_timestamp_seconds": ("gauge", "Time of the last failed checkpoint or restore."),
    "gpusnap_restore_seconds": ("gauge", "Duration of the last restore."),
}
"""Type and help of each metric, by its name."""

_LINE = compile_later(r'([a-z_]+)\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\} (-?[0-9.e+-]+)', re.ASCII)
_LABEL = compile_later(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', re.ASCII)

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and its labels."""


class Values:
    """The value of each series."""

    def __init__(self, values: dict[Series, float]) -> None:
        self._values = values

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Increase a counter."""
        key = _series(name, labels)
        self._values[key] = self._values.get(key, 0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._values[_series(name, labels)] = value

    def text(self) -> str:
        """Return the content of the file."""
        self._forget()
        lines = []
        for name, (kind, help_) in METRICS.items():
            found = sorted(item for item in self._values.items() if item[0][0] == name)
            if found:
                lines += [f"# HELP {name} {help_}", f"# TYPE {name} {kind}"]
            for (_, labels), value in found:
                written = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
                lines.append(f"{name}{{{written}}} {value:.15g}")
        return "".join(f"{line}\n" for line in lines)

    def _forget(self) -> None:
        """Drop the containers with the oldest last operation."""
        seen: dict[str, float] = {}
        for (name, labels), value in self._values.items():
            container = dict(labels).get("container")
            if container is not None:
                at = value if name.endswith("_timestamp_seconds") else 0.0
                seen[container] = max(seen.get(container, 0.0), at)
        stay = set(sorted(seen, key=lambda each: seen[each], reverse=True)[:_MOST_CONTAINERS])
        for key in [*self._values]:
            container = dict(key[1]).get("container")
            if container is not None and container not in stay:
                del self._values[key]


@contextmanager
def update_values(folder: str) -> Iterator[Values]:
    """Read the values in a folder's file for changes in the block, and write them at its end.

    Raises OSError, StoreBusy if another process holds the lock for long.
    """
    if not is_folder(folder):
        raise FileNotFoundError(f"there is no directory {folder}")
    with lock_exclusively(os.path.join(folder, _LOCK), patience=_PATIENCE, what="the metrics"):
        values = Values(_read(folder))
        yield values
        # node_exporter, which reads it, runs as another user.
        put_file(os.path.join(folder, NAME), values.text().encode(), 0o644, sync=False)


def _read(folder: str) -> dict[Series, float]:
    """Return our metrics in the file; empty if it does not exist, or is no file."""
    try:
        text = read_below(folder, NAME, limit=_LARGEST).decode("utf-8", "replace")
    except (FileNotFoundError, ValueError):
        return {}
    found: dict[Series, float] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is not None and match[1] in METRICS:
            labels = {key: _unescape(value) for key, value in _LABEL.findall(match[2])}
            try:
                found[_series(match[1], labels)] = float(match[3])
            except ValueError:
                continue
    return found


def _series(name: str, labels: Mapping[str, str]) -> Series:
    return name, tuple(sorted(labels.items()))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], text)
