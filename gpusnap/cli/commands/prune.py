"""`gpusnap prune`: keep some checkpoints of each container by rules, and remove the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import convert_errors
from gpusnap.checkpoints.list import UNREAD
from gpusnap.checkpoints.locator import add_place, format_place, open_store
from gpusnap.cli import name_rows, store_tables
from gpusnap.cli import tables as show
from gpusnap.cli.commands.stores.upkeep import collect_store, collected_document, find_store
from gpusnap.cli.completion import complete_store
from gpusnap.cli.json_output import print_json
from gpusnap.cli.options.container_names import check_not_empty
from gpusnap.cli.options.keep_options import keep_options
from gpusnap.cli.options.keep_options import rules as rules_of
from gpusnap.oci.base.dataclass import asdict
from gpusnap.oci.base.errors import DiskFull
from gpusnap.retention.prune import Verdict
from gpusnap.retention.prune import prune as remove
from gpusnap.runtime_shim.base.errors import UsageError
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.base.units import human

# What is left out if there is no room, and the spaces between columns.
_LAYOUTS = (((), 2), (("created",), 2), (("created", "container"), 2))


@click.command()
@click.argument(
    "what", nargs=-1, metavar="[STORE] [NAME]...", callback=check_not_empty, shell_complete=complete_store
)
@keep_options
@click.option("--dry-run", is_flag=True, help="Print what would be removed without removing it.")
@click.option("--gc", "at_once", is_flag=True, help="Free the disk space immediately, as `gpusnap gc` does.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def prune(
    what: tuple[str, ...],
    dry_run: bool,
    at_once: bool,
    as_json: bool,
    **keep: Any,
) -> None:
    """Remove the checkpoints of each container that no rule keeps.

    STORE is oci:DIR; without it, this host's store. NAME is the name of a container, or of checkpoints, and
    may have * and ?; without it, all containers. At least one --keep rule is needed. The rules apply to each
    container separately, as in restic and borg, and a checkpoint is kept if at least one rule keeps it. A
    container is known by its name: one that was created anew, or one on another host that uses the same
    store, counts as the same. Hours without a checkpoint do not count. Days begin at midnight UTC, weeks on
    Monday.

    These are always kept: the newest checkpoint of a container, and the one that was added last to the store,
    which has an earlier date if the clock was set back; checkpoints that a restore or another command is
    reading; and a checkpoint with a name that is neither CONTAINER nor CONTAINER:TIME and does not match
    NAME, such as one from `gpusnap tag`. A NAME with * matches such a tag only if it has a colon, as in
    'server:old*'. A damaged checkpoint, whose manifest or a blob is missing or truncated, is ignored by the
    rules: it is reported, and kept until `gpusnap rm`. Blobs are not read; `gpusnap verify` does that.

    The referrers of a checkpoint, such as a signature, are removed with it. The blobs stay on disk until
    `gpusnap gc`. After that, Podman cannot restore the stopped container of a removed checkpoint either.

    As JSON: store, dryRun, checkpoints (each with digest, names, created, container, own, reasons, fault;
    without a reason, it is removed; fault is the damage), collected (null, or the output of `gpusnap gc`).
    """
    rules = rules_of(keep)
    if rules.is_empty():
        raise UsageError(
            "no rule says which checkpoints to keep, so nothing is removed",
            hint="give at least one, such as --keep-last 3 --keep-daily 7; gpusnap rm removes single "
            "checkpoints",
        )
    word = what[0] if what and what[0].startswith("oci:") else None
    names = what[1:] if word is not None else what
    if stores := [each for each in names if each.startswith("oci:")]:
        raise UsageError(
            f"{stores[0][:120]} is a store, which only the first word can be, so nothing is removed",
            hint="write it as gpusnap prune oci:DIR NAME; one call is for one store",
        )
    store = find_store(word)
    found: tuple[Verdict, ...] = ()
    with convert_errors(), Progress() as progress:
        progress.stage("reading the store")
        exists = word is not None or os.path.exists(store.path)  # this host's comes to be with the first one
        if exists:
            open_store(store, write=not dry_run)
            try:
                found = remove(store, rules, names, dry_run=dry_run)
            except DiskFull:
                if not at_once:
                    raise
                store.collect()  # what killed writers left may be all that the new index needs
                found = remove(store, rules, names, dry_run=dry_run)
    _warn(found, store.path)
    if not as_json:
        _say(found, store.path, names, dry_run=dry_run)
    collected = collect_store(store, dry_run=False) if at_once and exists and not dry_run else None
    if as_json:
        document = {
            "store": store.path,
            "dryRun": dry_run,
            "checkpoints": [asdict(each) for each in found],
            "collected": collected_document(store, collected, dry_run=False) if collected else None,
        }
        print_json(document)
        return
    if collected is not None:
        store_tables.print_collected(show.output(), store.path, collected, dry_run=False)
    elif not dry_run and any(each.goes for each in found):
        once = " when all others are complete" if any(each.fault for each in found) else ""
        show.say(show.output(), f"{add_place('gpusnap gc', store.path)} frees the space that they use{once}")


def _warn(found: Sequence[Verdict], path: str) -> None:
    """Name what is not whole."""
    for each in found:
        if each.fault:
            name = each.names[0] if each.names else store_tables.shorten_digest(each.digest)
            word = format_place(path, name)
            if each.fault.startswith(UNREAD):
                note(
                    f"the checkpoint {word} {each.fault}, so no rule applies to it and it is kept; run "
                    "gpusnap prune again when it can be read"
                )
                continue
            note(
                f"the checkpoint {word} is damaged, so no rule applies to it and it is kept: "
                f"{each.fault}; gpusnap verify {word} shows the damage, and gpusnap rm {word} removes it",
                code="GPS-601",
            )


def _say(found: Sequence[Verdict], path: str, names: Sequence[str], *, dry_run: bool) -> None:
    console = show.output()
    if not found:
        of = f" belongs to {' or '.join(names)}; gpusnap ls lists them" if names else ""
        show.say(console, f"no checkpoint in {path}{of}")
        return
    goes = "would go" if dry_run else "removed"
    cells = [
        {
            "container": each.container,
            "created": each.created[:16].replace("T", " "),
            "name": ", ".join(each.names) or "(no name)",
            "digest": store_tables.shorten_digest(each.digest),
            "": goes if each.goes else "kept",
            "because": ", ".join(each.reasons),
        }
        for each in found
    ]
    name_rows.print_rows(console, list(cells[0]), cells, layouts=_LAYOUTS)
    gone = [each for each in found if each.goes]
    verb = "would be removed" if dry_run else "removed"
    own = human(sum(each.own for each in gone))
    used = "are used" if dry_run else "were used"
    more = f"; {own} {used} by {'it' if len(gone) == 1 else 'them'} alone" if gone else ""
    show.say(console, f"{len(gone)} of {len(found)} checkpoints {verb} from {path}{more}")
