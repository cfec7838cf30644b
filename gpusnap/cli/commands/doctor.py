"""`gpusnap doctor`: the checks of gpusnap.doctor, as lines or as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console
from rich.text import Text

from gpusnap.base.privileges import require_root
from gpusnap.cli import tables as show
from gpusnap.cli.completion import complete_container
from gpusnap.cli.json_output import print_json
from gpusnap.cli.options.container_names import check_not_empty
from gpusnap.doctor import container as of_container
from gpusnap.doctor import host
from gpusnap.doctor.base import subject
from gpusnap.doctor.base.check import Check, Verdict, document, plural
from gpusnap.runtime_shim.base.errors import GpusnapError, with_code
from gpusnap.runtime_shim.gpu import find_driver

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "bold red"}
_MARKS = {Verdict.OK: "OK", Verdict.WARNING: "warning", Verdict.FAILURE: "failure"}


@click.command()
@click.argument(
    "container",
    required=False,
    metavar="[CONTAINER]",
    callback=check_not_empty,
    shell_complete=complete_container,
)
@click.option(
    "--containerd",
    "namespace",
    default="",
    metavar="NS",
    help="CONTAINER is the ID of a task in this namespace of containerd's.",
)
@click.option(
    "--runtime", default="", metavar="NAME", help="Check this runtime instead of the one in the settings."
)
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
def doctor(container: str | None, namespace: str, runtime: str, as_json: bool) -> None:
    """Check whether this host, or the running CONTAINER, can be checkpointed.

    Each line is OK, a warning or a failure, with what to do about it; docs/doctor.md explains each. CONTAINER
    is the name or ID of a running Podman container, or the ID of a containerd task. Nothing is changed, and
    no process is stopped. Run it as root. The exit code is 1 if there are failures, otherwise 0, even with
    warnings.

    As JSON: failures, warnings, and checks, each with name, verdict (ok, warning, failure), says, todo,
    facts, and code (such as GPS-312, for `gpusnap explain`; empty if there is none).
    """
    if container is None:
        if namespace:
            raise click.UsageError("--containerd requires CONTAINER")
        checks = host.checks(runtime=runtime)
    else:
        if runtime:
            raise click.UsageError("--runtime cannot be combined with CONTAINER")
        require_root("doctor CONTAINER")
        checks = of_container.checks(subject.find(container, namespace=namespace), find_driver())
    if as_json:
        print_json(document(checks))
    else:
        console = show.output()
        print_checks(console, checks)
        show.say(console, conclusion(checks, container))
    failures = sum(each.verdict is Verdict.FAILURE for each in checks)
    if failures:
        raise GpusnapError(
            f"{failures} of {plural(len(checks), 'check')} failed", hint="follow the hint of each one"
        )


def conclusion(checks: Sequence[Check], container: str | None) -> str:
    """Return one sentence: whether it can be done."""
    what = "GPU containers can be checkpointed and restored on this host"
    if container is not None:
        what = f"{container} can be checkpointed"
    if any(each.verdict is Verdict.FAILURE for each in checks):
        return what.replace(" can ", " cannot ", 1) + " until the failures are fixed"
    if any(each.verdict is Verdict.WARNING for each in checks):
        exceptions = [str(each.facts["except_for"]) for each in checks if "except_for" in each.facts]
        if container is None and exceptions:
            what += ", but not " + " or ".join(exceptions)
        return f"{what}; read the warnings first"
    return what


def print_checks(to: Console, checks: Sequence[Check]) -> None:
    """Print a line for each, and one below it with what to do."""
    width = max((len(each.name) for each in checks), default=0)
    for each in checks:
        line = Text(f"{_MARKS[each.verdict]:<8}", style=_STYLES[each.verdict])
        line.append(f"{each.name:<{width}}  ", style="bold")
        line.append(show.make_plain(with_code(each.says, each.code)).plain, style="default")
        to.print(line, soft_wrap=True)
        if each.todo:
            to.print(Text(" " * (10 + width) + f"→ {show.make_plain(each.todo).plain}"), soft_wrap=True)
    warnings = sum(each.verdict is Verdict.WARNING for each in checks)
    failures = sum(each.verdict is Verdict.FAILURE for each in checks)
    to.print()
    show.say(to, f"{plural(failures, 'failure')}, {plural(warnings, 'warning')}")
