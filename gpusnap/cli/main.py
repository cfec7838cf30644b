"""`gpusnap`: the command line. gpusnap.cli.exit_codes has the exit codes, docs/commands.md all commands."""

from __future__ import annotations

import inspect as inspect_module
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial

import click

from gpusnap.cli import checkpoint_commands, debugging, exit_codes, recover_list, store_commands
from gpusnap.cli import doctor as commands_doctor
from gpusnap.cli import install as commands_install
from gpusnap.cli import tables as show
from gpusnap.cli.completion import complete_checkpoint, completion
from gpusnap.cli.store_commands import inspected
from gpusnap.cli.streams import forgive_closed_pipes
from gpusnap.engines.install.hooks import install_hooks
from gpusnap.oci.base.errors import OciError
from gpusnap.operations import unknown_containers
from gpusnap.operations.open import needed, opened
from gpusnap.progress import Progress
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim import threads
from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.errors import GpusnapError, Interrupted, reason
from gpusnap.runtime_shim.gpu import find_driver, find_drivers, holders
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.runtime import identify as real
from gpusnap.runtime_shim.shim import overrides
from gpusnap.runtime_shim.snapshot import recover_checkpoint as recovery
from gpusnap.runtime_shim.snapshot import recover_restore, restored_containers
from gpusnap.runtime_shim.snapshot.devices import choose as choosing
from gpusnap.runtime_shim.snapshot.devices import reservations
from gpusnap.runtime_shim.snapshot.devices.reservations import reserved
from gpusnap.runtime_shim.snapshot.memory import chunk_cache
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.suspend import gpu_state
from gpusnap.user_errors import NotFound, failure

__all__ = ["main"]

_NOTHING = "nothing to recover"


def main() -> int:
    """The entry point: every error becomes one sentence and an exit code."""
    forgive_closed_pipes()
    threads.bound_starts()
    try:
        command.main(prog_name="gpusnap", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # what fails only here fails as well
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return _failed(Interrupted("it was interrupted", hint="the same command can be run again"))
    except GpusnapError as error:
        return _failed(error)
    except OciError as error:
        debugging.show(error)
        return _failed(failure(error))
    except OSError as error:
        debugging.show(error)
        # Nobody below made a sentence of it: no folder for temporary files, say, or stdout on a full disk.
        what = error.filename or "a file, or the output,"
        return _failed(GpusnapError(f"{what} cannot be used: {reason(error)}"))
    return exit_codes.DONE


def _failed(error: GpusnapError) -> int:
    debugging.show(error)
    print(f"gpusnap: {error.sentence()}", file=sys.stderr)
    return exit_codes.exit_code(error)


class _Commands(click.Group):
    """Its help has the whole first sentence of each command's, where click's own has its beginning."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            first, _, _ = inspect_module.cleandoc(self.commands[name].help or "").partition("\n\n")
            rows.append((name, first))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gpusnap")
@click.option("--debug", is_flag=True, help="Print each program that is run, and tracebacks of errors.")
def command(debug: bool) -> None:
    """Checkpoint and restore containers that use GPUs.

    A checkpoint (WHAT) is written as one of:

    \b
    NAME or DIGEST        in this host's store; the first 6 digits of a digest are enough
    oci:DIR:NAME          in the store in the directory DIR
    ./FILE.tar.zst        an archive of Podman, or a directory of CRIU images
    HOST/REPOSITORY:TAG   in a registry

    Start with `gpusnap doctor`, which checks this host. Containers must be started with gpusnap-runtime,
    which Podman and containerd run in place of crun or runc.
    """
    if debug:
        debugging.begin()


@command.command()
@click.argument("what", metavar="WHAT", shell_complete=complete_checkpoint)
@click.option(
    "--plain-http", is_flag=True, help="Use plain HTTP, without TLS. http:// before REF does the same."
)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect(what: str, plain_http: bool, as_json: bool) -> None:
    """Show the contents of the checkpoint WHAT: GPUs, processes, memory, and how long each step took.

    WHAT is in a store or a registry, an archive made by `podman container checkpoint --export` or by skopeo
    (oci-archive), or a directory of CRIU images. For a checkpoint in a store, the output also lists the other
    checkpoints that share blobs with it. From a registry, only the records are fetched, not the memory.

    As JSON: the manifest (docs/format.md), with statistics (size, zero, repeated, chunks, blobs, plain, zstd,
    stored, ratio) where it has chunks, and artifact (where, names, digest, mediaType, size, records, rootfs,
    chunks, manifests, annotations, shared) where it is kept as one.
    """
    inspected(what, as_json=as_json, plain_http=plain_http)


@command.command()
@click.argument("what", metavar="WHAT", shell_complete=complete_checkpoint)
@click.option("--gpu-map", metavar="MAP", help="Restore old GPUs onto new ones: 0=3,1=2, or UUIDs.")
@click.option(
    "--plain-http", is_flag=True, help="Use plain HTTP, without TLS. http:// before REF does the same."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(what: str, gpu_map: str | None, plain_http: bool, as_json: bool) -> None:
    """Show which of this host's GPUs a restore of the checkpoint WHAT would use now, and why not the others.

    Nothing is restored or reserved. Numbers in MAP are those of nvidia-smi: on the left the GPU on the host
    of the checkpoint, on the right the GPU on this host. Without --gpu-map, the setting gpu-map is used; an
    annotation of the container is ignored. The exit code is 1 if no GPU fits.
    """
    with Progress() as progress:
        progress.stage(f"reading {what}")
        with opened(what, plain_http=plain_http) as checkpoint:
            record = needed(checkpoint)
    host = _driver(record.host.vendor).host()
    others: Mapping[str, int] = {}
    with suppress(GpusnapError):  # it takes root to know
        others = reserved()
    request = choosing.gpu_request(gpu_map)
    chosen = choosing.choose(record, host, request, settings_file.load().gpu_map, others)
    if as_json:
        click.echo(json.dumps(show.plan_document(chosen), indent=1))
    else:
        show.plan(show.output(), record, host, chosen)
    if chosen.refusal:
        raise chosen.refused()


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print the inventory as JSON.")
def gpus(as_json: bool) -> None:
    """List the GPUs of this host."""
    host = _driver().host()
    if as_json:
        click.echo(json.dumps(asdict(host), indent=1))
        return
    show.inventory(show.output(), host)


@command.command()
@click.option(
    "--file",
    "path",
    default=settings_file.SETTINGS_FILE,
    show_default=True,
    type=click.Path(),
    help="The settings file to read.",
)
def settings(path: str) -> None:
    """Print every setting, and check the settings file and the real runtime."""
    if path != settings_file.SETTINGS_FILE and not os.path.exists(path):
        raise NotFound(f"there is no settings file {path}", hint="check the path")
    found = settings_file.load(path)
    show.settings(show.output(), found)
    real.identify(real.find(found.runtime or None))


@command.command()
@click.argument("pids", type=click.IntRange(min=1), nargs=-1, required=True, metavar="PID...")
def resume(pids: tuple[int, ...]) -> None:
    """Resume GPU processes that a killed gpusnap left stopped, with their GPU memory in RAM.

    Use `gpusnap recover` first; it resumes whole containers. Each PID is a PID on this host, as `ps` shows
    it. A process that is already running is left alone.
    """
    driver = _driver()
    missing = [pid for pid in pids if pid not in holders(driver, pids)]
    if missing:
        raise GpusnapError(
            f"process {missing[0]} is no GPU process",
            hint="gpusnap recover --list shows what a killed gpusnap left",
        )
    noted = {
        p.pid: entry for entry in journal.entries() for p in recovery.alive(entry) if p.regions or p.staged
    }
    for pid in pids:
        if pid in noted:
            raise GpusnapError(
                f"the GPU memory of process {pid} is in files",
                hint=f"gpusnap recover {noted[pid].container}",
            )
    driver.open()
    gpu_state.resume(driver, pids, gpu_state.InCriu())
    click.echo("running: " + " ".join(map(str, pids)))


@command.command()
@click.argument("container", required=False, metavar="[CONTAINER]")
@click.option("--list", "only_list", is_flag=True, help="List what needs recovery, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --list: print it as JSON.")
def recover(container: str | None, only_list: bool, as_json: bool) -> None:
    """Clean up after a killed gpusnap or Podman, for all containers or for CONTAINER.

    CONTAINER is its ID, the beginning of it, or Podman's name. After a killed checkpoint, the processes are
    stopped and their GPU memory is in RAM or in files: they are resumed. After a killed restore, the
    incomplete container is removed, so that it can be restored again. A running container is left alone. If
    only the command `gpusnap checkpoint` was killed, Podman and its runtime continue and complete the
    checkpoint: then there is nothing to recover, and `podman container restore NAME` restores the container.

    If Podman was killed during a restore, the container may run without Podman's knowledge. It is reported;
    only `gpusnap recover CONTAINER` ends it, and it has to be restored again. A container that Podman has as
    running or paused is never ended.
    """
    if as_json and not only_list:
        raise click.UsageError("--json goes with --list")
    found, cut_off, up = journal.entries(), recover_restore.entries(), restored_containers.living()
    if container is not None:
        ids = [entry.container for entry in found] + [entry.container for entry in (*cut_off, *up)]
        container = wanted = unknown_containers.chosen(container, ids)
        found = tuple(entry for entry in found if entry.container == wanted)
        cut_off = tuple(entry for entry in cut_off if entry.container == wanted)
        up = tuple(entry for entry in up if entry.container == wanted)
        if not found and not cut_off and not up:
            raise _nothing_for(container)
    if only_list:
        _list(found, cut_off, up, as_json=as_json)
    elif container is not None and not found and not cut_off:
        _end_unknown(container, up)
    else:
        _recover_and_say(container, found, cut_off)


def _nothing_for(container: str) -> GpusnapError:
    return GpusnapError(
        f"there is nothing to recover for container {container}",
        hint="gpusnap recover --list shows what there is, by full container IDs",
    )


def _list(
    found: Sequence[journal.Entry],
    cut_off: Sequence[recover_restore.Restore],
    up: Sequence[recover_restore.Restore],
    *,
    as_json: bool,
) -> None:
    unknown, open_ones = unknown_containers.unknown(up)
    waits = recover_list.waiting(found, cut_off, unknown)
    if as_json:
        click.echo(recover_list.as_json(waits))
    for each in waits if not as_json else ():
        click.echo(recover_list.line(each))
    for line in open_ones:
        click.echo(line, err=True)
    if not waits and not open_ones and not as_json:
        click.echo(_NOTHING, err=True)


def _recover_and_say(
    container: str | None, found: Sequence[journal.Entry], cut_off: Sequence[recover_restore.Restore]
) -> None:
    """Recover all that was cut off, then say what runs without its Podman's knowledge."""
    try:
        _recover_all(
            [(each.container, partial(_recover_restore, each)) for each in cut_off]
            + [(each.container, partial(_recover_checkpoint, each)) for each in found]
        )
    finally:
        restored_containers.sweep()
        up = (each for each in restored_containers.living() if container in (None, each.container))
        unknown, open_ones = unknown_containers.unknown(up)
        for each in unknown:
            click.echo(f"{each.container}  {each.why}")
        for line in open_ones:
            click.echo(line, err=True)
    reservations.sweep()
    if container is None:
        recovery.sweep()
        chunk_cache.tidy(settings_file.load().memory)
        overrides.sweep()
        if not found and not cut_off and not unknown and not open_ones:
            click.echo(_NOTHING, err=True)


def _end_unknown(container: str, up: Sequence[recover_restore.Restore]) -> None:
    """End those of that ID that Podman does not know. Raises GpusnapError where there is none."""
    done = [said for said in map(unknown_containers.end, up) if said is not None]
    for said in done:
        click.echo(f"{container}  {said}")
    if not done:
        raise _nothing_for(container)


def _recover_restore(entry: recover_restore.Restore) -> str:
    said = recover_restore.recover(entry.key, find_driver())
    if not said.startswith(recover_restore.RUNNING) or entry.podman:  # Podman is asked next
        return said
    # Whoever had it restored was told that this failed, and may take it for a container that does not run.
    ends = recover_restore.deletion(entry.command, entry.container)
    return f"{said}; if its engine does not list it as running, this ends it: {ends}"


def _recover_checkpoint(entry: journal.Entry) -> str:
    return recovery.recover(entry, _driver(), settings_file.load().memory)


def _recover_all(actions: Sequence[tuple[str, Callable[[], str]]]) -> None:
    """Do all that can be done; then the first failure is raised."""
    failures: list[GpusnapError] = []
    for container, action in actions:
        try:
            click.echo(f"{container}  {action()}")
        except GpusnapError as error:
            failures.append(error)
            if len(actions) > 1:
                click.echo(f"{container}  {error.sentence()}", err=True)
    if failures:
        raise failures[0]


command.add_command(commands_doctor.doctor)
command.add_command(commands_install.install)
command.add_command(commands_install.uninstall)
command.add_command(install_hooks)
command.add_command(completion)
command.add_command(store_commands.ls)
command.add_command(store_commands.diff)
command.add_command(store_commands.verify)
command.add_command(store_commands.rm)
command.add_command(store_commands.gc)
command.add_command(store_commands.tag)
command.add_command(checkpoint_commands.checkpoint)
command.add_command(checkpoint_commands.restore)
command.add_command(checkpoint_commands.push)
command.add_command(checkpoint_commands.pull)


def _driver(vendor: str = "") -> Driver:
    """This host's driver; where it has several, that of a vendor."""
    driver = find_driver()
    if driver is not None and driver.vendor != vendor and vendor:
        driver = next((each for each in find_drivers() if each.vendor == vendor), driver)
    if driver is None:
        raise GpusnapError(
            "this host has no GPU driver that gpusnap knows: no /dev/nvidia*, no /proc/driver/nvidia, no "
            "/dev/kfd",
            hint="load the driver, and see that nvidia-smi or rocminfo lists the GPUs",
        )
    return driver


if __name__ == "__main__":
    raise SystemExit(main())
