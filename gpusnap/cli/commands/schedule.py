"""`gpusnap schedule`: has systemd checkpoint a container periodically."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import click

from gpusnap.base.user_errors import NotFound
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.labels import parse_labels
from gpusnap.cli import tables as show
from gpusnap.cli.completion import complete_container
from gpusnap.cli.json_output import print_json
from gpusnap.cli.options.container_names import check_not_empty
from gpusnap.cli.options.keep_options import duration, keep_options, rules, words
from gpusnap.doctor.base.sources import program
from gpusnap.engines import podman
from gpusnap.oci.base.dataclass import asdict
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError
from gpusnap.runtime_shim.snapshot.records import suspensions
from gpusnap.schedule import schedules
from gpusnap.schedule.schedules import Schedule


@click.command()
@click.argument(
    "container",
    required=False,
    metavar="[CONTAINER]",
    callback=check_not_empty,
    shell_complete=complete_container,
)
@click.option("--every", callback=duration, metavar="DURATION", help="Interval, such as 30m or 1d12h.")
@click.option(
    "--to",
    metavar="PLACE",
    help="Destination: oci:DIR, or a REF in a registry. [default: this host's store]",
)
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Add a label to each checkpoint.")
@click.option("--tcp-established", is_flag=True, help="Checkpoint open TCP connections.")
@keep_options
@click.option("--list", "show_list", is_flag=True, help="List the schedules on this host.")
@click.option("--remove", is_flag=True, help="Remove the schedule of CONTAINER.")
@click.option("--dry-run", is_flag=True, help="Print the units without installing them.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def schedule(
    container: str | None,
    every: timedelta,
    to: str | None,
    labels: tuple[str, ...],
    tcp_established: bool,
    show_list: bool,
    remove: bool,
    dry_run: bool,
    as_json: bool,
    **keep: Any,
) -> None:
    """Have systemd checkpoint CONTAINER every DURATION, while it continues to run.

    It writes a timer and a service, /etc/systemd/system/gpusnap-checkpoint-NAME, and starts the timer. With
    --keep rules, `gpusnap prune` runs before each checkpoint and after each successful one, for this
    container alone. A run does not start before the previous one has finished. If one fails, `systemctl
    status` and `systemctl --failed` show it, and the next one starts at its regular time. Run the command
    again to change a schedule.

    As JSON: container, everySeconds, units (path, content), written; with --list a list of container, every
    (seconds), commands, unit, result (of the last run: success, exit-code, running, …; dependency if
    it did not begin; stopped if the timer is, so that no run follows); with --remove: container, removed
    (paths).
    """
    if show_list and (container is not None or remove):
        raise UsageError("--list lists all schedules", hint="give it alone, or with --json")
    if show_list:
        _list(as_json=as_json)
        return
    if container is None:
        raise UsageError(
            "no container is given",
            hint=f"gpusnap schedule CONTAINER {'--remove' if remove else '--every 30m --keep-last 5'}",
        )
    if remove:
        _remove(container, as_json=as_json)
        return
    if not every:
        raise UsageError("no interval is given", hint="add --every, such as --every 30m")
    container, note = _find_name(container)
    place = locator.destination(to) if to is not None else None
    store = place.store if isinstance(place, locator.InStore) else locator.default_store()
    found = Schedule(
        container,
        every,
        _checkpoint_words(to, labels, tcp_established=tcp_established),
        _prune_words(container, to, keep),
        os.path.abspath(program("gpusnap") or sys.argv[0]),  # PATH may have a relative folder
        network=isinstance(place, locator.InRegistry),
        store=store.path,
    )
    found.check()
    if not dry_run:
        schedules.write(found)
    files = {os.path.join(schedules.FOLDER, name): text for name, text in found.files().items()}
    if as_json:
        units = [{"path": path, "content": text} for path, text in files.items()]
        document = {"container": container, "everySeconds": int(every.total_seconds()), "units": units}
        print_json(document | {"written": not dry_run})
    elif dry_run:
        click.echo("\n".join(f"# {path}\n{text}" for path, text in files.items()), nl=False)
    else:
        click.echo(f"{container} is checkpointed every {_format_interval(every)}, by {found.name}.timer")
        click.echo(f"systemctl status '{found.name}.service' shows the last run")
    if note:
        click.echo(f"note: {note}", err=True)


def _checkpoint_words(to: str | None, labels: tuple[str, ...], *, tcp_established: bool) -> tuple[str, ...]:
    parse_labels(labels)
    found = [word for each in labels for word in ("--label", each)]
    if tcp_established:
        found.append("--tcp-established")
    if to is None:
        return tuple(found)
    place = locator.destination(to)
    if isinstance(place, locator.InFile):
        raise UsageError(
            f"--to {to} is a single file, but each checkpoint needs its own", hint="write oci:DIR, or a REF"
        )
    if isinstance(place, locator.InStore):
        if place.wanted:
            raise UsageError(f"--to {to} names a single checkpoint", hint="write oci:DIR without a name")
        to = f"oci:{place.store.path}"  # a service has another working directory
    return (*found, "--to", to)


def _prune_words(container: str, to: str | None, keep: dict[str, Any]) -> tuple[str, ...]:
    if rules(keep).is_empty():
        return ()
    place = locator.destination(to) if to is not None else None
    store = [f"oci:{place.store.path}"] if isinstance(place, locator.InStore) else []
    return (*words(keep), "--gc", "--", *store, container)


def _find_name(container: str) -> tuple[str, str]:
    """Return the name of a container that may be given by its ID, and a note about it.

    There may be none now: Quadlet makes one at each start.
    """
    name = container
    try:
        found = podman.inspect_container(container)
        name = found.name
        podman.check(found, asleep=suspensions.find_by_container(found.id) is not None)
    except NotFound:
        return name, f"there is currently no container {container}"
    except GpusnapError as error:
        return name, error.sentence()
    return name, ""


def _remove(container: str, *, as_json: bool) -> None:
    paths = schedules.remove(container)
    if as_json:
        print_json({"container": container, "removed": paths})
        return
    for path in paths:
        click.echo(f"removed {path}")


def _list(*, as_json: bool) -> None:
    found = [*schedules.list_schedules()]
    if as_json:
        print_json([asdict(each) for each in found])
        return
    console = show.output()
    if not found:
        show.say(console, "no container has a schedule")
        return
    rows = show.table("", "container", "every", "last run", "unit")
    rows.title = None
    for each in found:
        every = _format_interval(timedelta(seconds=each.every)) if each.every else ""
        rows.add_row(
            show.make_plain(each.container), every, show.make_plain(each.result), show.make_plain(each.unit)
        )
    console.print(rows)


def _format_interval(every: timedelta) -> str:
    seconds = int(every.total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds % size == 0:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
