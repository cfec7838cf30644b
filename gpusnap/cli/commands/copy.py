"""`gpusnap copy`: a checkpoint from any place to any other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from gpusnap.checkpoints import locator
from gpusnap.cli.completion import complete_checkpoint
from gpusnap.cli.moved import document as moved_document
from gpusnap.cli.moved import figures, format_written, print_image_notes
from gpusnap.cli.options.registry import registry_options
from gpusnap.progress import Progress

if TYPE_CHECKING:
    from gpusnap.operations import copy as copying


@click.command()
@click.argument("a", metavar="A", shell_complete=complete_checkpoint)
@click.argument("b", metavar="B", shell_complete=complete_checkpoint)
@registry_options
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
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
        document = {
            "digest": done.digest,
            "reference": done.reference,
            "store": done.store,
            "name": done.name,
            "file": done.file,
            "image": done.image.name if done.image is not None else "",
            "baseImage": done.image.base if done.image is not None else "",
        }
        click.echo(json.dumps(document | moved_document(done.moved), indent=1))
        return
    image = done.image.name if done.image is not None else ""
    moved = format_written(done.moved) if done.file else figures(done.moved, "copied")
    where = done.reference or done.file or image or _in_store(done)
    click.echo(f"{where}  {done.digest}  {moved}")
    print_image_notes(done.image, done.file)


def _in_store(done: copying.CopyResult) -> str:
    """As a command line names it."""
    if done.store == locator.default_store().path:
        return done.name or done.digest
    return f"oci:{done.store}:{done.name or done.digest}"
