"""The plan: which GPU of a checkpoint goes where; a way is found where there is one, else it says why not."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusnap.runtime_shim.base.errors import Refused, split_code
from gpusnap.runtime_shim.gpu.api.driver import Gpu, Host
from gpusnap.runtime_shim.gpu.api.gpu_map import GpuMap, parse_map
from gpusnap.runtime_shim.gpu.assignment import Plan, Verdict, plan_assignment
from gpusnap.runtime_shim.records.manifest import GpuRecord

MADE_WITH = "580.159.04"
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
GIB = 1 << 30
MIB = 1 << 20


def uuid(letter: str) -> str:
    """A UUID that begins with four of the same hexadecimal digit."""
    return f"GPU-{letter * 4}0000-0000-4000-8000-000000000000"


def old(index: int, letter: str, used: int = 12 * GIB) -> GpuRecord:
    """A GPU of the checkpoint."""
    return GpuRecord(uuid(letter), index, index, H100, "9.0", 80 * GIB, used)


def new(index: int, letter: str, free: int = 80 * GIB, model: str = H100) -> Gpu:
    """A GPU of this host."""
    return Gpu(uuid(letter), index, index, model, "9.0", 80 * GIB, 80 * GIB - free, False, "default")


def a_host(*gpus: Gpu, version: str = MADE_WITH) -> Host:
    """A host with these GPUs."""
    return Host("nvidia", version, "13.0", gpus)


def moves(found: Plan) -> str:
    """The pairs by the UUIDs' letters: "ab" is from a to b."""
    return " ".join(f"{left[4]}{right[4]}" for left, right in found.pairs)


def reasons(found: Plan) -> list[str]:
    """The verdicts' reasons."""
    return [verdict.reason for verdict in found.verdicts]


def message(found: Plan) -> str:
    """What a user sees of a refusal."""
    assert found.pairs == ()
    error = found.make_refusal()
    assert isinstance(error, Refused)
    assert str(error).splitlines()[0].rstrip(":") == found.refusal
    said, code = split_code(error.sentence())
    assert code == found.code
    assert code in ("GPS-401", "GPS-402", "GPS-403")
    return said


def test_only_what_is_given() -> None:
    """Neither the same GPU nor the freest counts where the container may not have it; none given is none."""
    host = a_host(new(0, "a"), new(1, "b"), new(2, "c", free=20 * GIB))
    wanted = [old(0, "a")]
    assert moves(plan_assignment(wanted, MADE_WITH, host)) == "aa"
    assert moves(plan_assignment(wanted, MADE_WITH, host, given={uuid("c")})) == "ac"
    assert "not among the GPUs" in message(plan_assignment(wanted, MADE_WITH, host, given=()))


# One GPU and one GPU.


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (new(3, "b"), ""),
        (new(3, "b", free=12 * GIB), ""),
        (new(3, "b", model=A100), f"another model: {A100}"),
        (replace(new(3, "b"), compute_capability="8.0"), "compute capability 8.0, needs 9.0"),
        (new(3, "b", free=3 * GIB + 100 * MIB), "3.0 GiB free, 12.0 GiB needed"),
        (new(3, "b", free=12 * GIB - 1), "11.9 GiB free, 12.0 GiB needed"),
        (new(3, "b", free=-GIB), "0.0 GiB free, 12.0 GiB needed"),
        (replace(new(3, "b"), mig=True), "in MIG mode"),
        (replace(new(3, "b"), compute_mode="exclusive-process"), "in exclusive-process mode"),
        (replace(new(3, "b"), compute_mode="prohibited"), "in prohibited mode"),
        (replace(new(3, "a"), mig=True), "in MIG mode"),
        (replace(new(3, "a"), compute_mode="exclusive-process"), ""),
        (replace(new(3, "a"), compute_mode="prohibited"), "in prohibited mode"),
        (new(3, "a", free=11 * GIB), "11.0 GiB free, 12.0 GiB needed"),
        (replace(new(3, "a"), model="NVIDIA H100 by a new name"), ""),
        (replace(new(3, "b"), memory_total=40 * GIB, memory_used=0), ""),
    ],
)
def test_one_gpu(gpu: Gpu, reason: str) -> None:
    """Each rule: a GPU takes the place of another one, or says in a clause why not."""
    found = plan_assignment([old(0, "a")], MADE_WITH, a_host(gpu))
    assert found.verdicts == (Verdict(uuid("a"), gpu.uuid, reason),)
    assert found.pairs == (() if reason else ((uuid("a"), gpu.uuid),))
    assert bool(found.refusal) == bool(reason)
    if reason:
        assert message(found).startswith(
            f"no GPU of this host fits GPU 0 of the checkpoint ({H100}): GPU 3: {reason}; "
        )


@pytest.mark.parametrize(
    ("here", "made_with", "older"),
    [
        ("580.159.04", "580.159.04", False),
        ("580.159.4", "580.159.04", False),
        ("580.159.05", "580.159.04", False),
        ("590.1", "580.159.04", False),
        ("580.159.04", "580.95.05", False),
        ("580.95.05", "580.159.04", True),
        ("580.159", "580.159.04", True),
        ("580.159", "580.159.00", False),
        ("570.999.99", "580.0", True),
        ("580.159.04", "", False),
        ("580.159.04", "²", False),
        ("580.159.04", "9" * 256, True),
    ],
)
def test_driver(here: str, made_with: str, older: bool) -> None:
    """A driver as new or newer will do; versions are compared number by number."""
    found = plan_assignment([old(0, "a")], made_with, a_host(new(0, "a"), new(1, "b"), version=here))
    assert bool(found.refusal) == older
    assert len(found.pairs) == (0 if older else 1)


def test_older_driver() -> None:
    """With an older driver nothing fits, and the refusal says both versions and what to do."""
    found = plan_assignment([old(0, "a")], MADE_WITH, a_host(new(0, "a"), new(1, "b"), version="570.86.10"))
    assert reasons(found) == ["driver 570.86.10 is older than the checkpoint's 580.159.04"] * 2
    assert message(found) == (
        "the checkpoint was made with driver 580.159.04, but this host has the older driver "
        "570.86.10; update the driver here"
    )
    assert found.code == "GPS-402"


def test_words_of_the_checkpoint() -> None:
    """What a checkpoint says is cut short, and nothing in it reaches the terminal as a command."""
    record = replace(old(0, "a"), model="\x1b[2J" + "x" * 200)
    found = plan_assignment([record], "999\n" + "9" * 200, a_host(new(0, "b")))
    assert "\x1b" not in message(found)
    found = plan_assignment([record], MADE_WITH, a_host(new(0, "b")))
    assert "?[2Jxxx" in message(found)
    assert len(found.refusal) < 150
    found = plan_assignment([record], MADE_WITH + "\n." + "9" * 200, a_host(new(0, "b")))
    assert "\n" not in found.refusal
    assert len(found.refusal) < 200


def test_reserved() -> None:
    """What another restore has claimed is not free, for the same UUID neither."""
    host = a_host(new(0, "a", free=20 * GIB), new(1, "b", free=20 * GIB))
    both = {uuid("a"): 10 * GIB, uuid("b"): 10 * GIB}
    assert moves(plan_assignment([old(0, "a")], MADE_WITH, host, reserved={uuid("a"): 8 * GIB})) == "aa"
    assert moves(plan_assignment([old(0, "a")], MADE_WITH, host, reserved={uuid("a"): 10 * GIB})) == "ab"
    found = plan_assignment([old(0, "a")], MADE_WITH, host, reserved=both)
    assert reasons(found) == ["reserved by another restore or checkpoint"] * 2
    assert message(found).endswith(
        "GPU 0 and 1: reserved by another restore or checkpoint; wait for it to end, or run "
        "gpusnap recover if it was killed"
    )
    found = plan_assignment([old(0, "a", used=30 * GIB)], MADE_WITH, host, reserved=both)
    assert reasons(found) == ["10.0 GiB free, 30.0 GiB needed"] * 2


def test_reserved_exclusive() -> None:
    """A GPU for one process alone, which another restore is about to fill, is taken."""
    host = a_host(replace(new(0, "a"), compute_mode="exclusive-process"))
    assert reasons(plan_assignment([old(0, "a")], MADE_WITH, host, reserved={uuid("a"): 1})) == [
        "reserved by another restore or checkpoint"
    ]
    assert moves(plan_assignment([old(0, "a")], MADE_WITH, host, reserved={uuid("a"): 0})) == "aa"


def test_unused() -> None:
    """A GPU that the container only sees needs no memory, but a place of its own and of the same kind."""
    wanted = [old(0, "a"), old(1, "b", used=0)]
    full = new(1, "d", free=0)
    assert moves(plan_assignment(wanted, MADE_WITH, a_host(new(0, "c"), full))) == "ac bd"
    assert (
        moves(plan_assignment(wanted, MADE_WITH, a_host(new(0, "c"), full), reserved={uuid("d"): GIB}))
        == "ac bd"
    )
    found = plan_assignment(wanted, MADE_WITH, a_host(new(0, "c"), new(1, "d", model=A100)))
    assert "GPU 0 and 1 of the checkpoint need 2 GPUs of this host, but only GPU 0 fits" in message(found)


# The choice among several ways.


def test_same_uuids() -> None:
    """A GPU keeps its UUID where it can, be others freer and the numbers what they are."""
    wanted = [old(0, "a"), old(1, "b")]
    host = a_host(new(0, "c"), new(1, "b", free=13 * GIB), new(2, "a", free=13 * GIB), new(3, "d"))
    assert moves(plan_assignment(wanted, MADE_WITH, host)) == "aa bb"
    full = a_host(new(0, "c"), new(1, "b", free=13 * GIB), new(2, "a", free=11 * GIB), new(3, "d"))
    assert moves(plan_assignment(wanted, MADE_WITH, full)) == "ac bb"


def test_a_same_uuid_is_given_up() -> None:
    """Where the one that could stay is in the only place for another, it moves."""
    wanted = [old(0, "a", used=GIB), old(1, "b", used=40 * GIB)]
    host = a_host(new(0, "a"), new(1, "c", free=2 * GIB))
    assert moves(plan_assignment(wanted, MADE_WITH, host)) == "ac ba"


def test_the_freest() -> None:
    """Of other GPUs the freest are taken, the lower number of equals; what is reserved is not free."""
    host = a_host(new(0, "c", free=60 * GIB), new(1, "d", free=70 * GIB), new(2, "e", free=70 * GIB))
    assert moves(plan_assignment([old(0, "a")], MADE_WITH, host)) == "ad"
    assert moves(plan_assignment([old(0, "a")], MADE_WITH, host, reserved={uuid("d"): GIB})) == "ae"
    assert moves(plan_assignment([old(0, "a"), old(1, "b")], MADE_WITH, host)) == "ad be"
    assert (
        moves(plan_assignment([old(0, "a"), old(1, "b")], MADE_WITH, host, reserved={uuid("d"): 11 * GIB}))
        == "ac be"
    )


def test_order() -> None:
    """The container's first GPU goes to the lowest number of those taken, if it fits there."""
    host = a_host(new(0, "c", free=50 * GIB), new(1, "d", free=60 * GIB), new(2, "e", free=70 * GIB))
    wanted = [old(5, "b"), old(2, "a")]
    assert moves(plan_assignment(wanted, MADE_WITH, host)) == "ad be"
    assert (
        moves(plan_assignment([replace(wanted[1], memory_used=65 * GIB), wanted[0]], MADE_WITH, host))
        == "ae bd"
    )
    assert moves(plan_assignment(wanted, MADE_WITH, replace(host, gpus=host.gpus[::-1]))) == "ad be"


def test_nothing_wanted() -> None:
    """A checkpoint without GPUs needs none."""
    found = plan_assignment([], MADE_WITH, a_host())
    assert (found.pairs, found.verdicts, found.refusal) == ((), (), "")


# What the GPU map asks for.

FOUR = a_host(new(0, "c"), new(1, "d"), new(2, "a"), new(3, "b"))
TWO = [old(0, "a"), old(1, "b")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "aa bb"),
        ("0=3,1=2", "ab ba"),
        ("1=0", "aa bc"),
        ("0=3", "ab bc"),
        (f"{uuid('a')}={uuid('d')}", "ad bb"),
        ("GPU-aaaa=GPU-cccc, GPU-bbbb=1", "ac bd"),
    ],
)
def test_map(text: str, expected: str) -> None:
    """The map outranks all else, and the rest is fitted around it."""
    assert moves(plan_assignment(TWO, MADE_WITH, FOUR, request=parse_map(text))) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0=9", "the GPU map names GPU 9 of this host, which has GPU 0 to 3"),
        ("0=GPU-eeee", "the GPU map names GPU GPU-eeee of this host, which has GPU 0 to 3"),
        ("7=0", "the GPU map names GPU 7 of the checkpoint, which has GPU 0 and 1"),
        (
            "0=1,GPU-aaaa=2",
            "the GPU map gives one GPU two destinations: 0 and GPU-aaaa are the same GPU of the checkpoint",
        ),
        (
            "0=1,1=GPU-dddd",
            "the GPU map gives one destination to two GPUs: 1 and GPU-dddd are the same GPU of this host",
        ),
    ],
)
def test_a_map_that_makes_no_sense(text: str, said: str) -> None:
    """A GPU that is not there, or two words for one: the refusal names it."""
    found = plan_assignment(TWO, MADE_WITH, FOUR, request=parse_map(text))
    assert message(found) == f"{said}; change the GPU map"
    assert found.code == "GPS-403"
    assert reasons(found) == [""] * 8


def test_a_map_on_a_host_without_gpus() -> None:
    """It is said that there are none."""
    assert "GPU 3 of this host, which has none" in message(
        plan_assignment(TWO, MADE_WITH, a_host(), request=(("0", "3"),))
    )


def test_lenient_map() -> None:
    """A map for all containers may name GPUs that this checkpoint lacks, but this host has what it names."""
    request = parse_map("7=9,0=3")
    assert moves(plan_assignment(TWO, MADE_WITH, FOUR, request=request, lenient=True)) == "ab bc"
    assert "GPU 7 of the checkpoint" in message(plan_assignment(TWO, MADE_WITH, FOUR, request=request))
    found = plan_assignment(TWO, MADE_WITH, FOUR, request=parse_map("0=9"), lenient=True)
    assert "GPU 9 of this host" in message(found)


def test_ambiguous() -> None:
    """The begin of a UUID that two GPUs share is refused, on either side."""
    twin = replace(new(4, "c"), uuid=uuid("c").replace("GPU-cccc0", "GPU-cccc1"))
    found = plan_assignment(TWO, MADE_WITH, a_host(*FOUR.gpus, twin), request=parse_map("0=GPU-cccc"))
    assert message(found) == (
        "GPU-cccc in the GPU map is ambiguous: 2 GPUs of this host match; give more of the UUID"
    )
    assert moves(plan_assignment(TWO, MADE_WITH, FOUR, request=parse_map("0=GPU-cccc"))) == "ac bb"
    same_number = [old(0, "a"), old(0, "b")]
    found = plan_assignment(same_number, MADE_WITH, FOUR, request=parse_map("0=1"), lenient=True)
    assert "0 in the GPU map is ambiguous: 2 GPUs of the checkpoint" in message(found)


def test_a_map_grants_nothing() -> None:
    """A GPU that does not fit is not taken because the map asks for it."""
    host = a_host(new(0, "a"), new(1, "c", model=A100), new(2, "d"))
    found = plan_assignment([old(0, "a")], MADE_WITH, host, request=parse_map("0=1"))
    assert message(found) == (
        "GPU 0 of the checkpoint cannot move to GPU 1 of this host, as requested by the GPU map: another "
        f"model: {A100}; change the GPU map"
    )


def test_what_a_map_leaves() -> None:
    """Where the map took the last place, the refusal says so; what fits alone is told nevertheless."""
    host = a_host(new(0, "c"), new(1, "d", model=A100))
    found = plan_assignment(TWO, MADE_WITH, host, request=parse_map("0=0"))
    assert message(found) == (
        f"no GPU of this host fits GPU 1 of the checkpoint ({H100}): GPU 0: the GPU map assigns it to GPU "
        f"0; GPU 1: another model: {A100}; change the GPU map"
    )
    assert reasons(found) == ["", f"another model: {A100}"] * 2


# Refusals.


def test_no_gpu_here() -> None:
    """A host without GPUs, and one with too few of them."""
    assert message(plan_assignment(TWO, MADE_WITH, a_host())) == (
        "the checkpoint needs 2 GPUs, but this host has none; restore on a host that has such GPUs"
    )
    assert "the checkpoint needs 1 GPU, but" in message(plan_assignment(TWO[:1], MADE_WITH, a_host()))
    assert "the checkpoint needs 2 GPUs, but this host has 1" in message(
        plan_assignment(TWO, MADE_WITH, a_host(new(0, "c")))
    )


def test_eight_gpus_in_one_line() -> None:
    """GPUs with the same reason are named together, and the hint is what helps soonest."""
    gpus = [new(at, f"{at}", free=3 * GIB) for at in range(6)]
    gpus[3] = replace(gpus[3], mig=True)
    host = a_host(*gpus, new(6, "6", model=A100), new(7, "7", model=A100))
    found = plan_assignment([old(0, "a")], MADE_WITH, host)
    assert message(found) == (
        f"no GPU of this host fits GPU 0 of the checkpoint ({H100}): GPU 0 to 2, 4 and 5: 3.0 GiB free, "
        f"12.0 GiB needed; GPU 3: in MIG mode; GPU 6 and 7: another model: {A100}; stop the other "
        "programs on those GPUs"
    )


def test_together() -> None:
    """Each fits somewhere, but not all at once: the refusal names those that contend, and for what."""
    wanted = [old(0, "a", used=GIB), old(1, "b"), old(2, "c")]
    host = a_host(new(0, "d"), new(1, "e", free=2 * GIB), new(2, "f", free=2 * GIB))
    assert message(plan_assignment(wanted, MADE_WITH, host)) == (
        "GPU 1 and 2 of the checkpoint need 2 GPUs of this host, but only GPU 0 fits: GPU 1 and 2: 2.0 "
        "GiB free, 12.0 GiB needed; stop the other programs on those GPUs"
    )


def test_a_place_that_fits_one_of_them() -> None:
    """A GPU that is the only place for some of those that contend is not told as one that fits none."""
    wanted = [replace(old(0, "a"), model=A100), old(1, "b", used=GIB), replace(old(2, "c"), model=A100)]
    host = a_host(new(0, "a"), new(1, "d", model=A100), replace(new(2, "e"), mig=True))
    assert message(plan_assignment(wanted, MADE_WITH, host)) == (
        "GPU 0 to 2 of the checkpoint need 3 GPUs of this host, but only GPU 0 and 1 fit: GPU 2: in MIG "
        "mode; turn MIG off, or set the compute mode to default (nvidia-smi)"
    )


def test_small_sizes() -> None:
    """Below a GiB, MiB; a size that is short by a byte does not look enough."""
    found = plan_assignment([old(0, "a", used=12 * GIB + 1)], MADE_WITH, a_host(new(0, "b", free=12 * GIB)))
    assert reasons(found) == ["12.0 GiB free, 12.1 GiB needed"]
    found = plan_assignment([old(0, "a", used=500 * MIB)], MADE_WITH, a_host(new(0, "b", free=500 * MIB - 1)))
    assert reasons(found) == ["499.9 MiB free, 500.0 MiB needed"]


# Properties, against a judge of its own.


@st.composite
def scenes(draw: st.DrawFn, most: int = 5) -> tuple[list[GpuRecord], Host, dict[str, int]]:
    """A checkpoint and a host that share some GPUs, with few sizes and models, so that they often fit."""
    letters = draw(st.permutations("abcdef0123"))
    count, places = draw(st.integers(0, most)), draw(st.integers(0, most))
    shift = draw(st.integers(0, most))
    sizes = st.sampled_from([0, GIB, 2 * GIB, 3 * GIB])
    models = st.sampled_from([H100, H100, H100, A100])
    numbers = draw(st.permutations(range(count)))
    wanted = [replace(old(numbers[at], letters[at], draw(sizes)), model=draw(models)) for at in range(count)]
    gpus = [
        replace(
            new(at, letters[(at + shift) % len(letters)], free=draw(sizes), model=draw(models)),
            mig=draw(st.sampled_from([False] * 7 + [True])),
            compute_mode=draw(st.sampled_from(["default"] * 6 + ["exclusive-process", "prohibited"])),
            compute_capability=draw(st.sampled_from(["9.0"] * 9 + ["8.0"])),
        )
        for at in range(places)
    ]
    reserved = draw(st.dictionaries(st.sampled_from([uuid(x) for x in letters]), sizes, max_size=2))
    return wanted, a_host(*draw(st.permutations(gpus))), reserved


@st.composite
def requests(draw: st.DrawFn, wanted: Sequence[GpuRecord], host: Host) -> dict[str, str]:
    """UUIDs that a map asks for: of GPUs that are there, none twice."""
    olds = draw(st.permutations([gpu.uuid for gpu in wanted]))
    news = draw(st.permutations([gpu.uuid for gpu in host.gpus]))
    size = draw(st.integers(0, min(len(olds), len(news))))
    return dict(itertools.islice(zip(olds, news, strict=False), size))


def may(wanted: GpuRecord, gpu: Gpu, reserved: Mapping[str, int]) -> bool:
    """Whether one may go to the other, in the words of the rules."""
    claimed = reserved.get(gpu.uuid, 0)
    room = wanted.memory_used == 0 or gpu.memory_used + claimed + wanted.memory_used <= gpu.memory_total
    if gpu.mig or gpu.compute_mode == "prohibited" or not room:
        return False
    if gpu.uuid == wanted.uuid:
        return gpu.compute_mode == "default" or claimed == 0
    kind = (gpu.model, gpu.compute_capability, gpu.compute_mode)
    return kind == (wanted.model, wanted.compute_capability, "default")


def best(
    wanted: Sequence[GpuRecord], host: Host, reserved: Mapping[str, int], asked: Mapping[str, str]
) -> tuple[tuple[str, str], ...] | None:
    """The best of all ways, by trying every one; None where there is none."""
    wanted = sorted(wanted, key=lambda gpu: gpu.index)
    ways = []
    for targets in itertools.permutations(host.gpus, len(wanted)):
        pairs = list(zip(wanted, targets, strict=True))
        if not all(may(gpu, target, reserved) for gpu, target in pairs):
            continue
        if any(asked.get(gpu.uuid, target.uuid) != target.uuid for gpu, target in pairs):
            continue
        moved = sum(gpu.uuid != target.uuid for gpu, target in pairs)
        taken = sorted(
            (-max(0, t.memory_total - t.memory_used - reserved.get(t.uuid, 0)), t.index) for t in targets
        )
        order = [target.index for target in targets]
        ways.append((moved, taken, order, tuple((gpu.uuid, target.uuid) for gpu, target in pairs)))
    return min(ways)[-1] if ways else None


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_the_best_way_is_found(data: st.DataObject) -> None:
    """Against every permutation: a way is found whenever there is one, it is the best, and it is allowed."""
    wanted, host, reserved = data.draw(scenes())
    asked = data.draw(requests(wanted, host))
    found = plan_assignment(wanted, MADE_WITH, host, reserved=reserved, request=tuple(asked.items()))
    expected = best(wanted, host, reserved, asked)
    assert found.pairs == (expected or ())
    assert bool(found.refusal) == (expected is None)
    assert bool(found.hint) == (expected is None)


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_what_holds_of_every_plan(data: st.DataObject) -> None:
    """Never two onto one, no rule broken, none left out, a request honoured or refused, always the same."""
    wanted, host, reserved = data.draw(scenes(most=8))
    asked = data.draw(requests(wanted, host))
    request: GpuMap = tuple(asked.items())
    found = plan_assignment(wanted, MADE_WITH, host, reserved=reserved, request=request)
    again = plan_assignment(
        wanted[::-1], MADE_WITH, replace(host, gpus=host.gpus[::-1]), reserved=reserved, request=request
    )
    assert again == found
    olds, news = {gpu.uuid: gpu for gpu in wanted}, {gpu.uuid: gpu for gpu in host.gpus}
    assert [(v.wanted, v.gpu, not v.reason) for v in found.verdicts] == [
        (one.uuid, other.uuid, may(one, other, reserved))
        for one in sorted(wanted, key=lambda gpu: gpu.index)
        for other in sorted(host.gpus, key=lambda gpu: gpu.index)
    ]
    if found.refusal:
        assert found.pairs == ()
        assert "\n" not in found.refusal
        return
    assert [one for one, _ in found.pairs] == [g.uuid for g in sorted(wanted, key=lambda g: g.index)]
    assert len({other for _, other in found.pairs}) == len(wanted)
    assert all(may(olds[one], news[other], reserved) for one, other in found.pairs)
    assert asked.items() <= dict(found.pairs).items()


@given(scenes(most=8), st.permutations(range(8)))
def test_identity(scene: tuple[list[GpuRecord], Host, dict[str, int]], places: list[int]) -> None:
    """Where every GPU of the checkpoint is here with its room, all stay what they are."""
    wanted, host, _ = scene
    own = [
        replace(new(places[at], "0"), uuid=gpu.uuid, memory_total=gpu.memory_used, memory_used=0)
        for at, gpu in enumerate(wanted)
    ]
    others = [
        replace(gpu, index=gpu.index + 8) for gpu in host.gpus if gpu.uuid not in {g.uuid for g in wanted}
    ]
    found = plan_assignment(wanted, MADE_WITH, a_host(*others, *own))
    assert all(one == other for one, other in found.pairs)
    assert len(found.pairs) == len(wanted)


@given(st.lists(st.text(max_size=8), max_size=3), st.text(max_size=300))
def test_any_words(words: list[str], made_with: str) -> None:
    """Whatever words the checkpoint has, there is a plan or a refusal of one line."""
    wanted = [
        replace(old(at, "abc"[at]), model=word, compute_capability=word) for at, word in enumerate(words)
    ]
    found = plan_assignment(wanted, made_with, FOUR)
    assert len(found.refusal.splitlines()) == bool(found.refusal)
    assert found.refusal.isprintable()


@pytest.mark.parametrize("spare", [0, 8])
def test_sixteen_gpus_are_fast(spare: int) -> None:
    """16 GPUs that all contend take less than 50 ms, and so does their refusal."""
    wanted = [old(at, "a", used=(at + 1) * GIB) for at in range(16)]
    wanted = [replace(gpu, uuid=f"{gpu.uuid[:-2]}{gpu.index:02}") for gpu in wanted]
    gpus = [new(at, "b", free=(at % 16 + 1) * GIB) for at in range(16 + spare)]
    gpus = [replace(gpu, uuid=f"{gpu.uuid[:-2]}{gpu.index:02}") for gpu in gpus]
    start = time.process_time()
    found = plan_assignment(wanted, MADE_WITH, a_host(*gpus))
    refused = plan_assignment(
        wanted, MADE_WITH, a_host(*gpus[: 15 + spare][::-1]), reserved={gpus[15].uuid: GIB}
    )
    assert time.process_time() - start < 0.1
    assert len(found.pairs) == 16
    assert (refused.pairs, bool(refused.refusal)) == ((), True)


def test_a_checkpoint_of_many_gpus() -> None:
    """As many GPUs as a manifest may list are refused at once on a host with few."""
    wanted = [replace(old(at, "a"), uuid=f"{uuid('a')[:-4]}{at:04}") for at in range(256)]
    start = time.process_time()
    found = plan_assignment(wanted, MADE_WITH, FOUR)
    assert time.process_time() - start < 0.5
    assert found.refusal == "the checkpoint needs 256 GPUs, but this host has 4"
