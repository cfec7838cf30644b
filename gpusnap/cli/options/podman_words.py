"""Options of `podman container checkpoint` and `restore` that gpusnap does otherwise: each says how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from gpusnap.runtime_shim.errors import UsageError

# podman-container-checkpoint(1): what gpusnap has no use for, and what does the same.
CHECKPOINT: Mapping[tuple[str, ...], tuple[bool, str, str]] = {
    ("-c", "--compress"): (
        True,
        "the name of the archive says how it is compressed",
        "name it FILE.tar, FILE.tar.gz or FILE.tar.zst",
    ),
    ("--create-image",): (
        True,
        "gpusnap keeps checkpoints in a store and makes no image in Podman's storage",
        "gpusnap push NAME REF --format podman makes such an image in a registry, for podman pull",
    ),
    ("-k", "--keep"): (
        False,
        "CRIU's logs are kept where a checkpoint fails, and there is nothing else to keep",
        "gpusnap inspect NAME shows the steps of a checkpoint; gpusnap --debug shows what is run",
    ),
    ("-P", "--pre-checkpoint"): (
        False,
        "gpusnap has no checkpoint of memory alone",
        "run gpusnap checkpoint --leave-running before: the next one writes only what has changed since",
    ),
    ("--with-previous",): (
        False,
        "each checkpoint in a store builds on the earlier ones by itself, and is whole",
        "leave the option out",
    ),
    ("--print-stats",): (
        False,
        "a checkpoint has its own statistics",
        "gpusnap inspect NAME shows them, with --json for programs",
    ),
}
# podman-container-restore(1).
RESTORE: Mapping[tuple[str, ...], tuple[bool, str, str]] = {
    ("-a", "--all"): (
        False,
        "gpusnap restore takes checkpoints from a store, an archive or a registry",
        "name them; podman container restore --all restores the containers that Podman has checkpoints of",
    ),
    ("-l", "--latest"): (
        False,
        "gpusnap restore takes checkpoints from a store, an archive or a registry",
        "name one; gpusnap ls lists them",
    ),
    ("-k", "--keep"): (
        False,
        "gpusnap never uses a checkpoint up: it can be restored again",
        "leave the option out; gpusnap --debug shows what is run",
    ),
    ("--import-previous",): (
        True,
        "each checkpoint of gpusnap is whole, and needs no earlier one",
        "leave the option out; for Podman's own archives: podman container restore --import-previous",
    ),
    ("--print-stats",): (
        False,
        "gpusnap restore prints the time that it took",
        "with --json as the member seconds",
    ),
}


def refuse_options(table: Mapping[tuple[str, ...], tuple[bool, str, str]]) -> Callable[[Any], Any]:
    """A decorator for a command: these options are known, not shown, and refused with what to do instead."""

    def decorate(command: Any) -> Any:
        for names, (takes_value, says, instead) in table.items():
            option = click.option(
                *names,
                is_flag=not takes_value,
                hidden=True,
                expose_value=False,
                callback=_refusal(names[-1], says, instead),
            )
            command = option(command)
        return command

    return decorate


def _refusal(name: str, says: str, instead: str) -> Callable[[click.Context, click.Parameter, object], None]:
    def refuse(ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value and not ctx.resilient_parsing:
            raise UsageError(f"{name} is an option of Podman's: {says}", hint=instead)

    return refuse
