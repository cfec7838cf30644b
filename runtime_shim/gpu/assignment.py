"""The plan of a restore: onto which GPU of this host each GPU of a checkpoint goes, or why none fits.

A GPU of the checkpoint goes back to the one with the same UUID, or to one of the same model and compute
capability. That GPU must have as much free memory as the container used, must not be split (MIG), and must
not be in exclusive-process mode. The driver must not be older than the one of the checkpoint. Every GPU that
the container could see gets one of its own, unused ones too: the driver requires all of them in its list of
pairs (cuCheckpointProcessRestore). If a plan exists, it is found. Of several plans

1. only those count that follow the GPU map; of these the best one has
2. the most GPUs that keep their UUID,
3. the most free memory on its GPUs: the freest GPU of all if possible, then the next (of GPUs with the same
free memory, the one with the lower number), 4. the container's order: its first GPU on the lowest number of
these GPUs, then its second.

So the result is the same each time. The same UUID is the same GPU, whatever name a newer driver gives its
model, and may be in exclusive-process mode, because it served the container before. Only the driver decides
which models can replace each other, and it requires the same chip (CUDA driver API, checkpointing).

The content of the checkpoint is not trusted: its numbers only choose between this host's GPUs, and its texts
are shortened before they are shown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.base.units import format_shortage
from gpusnap.runtime_shim.gpu.api.driver import Gpu, Host
from gpusnap.runtime_shim.gpu.api.gpu_map import GpuMap, is_meant

_UPDATE = "update the driver here"
_MAP = "change the GPU map"
_WAIT = "wait for it to end, or run gpusnap recover if it was killed"
FREE = "stop the other programs on those GPUs"
_MODE = "turn MIG off, or set the compute mode to default (nvidia-smi)"
ELSEWHERE = "restore on a host that has such GPUs"
MORE = "give the new container as many GPUs as the old one had, of the same model"
_HINTS = (_UPDATE, _MAP, _WAIT, FREE, _MODE, MORE, ELSEWHERE)
"""The most useful hint comes first."""

_NOTHING: Mapping[str, int] = MappingProxyType({})


class WantedGpu(Protocol):
    """A GPU as the checkpoint describes it; no two of a checkpoint have the same UUID."""

    @property
    def uuid(self) -> str: ...
    @property
    def minor(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def compute_capability(self) -> str: ...
    @property
    def memory_used(self) -> int:
        """Bytes that the container needs there; 0 if it only sees the GPU."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one GPU of the checkpoint could go to one of this host, considered alone."""

    wanted: str
    """UUID in the checkpoint."""
    gpu: str
    """UUID on this host."""
    reason: str
    """Why not, as a short clause; empty if it fits."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The new GPUs of a checkpoint: either there are pairs or there is a refusal."""

    pairs: tuple[tuple[str, str], ...]
    """(old UUID, new UUID) of every GPU of the checkpoint, in the order of their numbers there."""
    verdicts: tuple[Verdict, ...]
    """For every GPU of the checkpoint with every GPU here, both in the order of their numbers."""
    refusal: str = ""
    """One sentence; empty if the checkpoint can be restored."""
    hint: str = ""
    why: str = ""
    """Why this host's GPUs do not fit, in one line; empty if the refusal says everything."""
    code: str = ""
    """The code of the refusal, such as GPS-401."""

    def make_refusal(self) -> Refused:
        """Return the refusal as an error: the sentence in the first line, this host's GPUs after it."""
        said = f"{self.refusal}:\n{self.why}" if self.why else self.refusal
        return Refused(said, hint=self.hint, code=self.code)


class _Misfit(NamedTuple):
    reason: str
    hint: str


class _Words(NamedTuple):
    """How a refusal names the owner of the GPUs: a checkpoint, or a suspended container."""

    container: str
    """Empty for a checkpoint."""
    whose: str
    made: str
    not_given: _Misfit


def _words(container: str) -> _Words:
    if not container:
        given = _Misfit("not among the GPUs of the new container", MORE)
        return _Words("", "the checkpoint", "the checkpoint was made", given)
    name = f"container {container}"
    return _Words(container, name, f"{name} was suspended", _Misfit(f"{name} cannot see it", MORE))


class _Impossible(Exception):
    """There is no plan."""

    def __init__(self, sentence: str, hint: str, why: str = "", *, code: str) -> None:
        super().__init__(sentence)
        self.hint = hint
        self.why = why
        self.code = code


# For each GPU of the checkpoint, the reason against each GPU of this host, None if there is none.
_Misfits = Sequence[Sequence[_Misfit | None]]


def plan_assignment(
    wanted: Iterable[WantedGpu],
    made_with: str,
    host: Host,
    *,
    request: GpuMap = (),
    reserved: Mapping[str, int] = _NOTHING,
    lenient: bool = False,
    given: Collection[str] | None = None,
    suspended: str = "",
) -> Plan:
    """Return pairs for the GPUs of a checkpoint that driver `made_with` made, or a refusal; never raise it.

    `reserved`: bytes by UUID that other restores and checkpoints have claimed. `lenient`: ignore parts of
    `request` for GPUs that the checkpoint does not have, as a map for all containers requires. `given`: the
    UUIDs of the only GPUs that the container may have; None if it may have any. `suspended`: the name of the
    suspended container whose GPUs they are, for the refusal; empty for a checkpoint.
    """
    words = _words(suspended)
    theirs = sorted(wanted, key=lambda gpu: (gpu.index, gpu.uuid))
    ours = sorted(host.gpus, key=lambda gpu: gpu.index)
    older = _find_older(host.driver_version, made_with, words)
    misfits = [
        [older or _not_given(new, given, words) or _misfit(old, new, reserved) for new in ours]
        for old in theirs
    ]
    verdicts = tuple(
        Verdict(old.uuid, new.uuid, misfit.reason if misfit else "")
        for old, row in zip(theirs, misfits, strict=True)
        for new, misfit in zip(ours, row, strict=True)
    )
    try:
        if older is not None:
            made = _make_printable(made_with)
            raise _Impossible(
                f"{words.made} with driver {made}, but this host has the older driver {host.driver_version}",
                older.hint,
                code="GPS-402",
            )
        asked = _match_request(theirs, ours, request, lenient, words.whose)
        rest = _add_request_misfits(theirs, ours, misfits, asked, words.whose)
        chosen = _choose(theirs, ours, rest, reserved, words)
    except _Impossible as error:
        return Plan((), verdicts, str(error), error.hint, error.why, error.code)
    return Plan(tuple((old.uuid, ours[at].uuid) for old, at in zip(theirs, chosen, strict=True)), verdicts)


def _find_older(here: str, made_with: str, words: _Words) -> _Misfit | None:
    if _version(here) >= _version(made_with):
        return None
    return _Misfit(f"driver {here} is older than {words.whose}'s {_make_printable(made_with)}", _UPDATE)


def _version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version; 580.95 is 580.95.0. A checkpoint's may be any text."""
    numbers = [int(part) if part.isascii() and part.isdigit() else 0 for part in text.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _make_printable(text: str) -> str:
    """Make a text of the checkpoint safe to show."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= 64 else text[:63] + "…"


def _free(gpu: Gpu, reserved: Mapping[str, int]) -> int:
    # Reserved memory may be in use by now, and is then counted twice.
    return max(0, gpu.memory_total - gpu.memory_used - reserved.get(gpu.uuid, 0))


def _not_given(new: Gpu, given: Collection[str] | None, words: _Words) -> _Misfit | None:
    if given is None or new.uuid in given:
        return None
    return words.not_given


def _misfit(old: WantedGpu, new: Gpu, reserved: Mapping[str, int]) -> _Misfit | None:
    """Return why a GPU of the checkpoint cannot go to a GPU of this host, considered alone."""
    same = old.uuid == new.uuid
    if not same and new.model != old.model:
        return _Misfit(f"another model: {new.model}", ELSEWHERE)
    if not same and new.compute_capability != old.compute_capability:
        had, needed = new.compute_capability, old.compute_capability
        return _Misfit(f"compute capability {had}, needs {_make_printable(needed)}", ELSEWHERE)
    if new.mig:
        return _Misfit("in MIG mode", _MODE)
    busy = reserved.get(new.uuid, 0) > 0
    if new.compute_mode == "prohibited" or (new.compute_mode == "exclusive-process" and not same):
        return _Misfit(f"in {new.compute_mode} mode", _MODE)
    if new.compute_mode == "exclusive-process" and busy:
        return _Misfit("reserved by another restore or checkpoint", _WAIT)
    if _free(new, reserved) >= old.memory_used:
        return None
    if busy and _free(new, _NOTHING) >= old.memory_used:
        return _Misfit("reserved by another restore or checkpoint", _WAIT)
    return _Misfit(format_shortage(_free(new, reserved), old.memory_used), FREE)


def _names(indices: Iterable[int]) -> str:
    """Format numbers of GPUs: GPU 0, 2 and 4 to 7."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][-1] + 1 == index:
            runs[-1].append(index)
        else:
            runs.append([index])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    return "GPU " + " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


# What the GPU map asks for.


def _match_request(
    theirs: Sequence[WantedGpu], ours: Sequence[Gpu], request: GpuMap, lenient: bool, whole: str
) -> dict[int, int]:
    """Return the position in `ours` by position in `theirs`."""
    asked: dict[int, int] = {}
    words: dict[int, tuple[str, str]] = {}
    for source, target in request:
        old = _find_meant(source, theirs, whole)
        if old is None and lenient:
            continue
        new = _find_meant(target, ours, "this host")
        for word, found, whose in ((source, old, whole), (target, new, "this host")):
            if found is None:
                have = theirs if found is old else ours
                numbers = f"has {_names(gpu.index for gpu in have)}" if have else "has none"
                raise _Impossible(
                    f"the GPU map names GPU {word} of {whose}, which {numbers}", _MAP, code="GPS-403"
                )
        assert old is not None
        assert new is not None
        if old in asked:
            twice = f"{words[old][0]} and {source} are the same GPU of {whole}"
            raise _Impossible(f"the GPU map gives one GPU two destinations: {twice}", _MAP, code="GPS-403")
        for other, taken in asked.items():
            if taken == new:
                twice = f"{words[other][1]} and {target} are the same GPU of this host"
                raise _Impossible(
                    f"the GPU map gives one destination to two GPUs: {twice}", _MAP, code="GPS-403"
                )
        asked[old], words[old] = new, (source, target)
    return asked


def _find_meant(word: str, gpus: Sequence[WantedGpu] | Sequence[Gpu], whose: str) -> int | None:
    found = [at for at, gpu in enumerate(gpus) if is_meant(word, gpu.index, gpu.uuid)]
    if len(found) > 1:
        raise _Impossible(
            f"{word} in the GPU map is ambiguous: {len(found)} GPUs of {whose} match",
            "give more of the UUID",
            code="GPS-403",
        )
    return found[0] if found else None


def _add_request_misfits(
    theirs: Sequence[WantedGpu], ours: Sequence[Gpu], misfits: _Misfits, asked: Mapping[int, int], whole: str
) -> list[list[_Misfit | None]]:
    """Return the misfits plus what the GPU map excludes, for the GPUs that it names and all others."""
    owners = {new: old for old, new in asked.items()}
    rest = [list(row) for row in misfits]
    for old, row in enumerate(rest):
        if (misfit := row[asked[old]] if old in asked else None) is not None:
            raise _Impossible(
                f"GPU {theirs[old].index} of {whole} cannot move to GPU {ours[asked[old]].index} of this "
                f"host, as requested by the GPU map: {misfit.reason}",
                _MAP,
                code="GPS-403",
            )
        for new in range(len(ours)):
            if old in asked and new != asked[old]:
                row[new] = _Misfit("the GPU map assigns another one", _MAP)
            elif owners.get(new, old) != old:
                row[new] = _Misfit(f"the GPU map assigns it to GPU {theirs[owners[new]].index}", _MAP)
    return rest


# The choice: an assignment of least cost, where the cost of a pair combines all rules of the module's
# docstring.


def _choose(
    theirs: Sequence[WantedGpu],
    ours: Sequence[Gpu],
    misfits: _Misfits,
    reserved: Mapping[str, int],
    words: _Words,
) -> list[int]:
    """Return for each of `theirs` the position in `ours`. Raises _Impossible."""
    count, places = len(theirs), len(ours)
    lost = next((at for at, row in enumerate(misfits) if all(row)), None)
    needs = f"{words.whose} needs {count} GPU{'s' if count > 1 else ''}, but this host has"
    if places == 0 < count:
        raise _Impossible(f"{needs} none", ELSEWHERE, code="GPS-401")
    if lost is not None:
        raise _make_too_few_error(theirs, ours, misfits, [lost], [], words)
    if count > places:
        raise _Impossible(f"{needs} {places}", ELSEWHERE, code="GPS-401")
    freest = sorted(range(places), key=lambda at: (-_free(ours[at], reserved), at))
    # Each rule outweighs the sum of all rules after it. The freest GPU is worth more than all others
    # together, and so is the place of the container's first GPU.
    order = places**count
    uuid = order << places
    never = uuid * 2 * (count + 2)
    worth = {at: order << (places - 1 - rank) for rank, at in enumerate(freest)}
    costs = [[never if misfit else -worth[at] for at, misfit in enumerate(row)] for row in misfits]
    for number, old in enumerate(theirs):
        step = places ** (count - 1 - number)
        for at, new in enumerate(ours):
            costs[number][at] += at * step - (uuid if old.uuid == new.uuid else 0)
    chosen = _find_cheapest(costs, places)
    left = next((at for at, place in enumerate(chosen) if misfits[at][place]), None)
    if left is not None:
        raise _make_too_few_error(theirs, ours, misfits, *_contenders(misfits, chosen, left), words)
    return chosen


def _find_cheapest(costs: Sequence[Sequence[int]], places: int) -> list[int]:
    """Return a column for each row, none twice, with the least sum of costs; rows <= columns.

    The Hungarian method. Rows are added one by one; each takes the column that the cheapest chain of moves
    frees. Prices on rows and columns keep every cost, minus its two prices, at or above 0, so that Dijkstra's
    algorithm finds the cheapest chain.
    """
    row_price = [0] * len(costs)
    column_price = [0] * places
    owner: list[int | None] = [None] * places
    for new in range(len(costs)):
        reach = [cost - price for cost, price in zip(costs[new], column_price, strict=True)]
        before: list[int | None] = [None] * places
        unseen, seen = set(range(places)), []
        while True:
            nearest = min(unseen, key=lambda at: (reach[at], at))
            unseen.remove(nearest)
            row = owner[nearest]
            if row is None:
                break
            seen.append(nearest)
            base = reach[nearest] - row_price[row]
            for at in unseen:
                if (through := base + costs[row][at] - column_price[at]) < reach[at]:
                    reach[at], before[at] = through, nearest
        row_price[new] += reach[nearest]
        for at in seen:
            gain = reach[nearest] - reach[at]
            row_price[owner[at] or 0] += gain
            column_price[at] -= gain
        end: int | None = nearest
        while end is not None:
            previous = before[end]
            owner[end] = new if previous is None else owner[previous]
            end = previous
    return [owner.index(row) for row in range(len(costs))]


def _contenders(misfits: _Misfits, chosen: Sequence[int], left: int) -> tuple[list[int], list[int]]:
    """Return GPUs of the checkpoint, including `left`, that fit only onto too few GPUs, and these GPUs."""
    holders = {place: at for at, place in enumerate(chosen) if not misfits[at][place]}
    rivals, places = [left], set[int]()
    for rival in rivals:
        for place, misfit in enumerate(misfits[rival]):
            if misfit is None and place not in places:
                places.add(place)
                rivals.append(holders[place])
    return sorted(rivals), sorted(places)


def _make_too_few_error(
    theirs: Sequence[WantedGpu],
    ours: Sequence[Gpu],
    misfits: _Misfits,
    rivals: Sequence[int],
    places: Sequence[int],
    words: _Words,
) -> _Impossible:
    """The refusal if `rivals` fit only onto `places`, which are fewer."""
    # If the one that needs least does not fit, the others do not either.
    least = min(rivals, key=lambda at: theirs[at].memory_used)
    if places:
        names, here = _names(theirs[at].index for at in rivals), _names(ours[at].index for at in places)
        fits = "fits" if len(places) == 1 else "fit"
        sentence = f"{names} of {words.whose} need {len(rivals)} GPUs of this host, but only {here} {fits}"
    else:
        gpu = theirs[least]
        model = _make_printable(gpu.model)
        if words.container:
            sentence = f"no GPU that container {words.container} can see fits its GPU {gpu.index} ({model})"
        else:
            sentence = f"no GPU of this host fits GPU {gpu.index} of the checkpoint ({model})"
    indices: dict[str, list[int]] = {}
    hints = {ELSEWHERE}
    for at, misfit in enumerate(misfits[least]):
        if misfit is not None and at not in places:
            indices.setdefault(misfit.reason, []).append(ours[at].index)
            hints.add(misfit.hint)
    if words.container and not places and len(indices) > 1:
        indices.pop(words.not_given.reason, None)  # the sentence already says this
    why = "; ".join(f"{_names(numbers)}: {reason}" for reason, numbers in indices.items())
    return _Impossible(sentence, min(hints, key=_HINTS.index), why, code="GPS-401")
