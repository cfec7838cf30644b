"""The commands about this host: plan, gpus, settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

import click

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import NotFound
from gpusnap.cli import tables as show
from gpusnap.cli.completion import complete_checkpoint
from gpusnap.cli.json_output import print_json
from gpusnap.cli.options.registry import registry_options
from gpusnap.oci.base.dataclass import asdict
from gpusnap.operations.driver import needed_driver
from gpusnap.operations.open import get_manifest, open_checkpoint
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.runtime import identify as real
from gpusnap.runtime_shim.runtime.find import SETTINGS_FILE
from gpusnap.runtime_shim.snapshot.devices import choose as choosing
from gpusnap.runtime_shim.snapshot.records.reservations import read_reserved


@click.command()
@click.argument("what", metavar="WHAT", shell_complete=complete_checkpoint)
@click.option("--gpu-map", metavar="MAP", help="Map old GPUs to new ones: 0=3,1=2, or UUIDs.")
@registry_options
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(what: str, gpu_map: str | None, plain_http: bool, as_json: bool) -> None:
    """Show which of this host's GPUs a restore of the checkpoint WHAT would use now, and why not the others.

    Nothing is restored or reserved. Numbers in MAP are those of nvidia-smi: on the left the GPU on the host
    of the checkpoint, on the right the GPU on this host. Without --gpu-map, the setting gpu-map is used; an
    annotation of the container is ignored. The exit code is 1 if no GPU fits.

    As JSON: pairs (old and new, UUIDs), verdicts (old, new, and reason, which is empty if that GPU fits),
    refusal, hint and code, which are empty if the checkpoint can be restored.
    """
    with Progress() as progress:
        progress.stage(f"reading {what}")
        with open_checkpoint(what, plain_http=plain_http) as checkpoint:
            record = get_manifest(checkpoint)
    host = needed_driver(record.host.vendor).host()
    others: Mapping[str, int] = {}
    with suppress(GpusnapError):  # it takes root to know
        others = read_reserved()
    request = choosing.gpu_request(gpu_map)
    chosen = choosing.choose(record, host, request, settings_file.load().gpu_map, others)
    if as_json:
        print_json(show.plan_document(chosen))
    else:
        show.print_plan(show.output(), record, host, chosen)
    if chosen.refusal:
        raise chosen.make_refusal()


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the inventory as JSON.")
def gpus(as_json: bool) -> None:
    """List the GPUs of this host."""
    host = needed_driver().host()
    if as_json:
        print_json(asdict(host))
        return
    show.print_inventory(show.output(), host)


@click.command()
@click.option(
    "--file",
    "path",
    default=SETTINGS_FILE,
    show_default=True,
    type=click.Path(),
    help="The settings file to read.",
)
def settings(path: str) -> None:
    """Print every setting, and check the settings file and the real runtime."""
    if path != SETTINGS_FILE and not os.path.exists(path):
        raise NotFound(f"there is no settings file {path}", hint="check the path")
    found = settings_file.load(path)
    show.print_settings(show.output(), found)
    real.identify(real.find(found.runtime or None))
