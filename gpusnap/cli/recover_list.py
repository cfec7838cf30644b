"""What waits for `gpusnap recover`, as lines for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from gpusnap.checkpoints.migrations import Leaving
from gpusnap.migration.records import Record
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.operations.unknown_containers import Unknown
from gpusnap.runtime_shim.snapshot import restore_record
from gpusnap.runtime_shim.snapshot.bring_back import alive
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.suspensions import THERE, Suspension


@dataclass(frozen=True, slots=True)
class Waiting:
    """A checkpoint or restore that is under way, or was cut off; or a container that Podman does not know."""

    container: str
    kind: str
    """checkpoint, restore, suspend, resume, leaving or coming: it is migrated to another host, or comes from
    one; unknown: it was restored, and Podman says it does not run."""
    at_work: bool
    """Its gpusnap is still there, and nobody else may touch the container."""
    processes: tuple[int, ...]
    """The PIDs that were suspended and that are still there; of an unknown container its init."""
    image: str
    """The image directory of a checkpoint or restore; else empty."""
    why: str = ""
    """What Podman says of an unknown container, and what is known of one that is migrated."""


def waiting(
    checkpoints: Sequence[journal.Entry],
    restores: Sequence[restore_record.Restore],
    unknown: Sequence[Unknown] = (),
    moving: Sequence[Suspension] = (),
    leaving: Sequence[Leaving] = (),
    coming: Sequence[Record] = (),
) -> tuple[Waiting, ...]:
    """All of these, by container."""
    found = [
        Waiting(e.container, "checkpoint", e.at_work, tuple(p.pid for p in alive(e)), e.image)
        for e in checkpoints
    ]
    found += [Waiting(e.container, "restore", e.at_work, (), e.image) for e in restores]
    found += [Waiting(e.container, "unknown", False, e.processes, "", e.why) for e in unknown]
    found += [
        Waiting(
            each.container,
            "suspend" if each.stage in THERE else "resume",
            each.at_work,
            tuple(process.pid for process in each.processes),
            "",
        )
        for each in moving
    ]
    found += [Waiting(e.container, "leaving", e.at_work, (), "", _of_leaving(e)) for e in leaving]
    found += [
        Waiting(e.container or e.name, "coming", e.at_work, (), "", f"{e.name} comes from another host")
        for e in coming
    ]
    return tuple(sorted(found, key=lambda each: (each.container, each.kind)))


def line(each: Waiting) -> str:
    """One for people."""
    if each.kind == "unknown":
        return f"{each.container}  {each.why}"
    if each.kind in ("leaving", "coming"):
        how = "gpusnap is at work on it" if each.at_work else "that was cut off"
        return f"{each.container}  {each.why}: {how}"
    if each.at_work:
        state = "gpusnap is at work on it"
    elif each.kind in ("suspend", "resume"):
        return f"{each.container}  its {each.kind} was cut off"
    elif each.kind == "restore":
        state = "its restore was cut off"
    else:
        state = "its checkpoint was cut off; processes: " + (" ".join(map(str, each.processes)) or "none")
    return f"{each.container}  {state}  image: {each.image}"


def _of_leaving(each: Leaving) -> str:
    may = f", and may run there; its checkpoint: {each.checkpoint}" if each.digest else ""
    return f"{each.name} is migrated to {each.host}{may}"


def as_json(found: Sequence[Waiting]) -> str:
    """A list of objects with the fields of `Waiting`."""
    return json.dumps([asdict(each) for each in found], indent=1)
