"""What waits for `gpusnap recover`, as lines for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.operations.unknown_containers import Unknown
from gpusnap.runtime_shim.snapshot import recover_checkpoint as recovery
from gpusnap.runtime_shim.snapshot import recover_restore
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension


@dataclass(frozen=True, slots=True)
class Waiting:
    """A checkpoint or restore that is under way, or was cut off; or a container that Podman does not know."""

    container: str
    kind: str
    """checkpoint, restore, suspend, resume, or unknown: it was restored, and Podman says it does not run."""
    at_work: bool
    """Its gpusnap is still there, and nobody else may touch the container."""
    processes: tuple[int, ...]
    """The PIDs that were suspended and that are still there; of an unknown container its init."""
    image: str
    """The image directory; empty for an unknown container, and for a suspend or resume."""
    why: str = ""
    """What Podman says of an unknown container."""


def waiting(
    checkpoints: Sequence[journal.Entry],
    restores: Sequence[recover_restore.Restore],
    unknown: Sequence[Unknown] = (),
    moving: Sequence[Suspension] = (),
) -> tuple[Waiting, ...]:
    """All of these, by container."""
    found = [
        Waiting(e.container, "checkpoint", e.at_work, tuple(p.pid for p in recovery.alive(e)), e.image)
        for e in checkpoints
    ]
    found += [Waiting(e.container, "restore", e.at_work, (), e.image) for e in restores]
    found += [Waiting(e.container, "unknown", False, e.processes, "", e.why) for e in unknown]
    found += [
        Waiting(
            each.container,
            "suspend" if each.stage is Stage.SUSPENDING else "resume",
            each.at_work,
            tuple(process.pid for process in each.processes),
            "",
        )
        for each in moving
    ]
    return tuple(sorted(found, key=lambda each: (each.container, each.kind)))


def line(each: Waiting) -> str:
    """One for people."""
    if each.kind == "unknown":
        return f"{each.container}  {each.why}"
    if each.at_work:
        state = "gpusnap is at work on it"
    elif each.kind in ("suspend", "resume"):
        return f"{each.container}  its {each.kind} was cut off"
    elif each.kind == "restore":
        state = "its restore was cut off"
    else:
        state = "its checkpoint was cut off; processes: " + (" ".join(map(str, each.processes)) or "none")
    return f"{each.container}  {state}  image: {each.image}"


def as_json(found: Sequence[Waiting]) -> str:
    """A list of objects with the fields of `Waiting`."""
    return json.dumps([asdict(each) for each in found], indent=1)
