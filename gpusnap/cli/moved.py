"""The messages of commands that move checkpoints: copy, push, pull."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpusnap.cli.json_output import document
from gpusnap.runtime_shim.base.units import human

if TYPE_CHECKING:
    from gpusnap.checkpoints.formats.containerd_images import ImportedImage
    from gpusnap.oci.registry.copy import TransferTotals
    from gpusnap.operations.push_pull import PushResult


def figures(moved: TransferTotals, verb: str = "transferred") -> str:
    """For people."""
    there = f"; {human(moved.skipped_bytes)} in {blobs(moved.skipped_blobs)} were already there"
    return f"{verb} {human(moved.bytes)} in {blobs(moved.blobs)}" + (there if moved.skipped_blobs else "")


def format_written(moved: TransferTotals) -> str:
    """Return the same for a new file: all of it was written, wherever it came from."""
    size = human(moved.bytes + moved.skipped_bytes)
    return f"written: {size} in {blobs(moved.blobs + moved.skipped_blobs)}"


def blobs(count: int) -> str:
    """Return a number of blobs as text."""
    return "1 blob" if count == 1 else f"{count} blobs"


def print_image_notes(image: ImportedImage | None, file: str) -> None:
    """Print what a checkpoint still needs in containerd, or what `ctr images import` of a file will set."""
    if image is None:
        return
    if file:
        names = [image.name, *([image.base] if image.base_there else [])]
        click.echo(
            f"note: ctr images import of {file} creates the image{'s' * (len(names) > 1)} "
            f"{' and '.join(names)}, and replaces any existing image of that name",
            err=True,
        )
    elif not image.base_there:
        click.echo(
            f"note: to restore it, containerd needs the image {image.base}, which is not included", err=True
        )


def make_pushed_document(done: PushResult) -> dict[str, object]:
    """Return what a push has done, for JSON."""
    return {"reference": done.reference, "digest": done.digest} | document(done.moved)
