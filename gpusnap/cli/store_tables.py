"""What the commands of the store print: tables for people, and JSON."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpusnap.checkpoints.damage import VerifyResult
from gpusnap.checkpoints.labels import is_label, labels_in, written_labels
from gpusnap.checkpoints.list import UNREAD, Listing
from gpusnap.checkpoints.locator import is_default
from gpusnap.checkpoints.statistics import (
    Comparison,
    Part,
    SharedChunks,
    Span,
    Statistics,
    count_zeros,
    parts,
)
from gpusnap.cli.json_output import document
from gpusnap.cli.moved import blobs
from gpusnap.cli.tables import make_plain, say, table
from gpusnap.oci.base.dataclass import replace
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.store.gc import Collected, Spared
from gpusnap.operations import diff as records
from gpusnap.operations.open import StoredCheckpoint
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.records.manifest import GpuProcess, Manifest

if TYPE_CHECKING:
    from rich.console import Console

# The digits of a digest in tables; a store takes as many as tell it from the others.
DIGITS = 12
_MOST_LINES = 20


def shorten_digest(digest: str) -> str:
    """Return the first digits of a digest."""
    return digest.partition(":")[2][:DIGITS]


def format_fault(digest: str, fault: str) -> str:
    """Return a line about a checkpoint that is damaged, or cannot be read."""
    return f"{shorten_digest(digest)} {'' if fault.startswith(UNREAD) else 'is damaged: '}{fault}"


def print_heading(console: Console, stored: StoredCheckpoint) -> None:
    """Print where an artifact is, its names, digest and parts."""
    names = ", ".join(stored.names) or "(no name)"
    artifact = stored.artifact
    size = sum(each.size for each in (*artifact.blobs(), *artifact.documents))
    say(console, f"{names} in {stored.where}, {human(size)}")
    say(console, stored.root.digest)
    for what, part in (("records", artifact.records), ("rootfs diff", artifact.rootfs)):
        if part is not None:
            say(console, f"{what}: {human(part.size)}, {part.digest}")
    if artifact.carried:
        carried = sum(each.size for each in artifact.carried)
        say(console, f"containerd's blobs: {human(carried)} in {len(artifact.carried)}")
    if artifact.records is None:
        say(console, "records: none; this is the memory of a checkpoint in a Podman archive")
    if artifact.chunks:
        chunks = sum(each.size for each in artifact.chunks)
        say(console, f"chunks: {human(chunks)} in {blobs(len(artifact.chunks))}")
    labels = labels_in(artifact.annotations)
    if labels:
        say(console, f"labels: {written_labels(labels)}")
    for key, value in sorted(artifact.annotations.items()):
        if not is_label(key):
            say(console, f"  {key} = {value}")
    say(console, "")


def print_memory(console: Console, record: Manifest, figures: Statistics) -> None:
    """Print what is in chunks, by process and region, and the figures of all chunks."""
    found = sorted(parts(record), key=lambda part: -part.table.size)
    if not found:
        return
    say(console, "")
    names = {process.pid: process.name for process in record.processes}
    rows = table("memory in chunks", "process", "region or image", "memory", "zero", "chunks", "stored")
    for part in found[:_MOST_LINES]:
        rows.add_row(
            make_plain(_name_owner(part.process, names)),
            make_plain(part.name),
            human(part.table.size),
            human(count_zeros(part.table)),
            str(len(part.table.chunks)),
            human(part.table.stored),
        )
    console.print(rows)
    _print_more(console, found[_MOST_LINES:])
    chunks = "1 chunk" if figures.chunks == 1 else f"{figures.chunks} chunks"
    say(
        console,
        f"{human(figures.size)} in {chunks}: {human(figures.zero)} zero, "
        f"{human(figures.repeated)} repeated; {blobs(figures.blobs)} ({figures.zstd} zstd, "
        f"{figures.planes} in planes, {figures.plain} plain) of {human(figures.stored)}, "
        f"{figures.ratio:.1f} to 1",
    )
    say(console, "")


def _name_owner(process: int | None, names: Mapping[int, str]) -> str:
    return "CRIU" if process is None else f"{process} {names.get(process, '')}".rstrip()


def _print_more(console: Console, rest: Sequence[Part]) -> None:
    if rest:
        size = sum(part.table.size for part in rest)
        say(console, f"and {len(rest)} smaller ones of {human(size)} together (see --json)")


def print_sharing(console: Console, found: Sequence[SharedChunks]) -> None:
    """Print what a checkpoint shares with others in its store."""
    if not found:
        return
    rows = table("shared with", "checkpoint", "size", "share", "digest", fixed=("size", "share", "digest"))
    for each in found[:_MOST_LINES]:
        name = ", ".join(each.names) or "(no name)"
        rows.add_row(make_plain(name), human(each.size), f"{each.share:.1%}", shorten_digest(each.digest))
    console.print(rows, "")


def artifact_document(stored: StoredCheckpoint, found: Sequence[SharedChunks]) -> dict[str, Any]:
    """Return an artifact for JSON."""
    artifact = stored.artifact
    blobs, documents = tuple(artifact.blobs()), artifact.documents

    def part(name: str) -> dict[str, Any] | None:
        layer = getattr(artifact, name)
        return None if layer is None else {"digest": layer.digest, "size": layer.size}

    return {
        "where": stored.where,
        "names": list(stored.names),
        "digest": stored.root.digest,
        "mediaType": stored.root.media_type,
        "size": sum(each.size for each in (*blobs, *documents)),
        "records": part("records"),
        "rootfs": part("rootfs"),
        "chunks": {"blobs": len(artifact.chunks), "size": sum(each.size for each in artifact.chunks)},
        "manifests": len(documents),
        "annotations": dict(sorted(artifact.annotations.items())),
        "labels": labels_in(artifact.annotations),
        "shared": [document(each) for each in found],
    }


# diff


def print_difference(
    console: Console, found: Comparison, files: Mapping[str, records.Difference], names: tuple[str, str]
) -> None:
    """Print the differences between A and B."""
    say(console, f"A: {names[0]}")
    say(console, f"B: {names[1]}")
    say(console, "")
    if found.parts:
        _spans(console, found)
    _processes(console, found)
    _gpus(console, found)
    for what, each in files.items():
        _files(console, what, each)


def _spans(console: Console, found: Comparison) -> None:
    sizes = ("same", "changed", "only A", "only B")
    rows = table("memory in chunks", "process", "region or image", *sizes, fixed=sizes)
    different = [each for each in found.parts if each.span != replace(Span(), same=each.span.same)]
    different.sort(key=lambda each: -(each.span.changed + each.span.only_a + each.span.only_b))
    for each in different[:_MOST_LINES]:
        rows.add_row(make_plain(_name_owner(each.process, {})), make_plain(each.name), *_sizes(each.span))
    rows.add_row("all", f"{len(found.parts)}", *_sizes(found.total))
    console.print(rows)
    if len(different) > _MOST_LINES:
        say(console, f"and {len(different) - _MOST_LINES} more with smaller differences (see --json)")
    new = f"{human(found.new.size)} in {blobs(found.new.blobs)}" if found.new.blobs else "nothing"
    say(console, f"B has {new} that A does not have")
    say(console, "")


def _sizes(span: Span) -> tuple[str, ...]:
    return tuple(human(size) for size in (span.same, span.changed, span.only_a, span.only_b))


def _processes(console: Console, found: Comparison) -> None:
    gone, come, changed = found.processes_only_a, found.processes_only_b, found.processes_changed
    if not (gone or come or changed):
        say(console, f"GPU processes: {found.processes_same}, the same in both")
        return
    rows = table("GPU processes", "PID", "", "command")
    for what, some in (("only A", gone), ("only B", come)):
        for process in some:
            rows.add_row(str(process.pid), what, make_plain(_command(process)))
    for a, b in changed:
        rows.add_row(str(a.pid), "A", make_plain(_command(a)))
        rows.add_row("", "B", make_plain(_command(b)))
    console.print(rows, "")


def _command(process: GpuProcess) -> str:
    return " ".join(process.command)[:200] or process.name


def _gpus(console: Console, found: Comparison) -> None:
    for what, some in (("only A", found.gpus_only_a), ("only B", found.gpus_only_b)):
        for gpu in some:
            say(console, f"GPU {gpu.uuid}, {gpu.model}: {what}, {human(gpu.memory_used)} used")
    for a, b in found.gpus_both:
        if a.memory_used != b.memory_used:
            used = f"A {human(a.memory_used)}, B {human(b.memory_used)} used"
            say(console, f"GPU {a.uuid}, {a.model}: {used}")


def _files(console: Console, what: str, found: records.Difference) -> None:
    lines = [("changed", change.name, change.a.size, change.b.size) for change in found.changed]
    lines += [("only A", name, file.size, 0) for name, file in found.only_a]
    lines += [("only B", name, 0, file.size) for name, file in found.only_b]
    if not lines:
        say(console, f"{what}: {found.same} files, the same in both" if found.same else f"{what}: none")
        return
    rows = table(f"{what} ({found.same} more are the same)", "name", "", "size in A", "size in B")
    for kind, name, size_a, size_b in lines[:_MOST_LINES]:
        in_a, in_b = human(size_a) if kind != "only B" else "", human(size_b) if kind != "only A" else ""
        rows.add_row(make_plain(name), kind, in_a, in_b)
    console.print(rows)
    if len(lines) > _MOST_LINES:
        say(console, f"and {len(lines) - _MOST_LINES} more (see --json)")


def difference_document(
    found: Comparison,
    files: Mapping[str, records.Difference],
    a: Mapping[str, str],
    b: Mapping[str, str],
) -> dict[str, Any]:
    """Return the differences for JSON; `a` and `b` say what was compared."""

    def processes(some: Sequence[GpuProcess]) -> list[dict[str, Any]]:
        return [{"pid": p.pid, "name": p.name, "command": list(p.command)} for p in some]

    return {
        "a": a,
        "b": b,
        "chunks": {
            **document(found.total),
            "newInB": document(found.new),
            "parts": [
                {"process": each.process, "name": each.name, **document(each.span)} for each in found.parts
            ],
        },
        "processes": {
            "same": found.processes_same,
            "changed": [
                {"pid": one.pid, "a": list(one.command), "b": list(other.command)}
                for one, other in found.processes_changed
            ],
            "onlyA": processes(found.processes_only_a),
            "onlyB": processes(found.processes_only_b),
        },
        "gpus": {
            "both": [
                {"uuid": one.uuid, "memoryUsedA": one.memory_used, "memoryUsedB": other.memory_used}
                for one, other in found.gpus_both
            ],
            "onlyA": [{"uuid": gpu.uuid, "memoryUsed": gpu.memory_used} for gpu in found.gpus_only_a],
            "onlyB": [{"uuid": gpu.uuid, "memoryUsed": gpu.memory_used} for gpu in found.gpus_only_b],
        },
        "files": {
            what: {
                "same": each.same,
                "changed": [document(change) for change in each.changed],
                "onlyA": [{"name": name, **document(file)} for name, file in each.only_a],
                "onlyB": [{"name": name, **document(file)} for name, file in each.only_b],
            }
            for what, each in files.items()
        },
    }


# verify, gc


def print_verified(console: Console, found: VerifyResult) -> None:
    """Print what was checked, and each blob that is damaged."""
    what = f"{found.what}: {human(found.size)} in {blobs(found.blobs)}"
    if not found.damaged:
        done = "no damage" if found.read else "all present; contents not read (see --deep)"
        say(console, f"{what}: {done}" if found.blobs else f"{found.what}: nothing to check")
    for each in found.damaged:
        name = each.digest or found.what
        say(console, f"{name}: {each.what}")
        for place in each.belongs_to:
            say(console, f"  {place}")
    if found.damaged:
        say(console, f"{what}: {len(found.damaged)} damaged")
    if found.note:
        say(console, f"  {found.note}")


def print_collected(console: Console, path: str, found: Collected, *, dry_run: bool) -> None:
    """Print what gc removed, or would remove."""
    removed = "would remove" if dry_run else "removed"
    say(console, f"{removed} {blobs(found.blobs)}, {human(found.size)}, from {path}")
    if found.stagings:
        commands = (
            "1 killed command" if len(found.stagings) == 1 else f"{len(found.stagings)} killed commands"
        )
        say(console, f"{removed} what {commands} left unfinished")
    for each in found.spared:
        say(console, describe_spared(each))
    verb = "is" if found.live_blobs == 1 else "are"
    say(console, f"{blobs(found.live_blobs)}, {human(found.live_size)}, {verb} in use")


def describe_spared(found: Spared) -> str:
    """Whose a staging directory is that was left, and what can be done with it."""
    # It takes time, and is rarely needed.
    from gpusnap.cli.recover_list import Names
    from gpusnap.runtime_shim.snapshot.memory import handover
    from gpusnap.runtime_shim.snapshot.records import journal
    from gpusnap.runtime_shim.snapshot.suspended_containers.spilled import explain_mark

    with suppress(OciError, GpusnapError):
        if container := handover.find_left(found.path):
            what = f"the memory of the checkpoint of {Names().format_name(container)}"
            frozen = found.path in journal.list_layouts()[0]
            does = "lets the container run on, and removes it" if frozen else "puts it into the store"
            return f"left {found.path}: {what}; gpusnap recover {does}"
    return f"left {found.path}: {explain_mark(found.why, found.path)}"


def explain_pages_only(found: Listing, *, needed: Collection[str] = ()) -> str:
    """Say how much of a store is memory without a name, which gc leaves, and how it is freed; "" for none.

    `needed`: the digests of entries that stopped containers need.
    """
    left = [row for row in found.rows if row.kind == "pages" and not row.names and row.digest not in needed]
    if not left:
        return ""
    place = "" if is_default(found.store) else f"oci:{shlex.quote(found.store)}"
    return (
        f"{human(sum(row.own for row in left))} of memory without a name is in the store, from a checkpoint "
        "that failed or whose records are in Podman or an archive. List it: gpusnap ls "
        f"{place and f'{place} '}--filter kind=pages. If nothing needs it: gpusnap rm --gc "
        f"{place and f'{place}:'}DIGEST"
    )
