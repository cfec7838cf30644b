"""gpusnap checkpoint and restore."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from gpusnap.base.privileges import require_root
from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import NotFound
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.labels import parse_labels
from gpusnap.cli.completion import complete_checkpoint, complete_container
from gpusnap.cli.moved import figures, make_pushed_document
from gpusnap.cli.options.container_names import check_not_empty
from gpusnap.cli.options.podman_words import CHECKPOINT, RESTORE, refuse_options
from gpusnap.cli.options.quiet import quiet
from gpusnap.cli.options.registry import registry_options
from gpusnap.cli.options.several import run_each
from gpusnap.listing.ages import format_age
from gpusnap.metrics.record import record_operation
from gpusnap.oci.base.dataclass import replace
from gpusnap.oci.base.environment import TLS_VERIFY
from gpusnap.oci.store.tags import base, format_names
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError
from gpusnap.runtime_shim.base.units import human

# What a command does is imported when it is run: of a restore that waits for it, each 0.1 s is felt.
if TYPE_CHECKING:
    from gpusnap.operations.checkpointing import checkpoint as checkpointing

_as_json = click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")


@click.command()
@click.argument(
    "containers",
    nargs=-1,
    metavar="CONTAINER...",
    callback=check_not_empty,
    shell_complete=complete_container,
)
@click.option(
    "-a", "--all", "every", is_flag=True, help="Checkpoint all running containers of gpusnap-runtime."
)
@click.option("-l", "--latest", is_flag=True, help="Checkpoint the most recently created container.")
@click.option(
    "--to",
    metavar="PLACE",
    help="Destination: oci:DIR[:NAME], an archive such as ./w.tar.zst, or a REF in a registry. "
    "[default: this host's store]",
)
@click.option(
    "-e", "--export", "file", metavar="FILE", help="Same as --to FILE, for compatibility with Podman."
)
@click.option("--name", default="", help="Name of the checkpoint in the store. [default: CONTAINER:UTC time]")
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=VALUE",
    help="Add a label to the checkpoint, in the store and in registries; may be repeated.",
)
@click.option("-R", "--leave-running", is_flag=True, help="Leave the container running after the checkpoint.")
@click.option("--tcp-established", is_flag=True, help="Checkpoint open TCP connections.")
@click.option("--file-locks", is_flag=True, help="Checkpoint file locks.")
@click.option("--ignore-rootfs", is_flag=True, help="Do not include the container's changed files.")
@click.option("--ignore-volumes", is_flag=True, help="Do not include the files in its named volumes.")
@click.option(
    "--force",
    is_flag=True,
    help="Checkpoint even if it cannot be restored: processes share GPU memory (NCCL, CUDA IPC), or the "
    "container has an option that Podman does not restore.",
)
@registry_options
@quiet
@_as_json
@refuse_options(CHECKPOINT)
def checkpoint(
    containers: tuple[str, ...],
    every: bool,
    latest: bool,
    to: str | None,
    file: str | None,
    name: str,
    labels: tuple[str, ...],
    as_json: bool,
    **options: bool,
) -> None:
    """Checkpoint a running Podman container, including its GPU state.

    Without --to, the checkpoint goes into this host's store. With --to REF it goes into the store, as
    CONTAINER:TIME and as REF, and is then pushed. With --to FILE or --to oci:DIR it goes only there. A store
    does not write data again that it has from earlier checkpoints. If another checkpoint in the store has the
    same name, it loses the name and stays under its digest.

    Files in its named volumes are included, unless --ignore-volumes is given. A store does not write
    unchanged files again. With --leave-running, Podman reads the files of volumes, and those of the container
    that no process has open for writing, after it has continued: they may be newer than its memory.

    The container is stopped, unless --leave-running is given, and Podman keeps it as a stopped container. The
    last line of output has the command that continues it, such as `gpusnap restore CONTAINER`: the newest
    checkpoint of that name.

    A suspended container (`gpusnap suspend`) is checkpointed from RAM, without a GPU, and stays suspended.

    A container can specify a command that is run in it first, and one that undoes it:
    io.gpusnap.pre-checkpoint and io.gpusnap.post-restore, see docs/engines.md.

    If something fails after the container has stopped, `podman container restore CONTAINER` restores it. A
    container that Podman removes when it stops (--rm, Quadlet) stays frozen until its checkpoint is
    stored, and is then removed; if anything fails before that, it continues to run. With --tcp-established,
    its dump ends it: the message names the archive to restore from, and Ctrl-C waits until that is written.
    If writing it fails, the container is lost; gpusnap therefore checks for free space first.

    Several containers, or all with --all, are checkpointed one after another, independently: the failure of
    one does not stop the others. As JSON they are a list, results, with --all even for one; a failure has
    container, error, code and exitCode there. Ctrl-C undoes the current one, and starts no other.

    As JSON: container, containerId, name, digest, store, file, memory (bytes used of GPUs), size (bytes of
    all blobs), new (bytes of those that the store did not have), seconds, and, if it was pushed, pushed, as
    in `gpusnap push`.
    """
    from gpusnap.engines.podman import Inspection

    require_root("checkpoint")
    # Podman answers while the rest is imported.
    command = click.get_current_context()
    asked = command.with_resource(Inspection(containers[0])) if len(containers) == 1 else None

    from gpusnap.operations.checkpointing import checkpoint as checkpointing

    if file is not None and to is not None:
        raise UsageError("--export and --to are the same option; give only one")
    place = locator.InFile(file) if file is not None else locator.destination(to) if to is not None else None
    if labels and isinstance(place, locator.InFile):
        raise UsageError(
            "--label applies to a store or a registry; a Podman archive cannot store labels",
            hint="write it to the store, then run gpusnap copy NAME oci-archive:FILE",
        )
    if name and isinstance(place, locator.InFile):
        raise UsageError("--name applies to a store; an archive has no name other than its file name")
    if name and isinstance(place, locator.InStore) and place.wanted:
        raise UsageError("--name and the NAME in --to are the same; give only one")
    wanted = _list_wanted(containers, every=every, latest=latest)
    named = name or (isinstance(place, locator.InStore) and place.wanted)
    if len(wanted) > 1 and (named or isinstance(place, locator.InFile | locator.InRegistry)):
        raise UsageError(
            "several containers cannot share one name, file or reference",
            hint="omit --name, and give --to oci:DIR or no --to; gpusnap push uploads them to a registry",
        )

    request = checkpointing.CheckpointRequest(
        container="",
        to=place,
        name=locator.parse_name(name) if name else "",
        labels=parse_labels(labels),
        **options,
    )

    def work(container: str) -> checkpointing.CheckpointResult:
        with record_operation("checkpoint", container) as record, Progress() as progress:
            made = checkpointing.checkpoint(replace(request, container=container), progress, asked)
            record.container = made.container.name
            record.figures |= {"size": made.size, "new": made.new, "gpuMemory": made.gpu_memory}
            record.figures |= {"pause": made.pause} if made.pause is not None else {}
            record.figures |= (
                {"digest": made.digest, "name": made.name} if made.digest else {"file": made.file}
            )
        return made

    def show(made: checkpointing.CheckpointResult) -> None:
        what = f"{made.name}  {made.digest}" if made.name else made.file
        new = f" ({human(made.new)} of it new in {made.store})" if made.name else ""
        size = f"GPU memory {human(made.gpu_memory)}, checkpoint {human(made.size)}{new}"
        click.echo(f"{what}  {size}, {made.seconds:.1f} s")
        if made.pushed is not None:
            click.echo(f"pushed to {made.pushed.reference}: {figures(made.pushed.moved)}")
        click.echo(_describe_way_back(request, made), err=True)

    run_each(wanted, work, show=show, document=_make_document, as_json=as_json, key="container", listed=every)


def _list_wanted(containers: tuple[str, ...], *, every: bool, latest: bool) -> tuple[str, ...]:
    """Return the containers that are meant. Raises UsageError, NotFound, GpusnapError."""
    from gpusnap.engines import podman_objects

    if sum((bool(containers), every, latest)) != 1:
        raise UsageError(
            "name one or more containers, or give either --all or --latest",
            hint="podman ps lists the containers",
        )
    if latest:
        return (podman_objects.latest(),)
    if not every:
        return tuple(dict.fromkeys(containers))
    ours, others = podman_objects.list_running()
    if others:
        click.echo(
            f"gpusnap: note: skipped, because they do not use gpusnap-runtime: {', '.join(others)}", err=True
        )
    if not ours:
        raise NotFound(
            "no running container uses gpusnap-runtime", hint="podman ps lists the running containers"
        )
    return ours


@click.command()
@click.argument("what", nargs=-1, metavar="WHAT...", shell_complete=complete_checkpoint)
@click.option(
    "-i", "--import", "file", metavar="FILE", help="Same as WHAT, a file, for compatibility with Podman."
)
@click.option("-n", "--name", default="", help="Name of the restored container. [default: its old name]")
@click.option("--gpu-map", default="", metavar="MAP", help="Map old GPUs to new ones: 0=3,1=2, or UUIDs.")
@click.option("--tcp-established", is_flag=True, help="Restore TCP connections.")
@click.option("--tcp-close", is_flag=True, help="Restore TCP connections as closed.")
@click.option("--ignore-static-ip", is_flag=True, help="Allow a different IP address.")
@click.option("--ignore-static-mac", is_flag=True, help="Allow a different MAC address.")
@click.option("--file-locks", is_flag=True, help="Restore file locks.")
@click.option("--pod", default="", help="Restore into this pod. [default: its old pod]")
@click.option(
    "-p",
    "--publish",
    multiple=True,
    metavar="PORTS",
    help="Publish these ports instead, as in podman run: 8081:80. May be repeated.",
)
@click.option("--ignore-rootfs", is_flag=True, help="Do not restore changed files; use the image's files.")
@click.option(
    "--ignore-volumes",
    is_flag=True,
    help="Do not restore the files in volumes: use existing volumes as they are, or new, empty ones.",
)
@click.option(
    "--not-migrated",
    is_flag=True,
    help="Confirm that the container does not run on the host that it was being migrated to.",
)
@registry_options
@quiet
@_as_json
@refuse_options(RESTORE)
def restore(
    what: tuple[str, ...],
    file: str | None,
    name: str,
    gpu_map: str,
    tcp_established: bool,
    publish: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Restore the container of the checkpoint WHAT, or of several.

    WHAT is a name or a digest in this host's store, oci:DIR[:NAME], an archive of Podman or an oci-archive of
    skopeo, or a REF in a registry.

    A checkpoint in a local image (`podman container checkpoint --create-image`) is restored by `podman
    container restore IMAGE` instead.

    From a registry, the memory is fetched while the container is being restored, or before it if there are 8
    GiB or more or the network is slow. It is kept in this host's store. If the registry does not respond, and
    the store has a checkpoint of the same name, that one is restored, with a note.

    A name without a tag, such as server, is the newest checkpoint of that name, as is server:latest. If a
    checkpoint has exactly that name, which `gpusnap tag` and `gpusnap copy` can give, it is that one, and
    newer ones are listed.

    A named volume that still exists in Podman is used as it is, with a note: no file in it is overwritten.
    The restored processes are not aware of changes since the checkpoint. Other volumes are created, with
    their files from the checkpoint, or empty if --ignore-volumes is given.

    A second copy next to the first one needs another name (--name) and other published ports (--publish), and
    gets another address. A container that was in a pod is restored into the same pod, or into another one
    that shares the same namespaces (--pod).

    If Podman still has the container that this checkpoint stopped, that container continues, with its volumes
    and logs; if the restore fails, it is as before. Files in it that were changed or removed since then
    (`podman cp`) are restored; files that were added stay. If another container has that name, remove it
    first (`podman rm`), or give another name with --name.

    The last checkpoint of a container whose `gpusnap migrate` was interrupted is not restored, because the
    container may run on the other host: `gpusnap recover` asks that host. If it cannot be reached, check
    there, and give --not-migrated if the container does not run. If gpusnap was killed before that, NAME does
    not mean the checkpoint that was sent ahead, NAME:migrating, until `gpusnap recover` has been run.

    Several checkpoints are restored one after another, independently: the failure of one does not stop the
    others. As JSON they are a list, results; a failure has what, error, code and exitCode there.

    As JSON: container, containerId, digest (empty for an archive), name (of the checkpoint, if it was in a
    store), kept (the name in the store of a checkpoint from a registry, empty if it was not kept) and
    seconds.
    """
    require_root("restore")
    if name and tcp_established:  # as podman container restore has it
        raise UsageError(
            "--name gives the container another address, but --tcp-established needs the old one",
            hint="give only one of the two",
        )
    if bool(what) == (file is not None):
        raise UsageError("name what to restore: one or more checkpoints, or --import FILE")
    from gpusnap.operations.restoring.ahead import start_ahead

    asked = click.get_current_context().with_resource(start_ahead(loads=file is None))
    from gpusnap.operations.restoring import restore as restoring
    from gpusnap.operations.restoring.podman_restore import RestoreRequest

    if gpu_map:
        from gpusnap.runtime_shim.snapshot.devices.choose import gpu_request

        gpu_request(gpu_map)  # gpusnap-runtime gets it in a variable, and would name that
    if len(what) > 1 and (name or publish):
        raise UsageError(
            "--name and --publish apply to a single container", hint="restore the containers one by one"
        )

    def work(one: str) -> restoring.RestoreResult:
        request = RestoreRequest(
            what=locator.in_file(one) if file is not None else locator.find(one),
            name=name,
            gpu_map=gpu_map,
            tcp_established=tcp_established,
            publish=publish,
            **options,
        )
        find_name = partial(restoring.find_container_name, request.what)
        with record_operation("restore", name, find_name=find_name) as record, Progress() as progress:
            done = restoring.restore(request, progress, asked=asked)
            record.container = done.name
            record.figures |= {"digest": done.digest} if done.digest else {}
        return done

    def show(done: restoring.RestoreResult) -> None:
        click.echo(f"{done.name}  {done.container}  {done.seconds:.1f} s")
        if done.source is None:
            return
        source = done.source.entry
        age = f", made {format_age(source.created)}" if source.created else ""
        store = done.source.place.store.path
        known = source.name or done.digest
        where = known if store == locator.default_store().path else f"oci:{store}:{known}"
        click.echo(f"restored from {where}{age}", err=True)
        if done.source.later:
            click.echo(f"note: newer than {source.name}: {format_names(done.source.later)}", err=True)

    def document(done: restoring.RestoreResult) -> dict[str, object]:
        return {
            "container": done.name,
            "containerId": done.container,
            "digest": done.digest,
            "name": done.source.entry.name if done.source is not None else "",
            "newer": list(done.source.later) if done.source is not None else [],
            "kept": done.kept,
            "seconds": round(done.seconds, 3),
        }

    run_each(
        (file,) if file is not None else tuple(dict.fromkeys(what)),
        work,
        show=show,
        document=document,
        as_json=as_json,
        key="what",
    )


def _describe_way_back(request: checkpointing.CheckpointRequest, made: checkpointing.CheckpointResult) -> str:
    """Say what has become of the container, and the command that restores it."""
    name, auto_remove = made.container.name, made.container.auto_remove
    if made.file:
        word = shlex.quote(made.file)
    elif isinstance(request.to, locator.InRegistry) and not request.name:
        plain_http = request.to.plain_http or request.plain_http
        word = ("http://" if plain_http else "") + str(request.to.reference)
        word += " --tls-verify=false" * (os.environ.get(TLS_VERIFY) == "false")
    elif isinstance(request.to, locator.InStore):
        word = shlex.quote(f"oci:{made.store}:{made.name}")
    else:
        word = made.name if request.name or request.leave_running or made.is_suspended else _short_name(made)
    restore = f"gpusnap restore {word}"
    if made.is_suspended or (request.leave_running and made.container.status == "running"):
        state = "stays suspended" if made.is_suspended else "continues to run"
        from gpusnap.engines import systemd_unit

        remove = systemd_unit.make_removal(made.container, "--time", "0")
        return f"{name} {state}; to go back to this checkpoint: {remove} && {restore}"
    removed = " and was removed (--rm)" if auto_remove else ""
    return f"{name} has stopped{removed}; to continue it: {restore}"


def _short_name(made: checkpointing.CheckpointResult) -> str:
    """Return its name without the tag, if that means this checkpoint."""
    short = base(made.name)
    with suppress(GpusnapError):
        place = locator.find(short)
        if isinstance(place, locator.InStore) and place.entry().descriptor.digest == made.digest:
            return short
    return made.name


def _make_document(made: checkpointing.CheckpointResult) -> dict[str, object]:
    document: dict[str, object] = {
        "container": made.container.name,
        "containerId": made.container.id,
        "name": made.name,
        "digest": made.digest,
        "store": made.store,
        "file": made.file,
        "memory": made.gpu_memory,
        "size": made.size,
        "new": made.new,
        "seconds": round(made.seconds, 3),
    }
    return document | ({"pushed": make_pushed_document(made.pushed)} if made.pushed is not None else {})
