"""The commands that show what is in checkpoints: inspect, diff."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import click

from gpusnap.base.progress import Progress
from gpusnap.checkpoints import statistics
from gpusnap.checkpoints.list import blobs_of, list_named
from gpusnap.checkpoints.processes import Process
from gpusnap.cli import store_tables
from gpusnap.cli import tables as show
from gpusnap.cli.completion import complete_checkpoint
from gpusnap.cli.json_output import document, print_json
from gpusnap.cli.options.registry import registry_options
from gpusnap.oci.base.errors import DigestError, LayoutError
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.store.store import Store
from gpusnap.operations import diff as records
from gpusnap.operations import processes as process_images
from gpusnap.operations.open import Checkpoint, StoredCheckpoint, get_manifest, open_checkpoint
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.records.manifest_json import encode

if TYPE_CHECKING:
    from rich.console import Console

_DEEPEST = 20
_LONGEST = 200


@click.command()
@click.argument("what", metavar="WHAT", shell_complete=complete_checkpoint)
@registry_options
@click.option(
    "--processes",
    is_flag=True,
    help="Show the processes in CRIU's images, with their open files and sockets.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect(what: str, plain_http: bool, processes: bool, as_json: bool) -> None:
    """Show the contents of the checkpoint WHAT: GPUs, processes, memory, and how long each step took.

    WHAT is in a store or a registry, an archive made by `podman container checkpoint --export` or by skopeo
    (oci-archive), or a directory of CRIU images. For a checkpoint in a store, the output also lists the other
    checkpoints that share blobs with it. From a registry, only the records are fetched, not the memory.

    --processes shows the contents of CRIU's images, also for containers without a GPU: the tree of processes
    with their PIDs in the container, command lines, threads, mapped and stored memory, GPU memory, open
    files, and sockets with addresses and states. A command line is known for GPU processes, and if the memory
    image that contains it is next to the others. GPU processes are shown as stopped, because gpusnap stops
    them for the dump.

    As JSON: the manifest (docs/format.md), with statistics (size, zero, repeated, chunks, blobs, plain, zstd,
    stored, ratio) if it has chunks, and artifact (where, names, digest, mediaType, size, records, rootfs,
    chunks, manifests, annotations, labels, shared) if it is stored as one. With --processes instead: a list
    of pid, parent, name, state, command, threads, files (descriptor, kind, path), sockets (descriptor,
    protocol, local, remote, state), memory (mapped, stored, earlier: the bytes in an earlier dump),
    gpuMemory.
    """
    if processes:
        _inspect_processes(what, as_json=as_json, plain_http=plain_http)
        return
    with Progress() as progress:
        progress.stage(f"reading {what}")
        with open_checkpoint(what, plain_http=plain_http) as checkpoint:
            stored = checkpoint.stored
            record = get_manifest(checkpoint) if stored is None else checkpoint.manifest
            shared = _find_shared(stored) if stored is not None else ()
    figures = statistics.statistics(record)
    if as_json:
        value = parse_json(encode(record)) if record is not None else {}
        value |= {"statistics": document(figures)} if figures.size else {}
        value |= {"artifact": store_tables.artifact_document(stored, shared)} if stored is not None else {}
        print_json(value)
        return
    console = show.output()
    if stored is not None:
        store_tables.print_heading(console, stored)
    if record is None:
        show.say(console, "a container without GPU state")
    else:
        show.print_manifest(console, record)
        pause = statistics.measure_stopped(record.timing)
        if pause is not None:
            show.say(console, f"pause: {_describe_pause(record, pause)}")
        store_tables.print_memory(console, record, figures)
    store_tables.print_sharing(console, shared)


def _describe_pause(record: Manifest, seconds: float) -> str:
    """Return for how long a checkpoint stopped the processes, and what followed."""
    steps = {step.name for step in record.timing}
    if "adopt" in steps:
        return "none, because the container was suspended"
    end = "they ran again" if "resume" in steps else "they had ended"
    return f"the processes were stopped for {seconds:.2f} s, until {end}"


def _inspect_processes(what: str, *, as_json: bool, plain_http: bool) -> None:
    """Print the processes of a checkpoint. Raises GpusnapError."""
    with Progress() as progress:
        progress.stage(f"reading {what}")
        with open_checkpoint(what, plain_http=plain_http) as checkpoint:
            found = process_images.read(checkpoint)
            record = checkpoint.manifest
    if as_json:
        print_json(_list_documents(found, record))
    else:
        _print_processes(show.output(), found, record)


@click.command()
@click.argument("a", metavar="A", shell_complete=complete_checkpoint)
@click.argument("b", metavar="B", shell_complete=complete_checkpoint)
@registry_options
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def diff(a: str, b: str, plain_http: bool, as_json: bool) -> None:
    """Show the differences between the checkpoints A and B.

    Memory is compared chunk by chunk, GPU processes by PID, GPUs by UUID. CRIU's images, the engine's records
    and the changed files of the rootfs are compared by name, size and content. The exit code is 0 whether
    they differ or not.

    As JSON: a and b (what, digest, created), chunks (same, changed, onlyA, onlyB in bytes of memory, newInB,
    the blobs that A does not have, and parts: the same for each process and region, or image), processes
    (same, changed, onlyA, onlyB), gpus (both, onlyA, onlyB), files (records and rootfs, each with same,
    changed, onlyA, onlyB).
    """
    with Progress() as progress, ExitStack() as stack:
        sides = []
        for word in (a, b):
            progress.stage(f"reading {word}")
            sides.append(stack.enter_context(open_checkpoint(word, plain_http=plain_http)))
        one, other = sides
        found = statistics.compare(one.manifest, other.manifest)
        files = [_files(each, progress) for each in sides]
    differences = {
        "records": records.compare(files[0].records, files[1].records),
        "rootfs": records.compare(files[0].rootfs, files[1].rootfs),
    }
    if as_json:
        print_json(store_tables.difference_document(found, differences, _side(one), _side(other)))
        return
    store_tables.print_difference(show.output(), found, differences, (_title(one), _title(other)))


def _find_shared(stored: StoredCheckpoint) -> tuple[statistics.SharedChunks, ...]:
    if stored.store is None:
        return ()
    artifact = stored.artifact
    own = {each.digest: each.size for each in (*artifact.blobs(), *artifact.documents)}

    def others(store: Store) -> Iterator[tuple[str, tuple[str, ...], Mapping[str, int]]]:
        for each in list_named(store):
            if each.root.digest != stored.root.digest:
                # A damaged one is not what is asked about.
                with suppress(LayoutError, DigestError):
                    yield each.root.digest, each.names, blobs_of(store, each.root)

    return statistics.find_shared(own, others(stored.store))


def _files(checkpoint: Checkpoint, progress: Progress) -> records.Files:
    progress.stage(f"reading {checkpoint.word}")
    done = 0

    def seen(size: int) -> None:
        nonlocal done
        done += size
        progress.at(done)

    return records.read(checkpoint, seen)


def _side(checkpoint: Checkpoint) -> dict[str, str]:
    stored, record = checkpoint.stored, checkpoint.manifest
    created = record.created if record is not None else ""
    return {
        "what": checkpoint.word,
        "digest": stored.root.digest if stored is not None else "",
        "created": created,
    }


def _title(checkpoint: Checkpoint) -> str:
    side = _side(checkpoint)
    digest = f" ({store_tables.shorten_digest(side['digest'])})" if side["digest"] else ""
    return f"{side['what']}{digest} {side['created']}".rstrip()


def _print_processes(console: Console, found: Sequence[Process], record: Manifest | None) -> None:
    """Print the tree with each process's memory, open files, and sockets."""
    gpu, depths = _gpu_memory(record), _depths(found)
    rows = show.table("processes", "PID", "command", "state", "threads", "mapped", "memory", "GPU memory")
    for each in found:
        indent = "  " * min(depths[each.pid], _DEEPEST)
        memory = (
            (human(each.memory.mapped), human(each.memory.stored)) if each.memory is not None else ("", "")
        )
        command = show.make_plain(indent + (" ".join(each.command) or each.name)[:_LONGEST])
        used = human(gpu[each.pid]) if each.pid in gpu else ""
        rows.add_row(str(each.pid), command, each.state, str(len(each.threads) or ""), *memory, used)
    console.print(rows, "")
    rows = show.table("open files", "PID", "descriptor", "kind", "path")
    for each in found:
        for file in each.files:
            rows.add_row(str(each.pid), str(file.descriptor), file.kind, show.make_plain(file.path))
    if rows.row_count:
        console.print(rows, "")
    rows = show.table("sockets", "PID", "descriptor", "protocol", "local", "remote", "state")
    for each in found:
        for socket in each.sockets:
            ends = show.make_plain(socket.local), show.make_plain(socket.remote)
            rows.add_row(str(each.pid), str(socket.descriptor), socket.protocol, *ends, socket.state)
    if rows.row_count:
        console.print(rows, "")


def _list_documents(found: Sequence[Process], record: Manifest | None) -> list[dict[str, Any]]:
    """Return the same for JSON: a list in which each process comes after its parent."""
    gpu = _gpu_memory(record)
    return [{**document(each), "gpuMemory": gpu.get(each.pid, 0)} for each in found]


def _gpu_memory(record: Manifest | None) -> Mapping[int, int]:
    """Return bytes by PID, of the processes whose GPU state is in the checkpoint."""
    processes = record.processes if record is not None else ()
    return {each.pid: sum(used for _, used in each.gpus) for each in processes}


def _depths(found: Sequence[Process]) -> dict[int, int]:
    depths: dict[int, int] = {}
    for each in found:  # each comes behind its parent
        depths[each.pid] = depths.get(each.parent, -1) + 1
    return depths
