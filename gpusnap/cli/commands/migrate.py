"""`gpusnap migrate`: a running container to another host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpusnap.base.privileges import require_root
from gpusnap.base.progress import Progress
from gpusnap.cli.completion import complete_container
from gpusnap.cli.json_output import print_json
from gpusnap.cli.options.container_names import check_not_empty
from gpusnap.cli.options.quiet import quiet
from gpusnap.runtime_shim.base.units import human

if TYPE_CHECKING:
    from gpusnap.migration.migrate import MigrationResult


@click.command()
@click.argument(
    "container",
    required=False,
    metavar="CONTAINER",
    callback=check_not_empty,
    shell_complete=complete_container,
)
@click.argument("host", required=False, metavar="ssh://[USER@]HOST[:PORT]")
@click.option(
    "-n", "--name", default="", help="Name of the container on the other host. [default: the same name]"
)
@click.option("--gpu-map", default="", metavar="MAP", help="Map old GPUs to new ones: 0=3,1=2, or UUIDs.")
@click.option(
    "--precopy",
    type=click.IntRange(0, 10),
    default=1,
    show_default=True,
    metavar="N",
    help="How often to send the memory ahead while the container runs.",
)
@click.option("--keep", is_flag=True, help="Keep the stopped container and its checkpoint on this host.")
@click.option("--ignore-volumes", is_flag=True, help="Do not include the files in its named volumes.")
@click.option("--force", is_flag=True, help="As for gpusnap checkpoint.")
@click.option("--dry-run", is_flag=True, help="Only check the other host and print what would be done.")
@click.option(
    "--ssh",
    default="ssh",
    show_default=True,
    metavar="COMMAND",
    help="The ssh command to use, such as 'ssh -i KEY'.",
)
@click.option(
    "--remote-command",
    default="gpusnap",
    show_default=True,
    metavar="COMMAND",
    help="The command that runs gpusnap there, such as 'sudo -n gpusnap'.",
)
@click.option(
    "--patience",
    type=click.FloatRange(1, 86400),
    default=900,
    show_default=True,
    metavar="SECONDS",
    help="How long a host may make no progress in a step before gpusnap gives up.",
)
@click.option("--server", is_flag=True, hidden=True)
@quiet
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
def migrate(
    container: str | None,
    host: str | None,
    precopy: int,
    dry_run: bool,
    ssh: str,
    remote_command: str,
    server: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Move a running Podman container, with its GPU state, to another host by ssh.

    Example: gpusnap migrate server ssh://root@gpu2

    The other host needs gpusnap of the same or a newer release, Podman with gpusnap-runtime, and GPUs that
    fit. This is checked first, and nothing is changed here if a check fails: its release, its disk, the name,
    the image (which Podman pulls there), and the GPUs, which it chooses as `gpusnap plan` does.

    Then the memory is sent while the container runs: a checkpoint that leaves it running is sent to the other
    host's store. After that the container is checkpointed and stopped, the changes since then are sent, and
    it is restored there. Chunks that the other store already has are not sent again. Each --precopy stops the
    processes for as long as `gpusnap checkpoint --leave-running` does; --precopy 0 sends everything while it
    is stopped.

    If anything fails, or if you press Ctrl-C, the container runs on this host again, and nothing of it runs
    on the other one. Only if the connection breaks while the other host restores, and that host can no longer
    be asked, the container stays stopped here, and its checkpoint is not restored until it is known where the
    container runs: `gpusnap recover` asks again, also after this command was killed. Once the container runs
    there, the stopped container and its checkpoint are removed here, unless --keep is given.

    Bind mounts must exist on the other host; connections of the container do not move. ssh may ask for a
    password; the host key must be known. Both sides run as root.

    As JSON: container, host, name, containerId (both of the other host), digest, gpus (each with old and
    new), image (whether the other host has it), needs and free (bytes there), ahead and after (bytes that
    were sent while it ran, and while it was stopped), pause (seconds for which it was stopped), seconds,
    dryRun.
    """
    require_root("migrate")
    if server:
        from gpusnap.migration.receiver import receive

        receive(0, 1)
        return
    if container is None or host is None:
        raise click.UsageError("name a container and a host: gpusnap migrate CONTAINER ssh://HOST")
    from gpusnap.migration import link
    from gpusnap.migration import migrate as migration

    link.check_command_line(ssh, "--ssh")
    link.check_command_line(remote_command, "--remote-command")
    request = migration.MigrationRequest(
        container=container,
        route=link.Route(to=link.destination(host), ssh=ssh, program=remote_command),
        ahead=precopy,
        dry_run=dry_run,
        **options,
    )
    with Progress() as progress:
        done = migration.migrate(request, progress)
    if as_json:
        print_json(_document(done, dry_run=dry_run))
    else:
        _say(done, dry_run=dry_run)


def _document(done: MigrationResult, *, dry_run: bool) -> dict[str, object]:
    return {
        "container": done.container.name,
        "host": done.host,
        "name": done.name,
        "containerId": done.id,
        "digest": done.digest,
        "gpus": [{"old": old, "new": new} for old, new in done.pairs],
        "image": done.image,
        "needs": done.needs,
        "free": done.free,
        "ahead": done.ahead,
        "after": done.after,
        "pause": round(done.pause, 3),
        "seconds": round(done.seconds, 3),
        "dryRun": dry_run,
    }


def _say(done: MigrationResult, *, dry_run: bool) -> None:
    gpus = ", ".join(f"{old} to {new}" for old, new in done.pairs) or "none"
    if dry_run:
        click.echo(f"{done.container.name} can be migrated to {done.host}; nothing was changed")
        click.echo(f"GPUs: {gpus}")
        click.echo(f"space: up to {human(done.needs)} of {human(done.free)} available there")
        if not done.image:
            click.echo(f"the image {done.container.image} is not there: Podman would pull it")
        return
    click.echo(f"{done.name} runs on {done.host}  {done.id}  {done.seconds:.1f} s")
    click.echo(f"GPUs: {gpus}")
    click.echo(
        f"{human(done.ahead)} were sent while it ran, {human(done.after)} afterwards; it was stopped for "
        f"{done.pause:.1f} s"
    )
