"""`gpusnap report`: writes one file for a bug report."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import click

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import NotFound, convert_errors
from gpusnap.checkpoints.list import listing
from gpusnap.checkpoints.locator import InStore, check_new_file, default_store, in_store, open_store
from gpusnap.cli.completion import complete_stored
from gpusnap.engines import podman
from gpusnap.oci.base.files import create_unnamed_file, open_nested_folder, write_all
from gpusnap.report.report import newest
from gpusnap.report.report import report as written
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError, reason


@click.command()
@click.argument("what", required=False, metavar="[WHAT]", shell_complete=complete_stored)
@click.option("--last", is_flag=True, help="Report on the newest checkpoint in this host's store.")
@click.option(
    "-o",
    "--output",
    "file",
    metavar="FILE",
    help="The file, or - for stdout. [default: gpusnap-report-TIME.txt]",
)
def report(what: str | None, last: bool, file: str | None) -> None:
    """Write the information for a bug report to a text file.

    It contains the versions, the settings, the checks of `gpusnap doctor`, the state of this host's store and
    gpusnap's lines in the journal; for the checkpoint WHAT in a store, its host, GPUs, processes and
    timeline; and for its container, or for the container WHAT if it has no checkpoint yet, the ends of CRIU's
    logs and the output of `gpusnap doctor CONTAINER`, if Podman still has the container. It contains no
    memory, and no arguments or output of programs. If there is neither such a checkpoint nor such a
    container, the file says so.

    Secrets are masked: passwords and tokens by their names and forms, credentials in URLs, and the contents
    of the auth files of registries and of variables such as HF_TOKEN. Review the file anyway before you share
    it.
    """
    if last and what is not None:
        raise UsageError("--last and WHAT cannot be combined", hint="give only one of them")
    place, without = _place(what, last=last)
    is_name = what is not None and not what.startswith(("oci:", "sha256:"))
    container = what.partition(":")[0] if without and what and is_name else ""
    with convert_errors(), Progress() as progress:
        progress.stage("inspecting the host")
        unknown = _explain_unknown(container) if container else ""
        text = written(place, container=container, without=without)
    if file == "-":
        click.echo(text, nl=False)
        _warn(without, unknown)
        return
    path = file or f"gpusnap-report-{datetime.now(UTC):%Y%m%d-%H%M%S}.txt"
    check_new_file(path, hint="name a file in it with -o")
    try:
        _write(path, text)
    except OSError as error:
        raise GpusnapError(
            f"{path} cannot be written: {reason(error)}", hint="name another file with -o", code="GPS-103"
        ) from error
    click.echo(path)
    _warn(without, unknown)
    click.echo("review it before you share it", err=True)


def _write(path: str, text: str) -> None:
    """Make the file, with mode 0600; all of it or nothing. Raises OSError."""
    folder, name = os.path.split(os.path.abspath(path))
    with (
        open_nested_folder(os.path.realpath(folder)) as within,
        create_unnamed_file(within) as (file, named),
    ):
        write_all(file, text.encode())
        os.fsync(file)
        named(name)


def _warn(without: str, unknown: str) -> None:
    if without:
        click.echo(f"without a checkpoint: {without}", err=True)
    if unknown:
        click.echo(f"without the container: {unknown}", err=True)


def _explain_unknown(container: str) -> str:
    """Return why Podman does not describe a container; empty if it does."""
    try:
        podman.inspect_container(container)
    except GpusnapError as error:
        return error.sentence()
    return ""


def _place(what: str | None, *, last: bool) -> tuple[InStore | None, str]:
    """Return the checkpoint; or None and, if one was wanted, why it is not there: the report has that."""
    try:
        place = _find_last() if last else in_store(what) if what is not None else None
        if place is not None:
            with convert_errors():
                place.entry()
    except UsageError:
        raise
    except GpusnapError as error:
        return None, error.sentence()
    return place, ""


def _find_last() -> InStore:
    store = open_store(default_store())
    with convert_errors():
        found = newest(listing(store).rows)
    if found is None:
        raise NotFound(f"{store.path} contains no checkpoint", hint="gpusnap ls lists them", code="GPS-701")
    return InStore(store, found.digest)
