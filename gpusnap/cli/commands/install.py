"""The commands `gpusnap install` and `gpusnap uninstall`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from gpusnap.cli.json_output import document, print_json
from gpusnap.engines.install import containerd as install_containerd
from gpusnap.engines.install import crio as install_crio
from gpusnap.engines.install import detect as install_engines
from gpusnap.engines.install import installer, record
from gpusnap.engines.install import launcher as install_runtime
from gpusnap.engines.install import permissions as install_trust
from gpusnap.engines.install import podman as install_podman
from gpusnap.engines.install import references as install_mentions
from gpusnap.engines.install.files import join_root, state
from gpusnap.engines.install.installer import Change, Item
from gpusnap.hooks import hooksd
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.runtime.criu.images import pycriu_package
from gpusnap.schedule import schedules

_DONE = {"written": "to be written", "replaced": "to be replaced", "removed": "to be removed"}
_CHANGED = ("written", "replaced", "removed")
_UNITS = {"containerd": "/etc/containerd/", "crio": "/etc/crio/"}

_force = click.option("--force", is_flag=True, help="Continue where it would otherwise refuse; see above.")
_dry_run = click.option("--dry-run", is_flag=True, help="Print what would be done without doing it.")
_root = click.option(
    "--root",
    default="/",
    metavar="DIR",
    type=click.Path(file_okay=False, exists=True),
    help="Use the file system in DIR, such as an image that is being built.",
)


@dataclass(frozen=True, slots=True)
class _Plan:
    items: list[Item]
    notes: list[str]
    program: str


@click.command()
@click.option("--podman", is_flag=True, help="Add gpusnap-runtime to Podman's configuration.")
@click.option(
    "--containerd", is_flag=True, help="Add the runtime handler gpusnap to containerd's CRI plugin."
)
@click.option("--crio", is_flag=True, help="Add the runtime handler gpusnap to CRI-O.")
@click.option("--default", is_flag=True, help="Make it the engines' default for new containers.")
@click.option("--hooks", is_flag=True, help="Also have Podman run the OCI hooks (docs/hooks.md).")
@_root
@_force
@_dry_run
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def install(
    podman: bool,
    containerd: bool,
    crio: bool,
    default: bool,
    hooks: bool,
    root: str,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Register gpusnap-runtime with the container engines of this host.

    If no engine is named, all of Podman, containerd and CRI-O that are installed are configured. Each gets a
    separate configuration file, and existing files are not changed; if an engine does not support that, a
    file is written that shows what to add. The settings file is created with all settings as comments. If it
    is run again, it completes an interrupted installation and updates an existing one.

    It is refused if an existing file differs from what gpusnap would write, or if users other than root
    could modify the program that the engines would run as root; --force replaces the file, and accepts the
    program.

    As JSON: program, engines, changes (each with what, which is written, replaced, unchanged, kept, removed,
    gone or left, and path), notes.
    """
    root = os.path.realpath(root)
    _need_root("install", root, dry_run)
    chosen = {"podman": podman, "containerd": containerd, "crio": crio}
    engines = _engines([name for name, wanted in chosen.items() if wanted], root)
    plan = _make_plan(engines, root, default=default, hooks=hooks, force=force)
    parts, kept = _parts(plan, root)
    changes = installer.install(plan.items, parts=parts, root=root, force=force, dry_run=dry_run)
    notes = [*plan.notes, *kept, *_list_left(changes), *_restarts(changes, root), *_list_missing(root)]
    if not as_json:
        _say(changes, notes, plan.items if dry_run else (), dry_run)
        if not dry_run:
            click.echo("gpusnap doctor checks whether this host is ready for checkpoints")
        return
    print_json({"program": plan.program, "engines": list(engines), **_document(changes, notes)})


@click.command()
@_root
@_force
@_dry_run
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def uninstall(root: str, force: bool, dry_run: bool, as_json: bool) -> None:
    """Remove what `gpusnap install` installed on this host.

    Modified files are kept. It is refused while there are containers that use gpusnap-runtime, because their
    engine could then neither stop nor start them, and while another configuration file of an engine names
    gpusnap-runtime or makes it the default: the lines are shown. --force uninstalls anyway, and removes
    modified files. Checkpoints, the store, schedules and gpusnap itself are kept; schedules are named.

    With --dry-run it prints what would be removed and, if it would be refused, the reason, and returns the
    same exit code. It looks for containers only if it runs as root.

    As JSON: changes (each with what, which is removed, gone or left, and path), notes, and refused, which is
    empty unless --dry-run found that it would be refused.
    """
    root = os.path.realpath(root)
    _need_root("uninstall", root, dry_run)
    refusal = None if force else _refusal_of_used(root)
    lines = _list_mentions(root, force) if refusal is None or dry_run else []
    if lines and not force and refusal is None:
        refusal = GpusnapError(
            "other configuration files still refer to gpusnap-runtime: "
            f"{_join([str(each) for each in lines])}",
            hint="remove these lines first, or give --force to uninstall anyway",
        )
    if refusal is not None and not dry_run:
        raise refusal
    changes = installer.uninstall(root=root, force=force, dry_run=dry_run)
    notes = _list_left(changes)
    notes += [f"remove this line: {each.path} is left as it is: {each}" for each in lines]
    notes += [*_restarts(changes, root), *_list_schedules(root)]
    if as_json:
        print_json(_document(changes, notes) | {"refused": refusal.sentence() if refusal is not None else ""})
    else:
        _say(changes, notes, (), dry_run)
        if not changes:
            click.echo("gpusnap install has installed nothing on this host")
    if refusal is not None:
        raise refusal


def _refusal_of_used(root: str) -> GpusnapError | None:
    """Return why containers keep it from being uninstalled; None if none do, or in a tree."""
    try:
        if root == "/" and os.geteuid() == 0:  # whose containers Podman would list to others
            _refuse_used()
    except GpusnapError as error:
        return error
    return None


def _list_missing(root: str) -> list[str]:
    """Return what a restore lacks that gpusnap's own packages do not bring."""
    if pycriu_package.is_there(root):
        return []
    return [pycriu_package.make_missing_error("this host cannot restore checkpoints without it").sentence()]


def _need_root(command: str, root: str, dry_run: bool) -> None:
    if root == "/" and not dry_run and os.geteuid():
        raise GpusnapError(
            f"gpusnap {command} changes system files, which requires root",
            hint="run it as root, or with --dry-run to see what would be done",
            code="GPS-005",
        )


def _engines(chosen: Sequence[str], root: str) -> dict[str, str]:
    """Return the engines to work for, with the paths of their programs; "" if one is not installed (yet)."""
    found = install_engines.find(root)
    if chosen:
        return {name: found.get(name, "") for name in chosen}
    if not found:
        where = f"in {root}" if root != "/" else "on this host"
        raise GpusnapError(
            f"Podman, containerd and CRI-O are not installed {where}",
            hint="install one of them, or name the one that will be installed: --podman, --containerd, "
            "--crio",
        )
    return found


def _make_plan(engines: dict[str, str], root: str, *, default: bool, hooks: bool, force: bool) -> _Plan:
    """Return what is to be written, in this order: an engine is told of it when all else is there."""
    runs = install_runtime.program(root)
    items = [*runs.items, install_runtime.settings_item()]
    notes = [*runs.notes, *_check_trusted(install_runtime.find_program(root), root, force)]
    if hooks and "podman" not in engines:
        raise GpusnapError("--hooks applies to Podman, which is not among the engines", hint="add --podman")
    if "podman" in engines:
        hook = install_runtime.find_program(root, hooksd.PROGRAM) if hooks else ""
        notes += _check_trusted(hook, root, force) if hook else ()
        items += install_podman.items(runs.path, root=root, default=default, hook=hook)
        notes += install_podman.notes(runs.path, root=root, default=default)
    if "containerd" in engines:
        version = install_engines.containerd_version(engines["containerd"], root)
        ours = _is_ours(install_containerd.CONFIG, root)
        found = install_containerd.plan_handler(
            runs.path, version=version, root=root, default=default, ours=ours
        )
        items += found.items
        notes += found.notes
    if "crio" in engines:
        items += install_crio.items(runs.path, root=root, default=default)
    return _Plan(items, notes, runs.path)


def _check_trusted(program: str, root: str, force: bool) -> list[str]:
    """Return a note on a program that not only root can change; in a tree, that is not known yet."""
    fault = install_trust.fault(program) if root == "/" else ""
    if fault and not force:
        raise GpusnapError(
            f"the engines would run {program} as root, but {fault}",
            hint="install gpusnap where only root can write, as sudo pipx install does, or give "
            "--force to accept the risk",
        )
    return [f"the engines run {program} as root, but {fault}"] if fault else []


def _parts(plan: _Plan, root: str) -> tuple[set[str], list[str]]:
    """Return the parts that are installed, and notes.

    An earlier program, as of a wheel before the package, is let go once nobody needs it.
    """
    parts, written = {item.part for item in plan.items}, {item.path for item in plan.items}
    entries = record.load(root).entries
    old = [each.path for each in entries if each.part == "runtime" and each.path not in written]
    if not old:
        return parts, []
    lines = install_mentions.lines(root, old, written)
    needs = next((f"{line}" for line in lines if any(path in line.text for path in old)), "")
    if not needs and root == "/" and (found := install_engines.list_used()):
        needs = f"containers use gpusnap-runtime as their runtime: {_format_used(found)}"
    if not needs:
        return parts | {"runtime"}, []
    again = "run gpusnap install again when that has changed"
    return parts - {"runtime"}, [
        f"{path} of an earlier installation is kept: {needs}; {again}" for path in old
    ]


def _list_mentions(root: str, force: bool) -> list[install_mentions.Line]:
    """Return lines that name the program in files that an uninstall leaves."""
    changes = installer.uninstall(root=root, force=force, dry_run=True)
    gone = [each.path for each in changes if each.what != "left"]
    return install_mentions.lines(root, _programs(root), gone) if changes else []


def _programs(root: str) -> list[str]:
    """Return the programs that engines have been told of, as far as they are known."""
    found = [each.path for each in record.load(root).entries if each.part == "runtime"]
    with suppress(GpusnapError):
        found.append(install_runtime.find_program(root))
    return found


def _is_ours(path: str, root: str) -> bool:
    entry = record.load(root).entry(path)
    return entry is not None and state(join_root(root, path)) in entry.states


def _list_left(changes: Sequence[Change]) -> list[str]:
    return [f"{each.path} was modified, and is kept" for each in changes if each.what == "left"]


def _list_schedules(root: str) -> list[str]:
    """Timers of `gpusnap schedule`: their runs fail once gpusnap itself is removed."""
    with suppress(GpusnapError):
        containers = schedules.list_timers(root).values()
        return [
            f"the schedule of {name} is kept; before gpusnap is removed: gpusnap schedule {name} --remove"
            for name in map(shlex.quote, containers)
        ]
    return []


def _restarts(changes: Sequence[Change], root: str) -> list[str]:
    """Return what has to be restarted to read its configuration; Podman reads it for each command."""
    changed = [each.path for each in changes if each.what in _CHANGED] if root == "/" else []
    units = [unit for unit, folder in _UNITS.items() if any(path.startswith(folder) for path in changed)]
    return [f"to apply it: systemctl restart {unit}" for unit in units]


def _refuse_used() -> None:
    found = install_engines.list_used()
    if found:
        engines = " and ".join(sorted({install_engines.NAMES[each.engine] for each in found}))
        raise GpusnapError(
            f"containers of {engines} use gpusnap-runtime as their runtime: {_format_used(found)}",
            hint="remove them first, or give --force to uninstall anyway",
        )


def _format_used(found: Sequence[install_engines.ShimContainer]) -> str:
    return _join(sorted(each.name or each.id[:12] for each in found))


def _join(words: Sequence[str]) -> str:
    return ", ".join(words[:5]) + (f" and {len(words) - 5} more" if len(words) > 5 else "")


def _say(changes: Sequence[Change], notes: Sequence[str], shown: Sequence[Item], dry_run: bool) -> None:
    content = {item.path: item for item in shown}
    for each in changes:
        what = _DONE.get(each.what, each.what) if dry_run else each.what
        click.echo(f"{what} {each.path}")
        item = content.get(each.path)
        if item is not None and each.what in ("written", "replaced"):
            for line in _lines(item):
                click.echo(f"    {line}".rstrip())
    for note in notes:
        click.echo(f"note: {note}", err=True)


def _lines(item: Item) -> list[str]:
    if item.target:
        return [f"-> {item.target}"]
    try:
        return item.data.decode("ascii" if item.mode & 0o111 else "utf-8").splitlines()
    except UnicodeDecodeError:
        return [f"({len(item.data)} bytes)"]


def _document(changes: Sequence[Change], notes: Sequence[str]) -> dict[str, Any]:
    return {
        "changes": [document(each) for each in changes],
        "notes": list(notes),
    }
