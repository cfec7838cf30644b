"""The commands that copy checkpoints: push, pull, and copy, from any place to any other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpusnap.base.progress import Progress
from gpusnap.checkpoints import locator
from gpusnap.cli.completion import complete_checkpoint, complete_store
from gpusnap.cli.json_output import document, print_json
from gpusnap.cli.moved import figures, format_written, make_pushed_document, print_image_notes
from gpusnap.cli.options.quiet import quiet
from gpusnap.cli.options.registry import registry_options
from gpusnap.runtime_shim.base.errors import UsageError

if TYPE_CHECKING:
    from gpusnap.checkpoints.formats.containerd_images import ImportedImage
    from gpusnap.oci.layout.single_layer_image import Packing
    from gpusnap.operations import copy as copying
    from gpusnap.operations import push_pull

_as_json = click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")


@click.command()
@click.argument("what", shell_complete=complete_checkpoint)
@click.argument("ref")
@click.option(
    "--format",
    "form",
    type=click.Choice(["oci", "cri", "podman"]),
    default="oci",
    show_default=True,
    help="oci: an artifact in chunks. podman, cri: an image for `podman container restore` or CRI-O.",
)
@click.option(
    "--compression",
    "packing",
    type=click.Choice(["gzip", "zstd"]),
    help="Compression for --format podman or cri: zstd is faster, but older tools cannot read it. "
    "[default: gzip]",
)
@registry_options
@quiet
@_as_json
def push(
    what: str, ref: str, form: push_pull.Format, packing: Packing | None, plain_http: bool, as_json: bool
) -> None:
    """Push the checkpoint WHAT to a registry as REF.

    WHAT is a name or a digest in this host's store, oci:DIR[:NAME], an archive of Podman, of skopeo
    (oci-archive) or of ctr images export, or containerd:[NAMESPACE/]IMAGE, a checkpoint made by ctr container
    checkpoint --task. If the first part of IMAGE has no dot or colon, it is taken for the namespace;
    containerd:default/team/w:v1 is unambiguous. containerd's socket is taken from CONTAINERD_ADDRESS, as ctr
    does. Chunks that the registry already has are not sent again. Referrers of the checkpoint in its layout,
    such as a signature, are pushed with it. The default tag of REF is latest. CAs and client certificates of
    a registry are taken from /etc/containers/certs.d or /etc/docker/certs.d, a proxy from HTTPS_PROXY and
    NO_PROXY.

    As JSON: reference, digest, blobs and bytes that were sent, skippedBlobs and skippedBytes that already
    existed, and mounted, how many of the latter the registry mounted from another repository.
    """
    from gpusnap.operations import push_pull

    if packing is not None and form == "oci":
        raise UsageError(
            "--compression applies to an image; the chunks of an artifact have their own",
            hint="also give --format podman or cri, or see memory.level in the settings",
        )
    found = locator.in_containerd(what) or locator.find(what, remote=False)
    assert not isinstance(found, locator.InRegistry)
    with Progress() as progress:
        done = push_pull.push(
            found,
            _parse_reference(ref),
            plain_http=plain_http,
            format=form,
            packing=packing or "gzip",
            progress=progress,
        )
    if as_json:
        print_json(make_pushed_document(done))
        return
    click.echo(f"{done.reference}  {done.digest}  {figures(done.moved)}")


@click.command()
@click.argument("ref")
@click.option(
    "-o",
    "--output",
    "file",
    default="",
    metavar="FILE",
    help="Write an archive: .tar or .tar.zst for Podman, .tar for ctr if it is a containerd checkpoint.",
)
@click.option(
    "--to",
    metavar="PLACE",
    shell_complete=complete_store,
    help="Pull into the store oci:DIR[:NAME], or into containerd, as containerd:[NAMESPACE/]IMAGE. "
    "[default: this host's store, unless -o is given]",
)
@registry_options
@quiet
@_as_json
def pull(ref: str, file: str, to: str | None, plain_http: bool, as_json: bool) -> None:
    """Pull the checkpoint REF from a registry into a store, an archive, or containerd.

    In the store its name is REF, and chunks that the store already has are not fetched again. Its referrers
    in the registry, such as a signature or an SBOM, are pulled as well. Run an interrupted pull again to
    continue it. An existing FILE is not overwritten. CAs and client certificates of a registry are taken from
    /etc/containers/certs.d or /etc/docker/certs.d, a proxy from HTTPS_PROXY and NO_PROXY.

    A containerd checkpoint can be pulled into containerd, and is restored by ctr container restore --live
    NAME IMAGE. The base image is pulled as well if the checkpoint contains it (--image). If containerd has
    another image of that name, or an image IMAGE that is not a checkpoint, nothing is changed. Import an
    archive of such a checkpoint with ctr images import --no-unpack, which replaces images that have the names
    in it: REF, and that of the base image, which the maker of the checkpoint has chosen. Prepare a base image
    in it with ctr snapshots unpack DIGEST. Do so only with checkpoints that you trust: with ctr, the
    checkpoint determines the privileges of the container.

    As JSON: reference, digest, store, name, file, image (its name in containerd, or in the file for ctr),
    baseImage (which a restore needs there), and blobs to mounted as in `gpusnap push`.
    """
    from gpusnap.operations import push_pull

    place: locator.InStore | locator.InContainerd | None = None
    if to is not None:
        found = locator.in_containerd(to) or (locator.destination(to) if to.startswith("oci:") else None)
        if not isinstance(found, locator.InStore | locator.InContainerd):
            raise UsageError(
                f"--to {to} is not a store",
                hint="write it as oci:DIR, oci:DIR:NAME or containerd:IMAGE, or use -o",
                code="GPS-102",
            )
        place = found
    with Progress() as progress:
        done = push_pull.pull(
            _parse_reference(ref), file=file, to=place, plain_http=plain_http, progress=progress
        )
    if as_json:
        described = {"reference": done.reference, "digest": done.digest}
        described |= {"store": done.store, "name": done.name, "file": done.file}
        print_json(described | _describe_image(done.image or done.packed) | document(done.moved))
        return
    shown = done.image.name if done.image is not None else done.file or _in_store(done)
    click.echo(f"{shown}  {done.digest}  {figures(done.moved)}")
    print_image_notes(done.image, "")
    print_image_notes(done.packed, done.file)


@click.command()
@click.argument("a", metavar="A", shell_complete=complete_checkpoint)
@click.argument("b", metavar="B", shell_complete=complete_checkpoint)
@registry_options
@_as_json
def copy(a: str, b: str, plain_http: bool, as_json: bool) -> None:
    """Copy the checkpoint A to B: between stores, files and registries, in any direction.

    A and B are each one of:

    \b
    NAME                  in this host's store
    oci:DIR[:NAME]        in the store, or another tool's layout, in DIR
    oci-archive:FILE      an image layout in a file, as skopeo writes it
    ./FILE.tar[.zst]      an archive of Podman
    HOST/REPOSITORY:TAG   in a registry
    containerd:IMAGE      of containerd's own checkpoints

    A store, a registry and an oci-archive keep the digest of the checkpoint, and therefore its referrers,
    such as a signature. An archive of Podman does not: it is for `podman container restore --import`. To move
    a checkpoint to a host without a network, copy it to oci-archive:FILE, and on that host copy FILE to a
    NAME.

    Blobs that B already has are not copied again. An interrupted copy leaves nothing incomplete under B's
    name; run it again to continue (a file starts from the beginning). An existing FILE is not overwritten.
    Without NAME, the copy has the name that A has, or CONTAINER:UTC time. If another checkpoint in a store
    has the same name, it loses the name and stays under its digest.

    As JSON: digest, reference, store, name, file, image, baseImage (which a restore in containerd needs), and
    blobs and bytes that were copied, skippedBlobs and skippedBytes that already existed, and mounted, as in
    `gpusnap push`.
    """
    from gpusnap.operations import copy as copying

    source = locator.in_containerd(a) or locator.find(a)
    to = locator.copy_destination(b)
    with Progress() as progress:
        done = copying.copy(source, to, plain_http=plain_http, progress=progress)
    if as_json:
        described = {"digest": done.digest, "reference": done.reference}
        described |= {"store": done.store, "name": done.name, "file": done.file}
        print_json(described | _describe_image(done.image) | document(done.moved))
        return
    image = done.image.name if done.image is not None else ""
    moved = format_written(done.moved) if done.file else figures(done.moved, "copied")
    where = done.reference or done.file or image or _in_store(done)
    click.echo(f"{where}  {done.digest}  {moved}")
    print_image_notes(done.image, done.file)


def _parse_reference(word: str) -> locator.InRegistry:
    try:
        return locator.parse_registry(word)
    except UsageError as error:
        error.add_hint("for a store or a file, use gpusnap copy")
        raise


def _in_store(done: copying.CopyResult | push_pull.PullResult) -> str:
    """Return how a command line names a checkpoint in a store."""
    if done.store == locator.default_store().path:
        return done.name or done.digest
    return f"oci:{done.store}:{done.name or done.digest}"


def _describe_image(image: ImportedImage | None) -> dict[str, str]:
    return (
        {"image": image.name, "baseImage": image.base}
        if image is not None
        else {"image": "", "baseImage": ""}
    )
