"""`gpusnap version`: the versions of all that gpusnap works with."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from gpusnap.cli import tables as show
from gpusnap.doctor.versions import Part, versions


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the versions as JSON.")
def version(as_json: bool) -> None:
    """Print the versions of gpusnap, Python, the kernel, Podman, crun, runc, CRIU and the GPU drivers.

    What is not there is said to be so, and the exit code is 0 all the same; `gpusnap doctor` says what is
    missing for a checkpoint. For a report of a bug, put the output of this command into it. `gpusnap
    --version` prints the first of them alone, at once.

    As JSON: gpusnap, python, kernel, criu, pycriu, podman, and the lists runtimes (the first is the one of
    new containers of Podman) and drivers; each with name, version, path, note, fault (why the version is not
    known).
    """
    found = versions()
    if as_json:
        click.echo(json.dumps(asdict(found), indent=1))
        return
    parts = [*found.parts()]
    width = max(len(part.name) for part in parts)
    console = show.output()
    for part in parts:
        show.say(console, f"{part.name:{width}}  {_format_part(part)}")


def _format_part(part: Part) -> str:
    more = ", ".join(each for each in (part.path, part.note) if each)
    said = part.version or part.fault
    return f"{said} ({more})" if more else said
