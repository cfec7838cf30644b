"""`gpusnap prune`: removes from a store the checkpoints of each container that no rule keeps.

Only gpusnap's checkpoints are considered: not the memory of one whose records Podman has, and nothing of
other tools. An incomplete one, with a manifest or a blob that is missing or has the wrong size, counts for no
rule and is kept: no complete one is removed because of it, and its missing parts may exist elsewhere. A
checkpoint with a name that is not a default of `gpusnap checkpoint` is kept, because somebody gave it that
name. Also kept are checkpoints that another process reads, such as a restore, that of an unfinished
migration, and those dated in the future, by a wrong clock or by somebody else: as the newest one, it would
replace all others. The one that was added last to the store is kept as well: if the clock was set back, older
ones have later dates.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from gpusnap.checkpoints.list import UNREAD, Row, list_named, listing
from gpusnap.checkpoints.names import container_name, is_time
from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.store.store import Store
from gpusnap.oci.store.tags import CLOCKS, moment
from gpusnap.retention.rules import Candidate, Rules, decide

_NOT_WHOLE = "not whole"
_NOT_READ = "not readable"

_IN_USE = ("in use",)
# How many checkpoints are removed with one change of the index. A file is open for each.
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is done with a checkpoint, and why; without a reason it is removed."""

    digest: str
    names: tuple[str, ...]
    created: str
    container: str
    own: int
    """Bytes of the blobs that nothing else in the store uses."""
    reasons: tuple[str, ...]
    fault: str = ""
    """What is missing in an incomplete one."""

    @property
    def goes(self) -> bool:
        """Return whether it is removed."""
        return not self.reasons


def prune(
    store: Store, rules: Rules, names: Sequence[str] = (), *, dry_run: bool = False
) -> tuple[Verdict, ...]:
    """Remove checkpoints that no rule keeps from the store's index; return all verdicts, the oldest first.

    names: patterns; see `is_of`. For each container separately, only matching checkpoints count. Raises
    LayoutError, StoreBusy, DiskFull, DiskError.
    """
    verdicts = plan_prune(_rows(store), rules, names, added=[each.root.digest for each in list_named(store)])
    if dry_run:
        held = store.list_held()
        return tuple(
            replace(each, reasons=_IN_USE) if each.goes and each.digest in held else each for each in verdicts
        )
    going = [(each.digest, each.names) for each in verdicts if each.goes]
    gone = set[str]()
    for at in range(0, len(going), _AT_ONCE):
        gone |= _remove_checkpoints(store, dict(going[at : at + _AT_ONCE]))
    return tuple(
        replace(each, reasons=_IN_USE) if each.goes and each.digest not in gone else each for each in verdicts
    )


def _rows(store: Store) -> tuple[Row, ...]:
    """Return the rows of a store, without those that were removed meanwhile and may lack blobs."""
    rows = listing(store, look_for_blobs=True).rows
    if not any(row.fault for row in rows):
        return rows
    left = {entry.descriptor.digest for entry in store.entries()}
    return tuple(row for row in rows if row.digest in left)


def plan_prune(
    rows: Iterable[Row], rules: Rules, names: Sequence[str] = (), *, added: Sequence[str] = ()
) -> tuple[Verdict, ...]:
    """Apply the rules to the rows of a store; removes nothing. `added`: its digests, the last added last."""
    now = datetime.now(UTC)
    order = {digest: place for place, digest in enumerate(added)}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.kind in ("checkpoint", "damaged") and is_of(row, names):
            groups.setdefault(container_of(row), []).append(row)
    found: list[Verdict] = []
    for container, members in sorted(groups.items()):
        protected = {row.digest: _explain_protected(row, names) for row in members}
        candidates: list[Candidate] = []
        uncounted: dict[str, tuple[str, ...]] = {}
        for row in members:
            time = time_of(row)
            if row.fault:
                why = _NOT_READ if row.fault.startswith(UNREAD) else _NOT_WHOLE
                protected[row.digest] = (why, *protected[row.digest])
            elif time is None:
                uncounted[row.digest] = ("age unknown",)
            elif time > now + CLOCKS:
                uncounted[row.digest] = ("dated in the future",)
            elif not protected[row.digest]:
                candidates.append(Candidate(row.digest, time, row.labels))
        decided = decide(candidates, rules, now)
        last = max(decided, key=lambda digest: order.get(digest, -1), default="")
        if last and not decided[last]:
            decided[last] = ("added last",)
        kept = {**uncounted, **decided}
        found += [
            Verdict(
                row.digest,
                row.names,
                row.created,
                container,
                row.own,
                protected[row.digest] or kept[row.digest],
                row.fault,
            )
            for row in members
        ]
    return tuple(found)


def container_of(row: Row) -> str:
    """Return the name of a row's container, or its ID; if its manifest is missing, from its own name."""
    if row.kind == "damaged" and not row.container:
        stems = [stem for stem, _, tag in (name.rpartition(":") for name in row.names) if is_time(tag)]
        return stems[0] if stems else ""
    return row.container or row.container_id[:12]


def time_of(row: Row) -> datetime | None:
    """Return when it was made; None if unknown, or without a time zone."""
    with suppress(ValueError):
        if datetime.fromisoformat(row.created).tzinfo is not None:
            return moment(row.created)
    return None


def is_of(row: Row, names: Sequence[str]) -> bool:
    """Return whether a row matches one of these fnmatch patterns; true if there are none.

    A pattern applies to the container's name, or to a name of the checkpoint.
    """
    own = (container_of(row), *row.names)
    return not names or any(fnmatch.fnmatchcase(name, pattern) for name in own for pattern in names)


def _explain_protected(row: Row, patterns: Sequence[str]) -> tuple[str, ...]:
    """Say why a row is kept regardless of the rules: a migration's container, or a name that somebody gave.

    Such a name is neither NAME or NAME:TIME of its container, nor does a pattern match it. A pattern without
    a colon matches no tag of the container's: w* does not match w:golden.
    """
    called = {container_of(row), container_name(row.container, row.container_id)} - {""}

    def belongs(name: str) -> bool:
        stem, _, tag = name.rpartition(":")
        if name in called or (stem in called and is_time(tag)):
            return True
        fitting = [each for each in patterns if ":" in each or stem not in called]
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in fitting)

    reasons = [f"may run on {row.migrating}"] if row.migrating else []
    return (*reasons, *(f"has the name {name}" for name in row.names if not belongs(name)))


def _remove_checkpoints(store: Store, wanted: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Remove digests with these names, and their referrers, from the index; return them.

    Those that somebody reads, or has named meanwhile, stay.
    """
    gone = store.remove_unused(wanted)
    store.remove_referrers(*gone)
    return gone
