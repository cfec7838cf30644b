"""The commands that make checkpoints and containers, and that bring checkpoints from place to place."""

from __future__ import annotations

import json
from collections.abc import Mapping

import click

from gpusnap import checkpointing, moving, restoring, where
from gpusnap.completing import complete_checkpoint, complete_container, complete_store
from gpusnap.progress import Progress
from oci.image import Packing
from oci.transfer import Moved
from runtime_shim.errors import UsageError
from runtime_shim.units import human

__all__ = ["checkpoint", "pull", "push", "restore"]

_as_json = click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
_plain_http = click.option(
    "--plain-http", is_flag=True, help="Speak to the registry without TLS, as http:// before REF does."
)


@click.command()
@click.argument("container", shell_complete=complete_container)
@click.option(
    "--to",
    metavar="PLACE",
    help="Where to: oci:DIR[:NAME], an archive such as ./w.tar.zst, or a REF in a registry. "
    "[default: this host's store]",
)
@click.option("--name", default="", help="Its name in the store. [default: CONTAINER:UTC time]")
@click.option("--leave-running", is_flag=True, help="Let the container run on.")
@click.option("--tcp-established", is_flag=True, help="Take open TCP connections along.")
@click.option("--file-locks", is_flag=True, help="Take file locks along.")
@click.option("--ignore-rootfs", is_flag=True, help="Leave files that changed out of it.")
@click.option(
    "--force",
    is_flag=True,
    help="Also where processes share GPU memory in a way that does not come back (NCCL, CUDA IPC).",
)
@_plain_http
@_as_json
def checkpoint(
    container: str,
    to: str | None,
    name: str,
    leave_running: bool,
    tcp_established: bool,
    file_locks: bool,
    ignore_rootfs: bool,
    force: bool,
    plain_http: bool,
    as_json: bool,
) -> None:
    """Checkpoint the running CONTAINER of Podman's, GPUs and all.

    Its memory goes straight into a store, and what is there from earlier checkpoints is not written again. A
    checkpoint for a registry is kept in this host's store, too. Podman ends the container, unless
    --leave-running is given. Where another checkpoint had the name, that one stays, by its digest.

    Whatever fails then, `podman container restore` has the container again. One that Podman removes at its
    end (--rm, Quadlet) it has from what it exported, which is kept where the message says. If that export
    itself fails, such a container is gone: therefore room for all of it is asked for first, and Ctrl-C waits
    for its end.

    As JSON: container, containerId, name, digest, store, file, memory (bytes used of GPUs), size (bytes of
    all blobs), new (bytes of those that the store did not have), seconds, and pushed where it was, as
    `gpusnap push` has it.
    """
    wish = checkpointing.Wish(
        container=container,
        to=where.destination(to) if to is not None else None,
        name=where.named(name) if name else "",
        leave_running=leave_running,
        tcp_established=tcp_established,
        file_locks=file_locks,
        ignore_rootfs=ignore_rootfs,
        force=force,
        plain_http=plain_http,
    )
    if name and isinstance(wish.to, where.InFile):
        raise UsageError("--name is for a store, and an archive has no name but its file's")
    if name and isinstance(wish.to, where.InStore) and wish.to.wanted:
        raise UsageError("--name and the NAME in --to are the same thing; give one")
    with Progress() as progress:
        made = checkpointing.checkpoint(wish, progress)
    if as_json:
        _print(_made(made))
        return
    what = f"{made.name}  {made.digest}" if made.name else made.file
    size = f"{human(made.new)} new of {human(made.size)}" if made.name else human(made.size)
    click.echo(f"{what}  GPU memory {human(made.gpu_memory)}, {size}, {made.seconds:.1f} s")
    if made.pushed is not None:
        click.echo(f"{made.pushed.reference}  {_figures(made.pushed.moved)}")


@click.command()
@click.argument("what", shell_complete=complete_checkpoint)
@click.option("--name", default="", help="The container's new name. [default: the one it had]")
@click.option(
    "--gpu-map", default="", metavar="MAP", help="Which GPU takes which one's place: 0=3,1=2; UUIDs too."
)
@click.option("--tcp-established", is_flag=True, help="Bring TCP connections back.")
@click.option("--tcp-close", is_flag=True, help="Bring TCP connections back closed.")
@click.option("--ignore-static-ip", is_flag=True, help="Let it have another IP address.")
@click.option("--ignore-rootfs", is_flag=True, help="Leave the files that had changed as the image has them.")
@_plain_http
@_as_json
def restore(
    what: str,
    name: str,
    gpu_map: str,
    tcp_established: bool,
    tcp_close: bool,
    ignore_static_ip: bool,
    ignore_rootfs: bool,
    plain_http: bool,
    as_json: bool,
) -> None:
    """Have the container of the checkpoint WHAT run again.

    WHAT is a name or a digest in this host's store, oci:DIR[:NAME], an archive of Podman's or an
    oci-archive of skopeo's, or a REF in a registry, whose memory is fetched while the container is being
    restored, from 8 GiB on or over a slow network before that, and kept in this host's store. Where the
    registry does not answer, what that store has under the same name is taken, and a note says so. A
    container that still has its name, such as the one that the checkpoint ended, has to be removed first
    (podman rm), or --name gives another.

    As JSON: container, containerId, digest (empty for an archive), kept (the name in the store of what came
    from a registry, empty where that did not keep it) and seconds.
    """
    wish = restoring.Wish(
        what=where.find(what),
        name=name,
        gpu_map=gpu_map,
        tcp_established=tcp_established,
        tcp_close=tcp_close,
        ignore_static_ip=ignore_static_ip,
        ignore_rootfs=ignore_rootfs,
        plain_http=plain_http,
    )
    with Progress() as progress:
        done = restoring.restore(wish, progress)
    if as_json:
        _print(
            {
                "container": done.container.name,
                "containerId": done.container.id,
                "digest": done.digest,
                "kept": done.kept,
                "seconds": round(done.seconds, 3),
            }
        )
        return
    click.echo(f"{done.container.name}  {done.container.id}  {done.seconds:.1f} s")


@click.command()
@click.argument("what", shell_complete=complete_checkpoint)
@click.argument("ref")
@click.option(
    "--format",
    "form",
    type=click.Choice(["oci", "cri", "podman"]),
    default="oci",
    show_default=True,
    help="oci: an artifact in chunks. podman, cri: an image that `podman container restore` takes, or CRI-O.",
)
@click.option(
    "--compression",
    "packing",
    type=click.Choice(["gzip", "zstd"]),
    help="Of the image of --format podman or cri: zstd is faster, and older tools do not take it. "
    "[default: gzip]",
)
@_plain_http
@_as_json
def push(
    what: str, ref: str, form: moving.Format, packing: Packing | None, plain_http: bool, as_json: bool
) -> None:
    """Bring the checkpoint WHAT into a registry as REF.

    WHAT is a name or a digest in this host's store, oci:DIR[:NAME], an archive of Podman's, of skopeo's
    (oci-archive) or of ctr images export, or containerd:[NAMESPACE/]IMAGE, a checkpoint that ctr
    container checkpoint --task has made; with the namespace, such as containerd:default/team/w:v1, it is
    always clear what is meant, as the first part of a name without a dot or a colon is taken for one.
    containerd's socket is taken from CONTAINERD_ADDRESS, as ctr does. Chunks that the registry has are
    not sent again, and what refers to the checkpoint in its layout, such as a signature, goes along. REF
    without a tag has the tag latest. CAs and client certificates of a registry are taken from
    /etc/containers/certs.d or /etc/docker/certs.d, a proxy from HTTPS_PROXY and NO_PROXY.

    As JSON: reference, digest, blobs and bytes that were sent, skippedBlobs and skippedBytes that were there,
    and mounted, the blobs of those that the registry took from another of its repositories.
    """
    if packing is not None and form == "oci":
        raise UsageError(
            "--compression is for an image, and chunks of an artifact have their own",
            hint="give --format podman or cri as well, or see memory.level in the settings",
        )
    found = where.in_containerd(what) or where.find(what, remote=False)
    assert not isinstance(found, where.InRegistry)
    with Progress() as progress:
        done = moving.push(
            found,
            where.registry(ref),
            plain_http=plain_http,
            format=form,
            packing=packing or "gzip",
            progress=progress,
        )
    if as_json:
        _print(_pushed(done))
        return
    click.echo(f"{done.reference}  {done.digest}  {_figures(done.moved)}")


@click.command()
@click.argument("ref")
@click.option(
    "-o",
    "--output",
    "file",
    default="",
    metavar="FILE",
    help="Write an archive for Podman, .tar or .tar.zst; of a checkpoint of containerd's a .tar for ctr.",
)
@click.option(
    "--to",
    metavar="PLACE",
    shell_complete=complete_store,
    help="Into the store oci:DIR[:NAME], or into containerd, as containerd:[NAMESPACE/]IMAGE. "
    "[default: this host's store, unless -o is given]",
)
@_plain_http
@_as_json
def pull(ref: str, file: str, to: str | None, plain_http: bool, as_json: bool) -> None:
    """Bring the checkpoint REF out of a registry, into a store, an archive, or containerd.

    In the store its name is REF, and chunks that the store has do not come again. What refers to it in
    the registry, such as a signature or an SBOM, comes along. One that was interrupted goes on from where
    it was when it is run again. A FILE that is there is not replaced. CAs and client certificates of a
    registry are taken from /etc/containers/certs.d or /etc/docker/certs.d, a proxy from HTTPS_PROXY and
    NO_PROXY.

    containerd gets what its ctr has checkpointed, to be restored by ctr container restore --live NAME IMAGE,
    and the base image as well where the checkpoint has it (--image), unless it has another one of that name,
    or an image called IMAGE that is no checkpoint: then nothing is changed. The archive of one is taken by
    ctr images import --no-unpack, which replaces images that have the names in it: REF, and that of the base
    image, which the maker of the checkpoint has chosen. A base image in it is made ready by ctr snapshots
    unpack DIGEST. Do so only with checkpoints that you trust: ctr lets them say what a container may do.

    As JSON: reference, digest, store, name, file, image (its name in containerd, or in the file for ctr),
    baseImage (which a restore needs there), and blobs to mounted as `gpusnap push` has them.
    """
    place: where.Place | where.InContainerd | None = None
    if to is not None:
        place = where.in_containerd(to) or where.destination(to)
    if place is not None and not isinstance(place, where.InStore | where.InContainerd):
        raise UsageError(
            f"--to {to} is no store",
            hint="write it as oci:DIR, oci:DIR:NAME or containerd:IMAGE, or use -o",
        )
    with Progress() as progress:
        done = moving.pull(where.registry(ref), file=file, to=place, plain_http=plain_http, progress=progress)
    if as_json:
        document = {"reference": done.reference, "digest": done.digest}
        document |= {"store": done.store, "name": done.name, "file": done.file}
        image = done.image or done.packed
        document |= {
            "image": image.name if image is not None else "",
            "baseImage": image.base if image is not None else "",
        }
        _print(document | _moved(done.moved))
        return
    shown = done.image.name if done.image is not None else done.name or done.file
    click.echo(f"{shown}  {done.digest}  {_figures(done.moved)}")
    if done.image is not None and not done.image.base_there:
        click.echo(
            f"note: to restore it, containerd needs the image {done.image.base}, which is not in it", err=True
        )
    if done.packed is not None:
        names = [done.packed.name, *([done.packed.base] if done.packed.base_there else [])]
        click.echo(
            f"note: ctr images import of {done.file} sets the image{'s' * (len(names) > 1)} "
            f"{' and '.join(names)}, in the place of any that is called so",
            err=True,
        )


def _print(document: Mapping[str, object]) -> None:
    click.echo(json.dumps(document, indent=1))


def _made(made: checkpointing.Made) -> dict[str, object]:
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
    return document | ({"pushed": _pushed(made.pushed)} if made.pushed is not None else {})


def _pushed(done: moving.Pushed) -> dict[str, object]:
    return {"reference": done.reference, "digest": done.digest} | _moved(done.moved)


def _moved(moved: Moved) -> dict[str, object]:
    return {
        "blobs": moved.blobs,
        "bytes": moved.bytes,
        "skippedBlobs": moved.skipped_blobs,
        "skippedBytes": moved.skipped_bytes,
        "mounted": moved.mounted,
    }


def _figures(moved: Moved) -> str:
    there = f", {human(moved.skipped_bytes)} in {moved.skipped_blobs} were there"
    return f"{human(moved.bytes)} in {moved.blobs} blobs" + (there if moved.skipped_blobs else "")
