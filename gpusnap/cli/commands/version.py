"""`gpusnap version`: the versions of everything that gpusnap works with."""

from __future__ import annotations

import click

from gpusnap.cli import tables as show
from gpusnap.cli.json_output import print_json
from gpusnap.doctor.versions import Part, versions
from gpusnap.oci.base.dataclass import asdict


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the versions as JSON.")
def version(as_json: bool) -> None:
    """Print the versions of gpusnap, Python, the kernel, Podman, crun, runc, CRIU and the GPU drivers.

    Missing programs are listed as such, and the exit code is still 0; `gpusnap doctor` shows what is missing
    for a checkpoint. Include the output of this command in bug reports. `gpusnap --version` prints only the
    version of gpusnap, without running other programs.

    As JSON: gpusnap, python, kernel, criu, pycriu, podman, and the lists runtimes (the first is the one that
    Podman uses for new containers) and drivers; each with name, version, path, note, fault (why the version
    is unknown).
    """
    found = versions()
    if as_json:
        print_json(asdict(found))
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
