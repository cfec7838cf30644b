"""Options of `podman container checkpoint` and `restore` that gpusnap replaces: each says by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from gpusnap.runtime_shim.base.errors import UsageError

# podman-container-checkpoint(1): what gpusnap has no use for, and what does the same.
CHECKPOINT: Mapping[tuple[str, ...], tuple[bool, str, str]] = {
    ("-c", "--compress"): (
        True,
        "the file name of the archive determines its compression",
        "name it FILE.tar, FILE.tar.gz or FILE.tar.zst",
    ),
    ("--create-image",): (
        True,
        "gpusnap keeps checkpoints in a store, and creates no image in Podman's storage",
        "gpusnap push NAME REF --format podman creates such an image in a registry, for podman pull",
    ),
    ("-k", "--keep"): (
        False,
        "CRIU's logs are kept if a checkpoint fails, and there is nothing else to keep",
        "gpusnap inspect NAME shows the steps of a checkpoint; gpusnap --debug shows the commands",
    ),
    ("-P", "--pre-checkpoint"): (
        False,
        "gpusnap has no pre-checkpoints",
        "run gpusnap checkpoint --leave-running first: the next one writes only what has changed since",
    ),
    ("--with-previous",): (
        False,
        "each checkpoint in a store builds on earlier ones automatically, and is complete",
        "omit the option",
    ),
    ("--print-stats",): (
        False,
        "each checkpoint contains its statistics",
        "gpusnap inspect NAME shows them; add --json for scripts",
    ),
}
# podman-container-restore(1).
RESTORE: Mapping[tuple[str, ...], tuple[bool, str, str]] = {
    ("-a", "--all"): (
        False,
        "gpusnap restore takes checkpoints from a store, an archive or a registry",
        "name them; podman container restore --all restores the containers of which Podman has checkpoints",
    ),
    ("-l", "--latest"): (
        False,
        "gpusnap restore takes checkpoints from a store, an archive or a registry",
        "name one; gpusnap ls lists them",
    ),
    ("-k", "--keep"): (
        False,
        "gpusnap keeps a checkpoint when it is restored: it can be restored again",
        "omit the option; gpusnap --debug shows the commands",
    ),
    ("--import-previous",): (
        True,
        "each gpusnap checkpoint is complete, and needs no earlier one",
        "omit the option; for Podman's own archives: podman container restore --import-previous",
    ),
    ("--print-stats",): (
        False,
        "gpusnap restore prints the time that it took",
        "with --json, as the member seconds",
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
            raise UsageError(f"{name} is a Podman option: {says}", hint=instead)

    return refuse
