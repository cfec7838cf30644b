"""gpusnap ps: the containers that use GPUs, and those that are suspended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from gpusnap.base.privileges import require_root
from gpusnap.cli import name_rows
from gpusnap.cli import tables as show
from gpusnap.cli.json_output import document, print_json
from gpusnap.listing.ages import format_age
from gpusnap.listing.templates import DIGITS, template_of
from gpusnap.runtime_shim.base.units import human

if TYPE_CHECKING:
    from gpusnap.operations.suspending.usage import Usage

_EVERY = 2.0  # seconds
_FIELDS: Mapping[str, Callable[[Usage], str]] = {
    "Name": lambda each: each.name,
    "State": lambda each: each.state,
    "ID": lambda each: each.container_id[:DIGITS],
    "Engine": lambda each: each.engine,
    "GPU": lambda each: ",".join(map(str, each.gpus)),
    "Memory": lambda each: human(each.gpu_memory),
    "RAM": lambda each: human(each.ram) if each.ram else "",
    "Store": lambda each: human(each.stored) if each.stored else "",
    "Since": lambda each: each.since,
}
_COLUMNS: Mapping[str, Callable[[Usage], str]] = {
    "name": _FIELDS["Name"],
    "state": _FIELDS["State"],
    "GPU": _FIELDS["GPU"],
    "memory": _FIELDS["Memory"],
    "RAM": _FIELDS["RAM"],
    "store": _FIELDS["Store"],
    "since": lambda each: format_age(each.since) if each.since else "",
}
_LAYOUTS = (((), 2), (("since",), 2), (("since", "store"), 2), (("since", "store", "RAM"), 1))


@click.command()
@click.option(
    "--format",
    "form",
    metavar="TEMPLATE",
    help="json, or a template of fields such as '{{.Name}} {{.State}}'.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print only names.")
@click.option("-w", "--watch", is_flag=True, help=f"Print again every {_EVERY:g} seconds, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def ps(form: str | None, quiet: bool, watch: bool, as_json: bool) -> None:
    """List the containers that use a GPU, and those that are suspended.

    The state is running, paused or suspended, or checkpointing, suspending or resuming while that is in
    progress. It is "cut off" if a checkpoint, a suspend or a resume was killed: `gpusnap recover` finishes or
    undoes it. "memory" is the GPU memory that a container uses; for
    a suspended one it is what it needs when it is resumed, and "RAM" and "store" show where that is now. A
    containerd container has its namespace before its ID, unless that is "default".

    Fields for --format are Name, State, ID, Engine, GPU, Memory, RAM, Store, Since. With "table " in front, a
    heading is printed.

    As JSON: containers, a list with name, containerId, engine, state, gpus, gpuMemory, ram, stored, since.
    """
    if as_json + quiet + (form is not None) > 1:
        raise click.UsageError("give only one of --json, --format and --quiet")
    if form == "json":
        form, as_json = None, True
    made = template_of(form, _FIELDS) if form is not None else None
    require_root("ps")
    from gpusnap.operations.suspending.usage import usages

    def once() -> None:
        found = usages()
        if watch:
            click.clear()
        if as_json:
            print_json({"containers": [document(each) for each in found]})
        elif quiet or made is not None:
            for line in made(found) if made is not None else [each.name for each in found]:
                click.echo(line)
        else:
            _show(found)

    once()
    try:
        while watch:
            time.sleep(_EVERY)
            once()
    except KeyboardInterrupt:
        return


def _show(found: Sequence[Usage]) -> None:
    from gpusnap.operations.suspending.usage import CUT_OFF

    console = show.output()
    if not found:
        show.say(console, "no container uses a GPU, and none is suspended")
        return
    cells = [{title: text(each) for title, text in _COLUMNS.items()} for each in found]
    name_rows.print_rows(console, [*_COLUMNS], cells, layouts=_LAYOUTS)
    if held := [each.ram for each in found if each.ram]:
        whose = "1 container" if len(held) == 1 else f"{len(held)} containers"
        show.say(console, f"GPU memory of {whose} in RAM: {human(sum(held))}")
    if any(each.state == CUT_OFF for each in found):
        show.say(console, "cut off: its gpusnap was killed; run gpusnap recover")
