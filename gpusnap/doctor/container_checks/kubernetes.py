"""A container of a Kubernetes pod: its pause and kubelet's probes, open files in the pod's volumes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpusnap.doctor.base.check import Check, make_refused, ok, plural, warning
from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.process.proc import Process
from gpusnap.runtime_shim.records.cri_layout import OF_CRI
from gpusnap.runtime_shim.snapshot.records import volumes

# Defaults of a probe (kubernetes, pkg/apis/core/v1/defaults.go, SetDefaults_Probe).
_PERIOD, _THRESHOLD = 10, 3


def check_probes(annotations: Mapping[str, str], pause: float) -> Iterator[Check]:
    """Say which liveness probe allows a pause of so many seconds; nothing for containers outside of pods.

    A runtime does not know a pod's probes, and kubelet keeps them in memory. The first failing one may come
    right after the start of the pause, and the last one (failureThreshold - 1) * periodSeconds later: then
    kubelet kills the container. Readiness probes remove no container.
    """
    if OF_CRI not in annotations:
        return
    allowed = (_THRESHOLD - 1) * _PERIOD
    seconds = math.ceil(pause)
    facts = {"pause": pause, "default": allowed}
    needed = f"(failureThreshold - 1) * periodSeconds must be more than {seconds}"
    if pause < allowed:
        yield ok(
            "liveness probe",
            f"with Kubernetes' defaults it allows {allowed} s, and the pause may take {seconds} s; the "
            f"pod's own values are not visible here: {needed}",
            **facts,
        )
        return
    threshold = math.floor(pause / _PERIOD) + 2
    yield warning(
        "liveness probe",
        f"the pause may take {seconds} s, but by default kubelet kills a container whose liveness probe "
        f"fails for {allowed} s; the pod's own values are not visible here",
        f"if the pod has a livenessProbe: {needed}, such as periodSeconds: {_PERIOD} with failureThreshold: "
        f"{threshold}",
        **facts,
    )


def open_files(config: Mapping[str, Any], processes: Iterable[Process], limit: int) -> Iterator[Check]:
    """Check open files in emptyDirs and the pod's /dev/shm, which are included up to criu.ghost-limit."""
    own = tuple(each for each in volumes.find(config, "") if each.kind is volumes.Kind.POD)
    if not own:
        return
    try:
        found = volumes.list_open(processes, own)
        volumes.check(found, limit)
    except Refused as error:
        yield make_refused("pod's volumes", error)
        return
    files = [each for each in found if each.size]
    size = sum(each.size for each in files)
    says = "no file in its emptyDirs and /dev/shm is open"
    if found:
        count = plural(len(files), "open file")
        says = f"{count} with {human(size)} in its emptyDirs and /dev/shm, included"
    yield ok("pod's volumes", says, files=len(files), size=size, limit=limit)
