"""Which checkpoints the rules keep, by tables, and properties of all rules."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.retention.rules import Candidate, Rules, decide, parse_duration, parse_label

# A Sunday and the Monday after it; two years.
TIMES = {
    "a": "2025-12-31T23:00:00Z",
    "b": "2026-01-01T00:10:00Z",
    "c": "2026-01-01T00:50:00Z",
    "d": "2026-01-04T23:59:59Z",
    "e": "2026-01-05T00:00:00Z",
    "f": "2026-01-05T08:00:00Z",
    "g": "2026-02-01T12:00:00Z",
    "h": "2026-02-01T12:30:00Z",
}


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def candidates(labels: dict[str, dict[str, str]] | None = None) -> list[Candidate]:
    return [Candidate(name, at(time), (labels or {}).get(name, {})) for name, time in TIMES.items()]


def kept(rules: Rules, found: list[Candidate] | None = None) -> str:
    """Those that stay, in order."""
    decided = decide(candidates() if found is None else found, rules)
    return "".join(sorted(name for name, reasons in decided.items() if reasons))


@pytest.mark.parametrize(
    ("rules", "stay"),
    [
        (Rules(last=1), "h"),
        (Rules(last=3), "fgh"),
        (Rules(last=99), "abcdefgh"),
        (Rules(hourly=1), "h"),
        (Rules(hourly=2), "fh"),
        (Rules(hourly=5), "cdefh"),
        (Rules(hourly=99), "acdefh"),
        (Rules(daily=2), "fh"),
        (Rules(daily=3), "dfh"),
        (Rules(daily=99), "acdfh"),
        # 2026-01-01 is a Thursday of week 1; Sunday the 4th still is, Monday the 5th is of week 2.
        (Rules(weekly=1), "h"),
        (Rules(weekly=2), "fh"),
        (Rules(weekly=3), "dfh"),
        (Rules(weekly=99), "dfh"),
        (Rules(monthly=2), "fh"),
        (Rules(monthly=9), "afh"),
        (Rules(yearly=9), "ah"),
        (Rules(within=timedelta(minutes=29)), "h"),
        (Rules(within=timedelta(minutes=30)), "gh"),
        (Rules(within=timedelta(days=28)), "defgh"),
        (Rules(last=2, monthly=2), "fgh"),
        (Rules(last=1, daily=1, weekly=1, yearly=2), "ah"),
    ],
)
def test_rules(rules: Rules, stay: str) -> None:
    """Each rule by itself, and together: what one of them keeps stays."""
    assert kept(rules) == stay


def test_reasons() -> None:
    """All that keep a checkpoint are named, and those that go have none."""
    decided = decide(candidates(), Rules(last=1, hourly=2, yearly=2, within=timedelta(minutes=30)))
    assert decided == {
        "h": ("last", "hourly", "yearly", "within"),
        "g": ("within",),
        "f": ("hourly",),
        "a": ("yearly",),
        **dict.fromkeys("bcde", ()),
    }


def test_labels() -> None:
    """By key, and by key and value; the newest stays though no rule keeps it."""
    found = candidates({"a": {"best": ""}, "b": {"step": "100"}, "c": {"step": "200"}})
    assert kept(Rules(labels=(("best", None),)), found) == "ah"
    assert kept(Rules(labels=(("step", "200"),)), found) == "ch"
    assert kept(Rules(labels=(("step", None), ("best", ""))), found) == "abch"
    assert kept(Rules(labels=(("nothing", None),)), found) == "h"
    decided = decide(found, Rules(labels=(("step", "200"), ("step", None))))
    assert (decided["c"], decided["h"]) == (("label step=200", "label step"), ("newest",))


def test_time_zones() -> None:
    """Days are those of UTC, whatever zone a time is written in."""
    late = datetime(2026, 1, 2, 0, 30, tzinfo=timezone(timedelta(hours=2)))  # the day before, in UTC
    early = datetime(2026, 1, 1, 1, 0, tzinfo=UTC)
    assert kept(Rules(daily=9), [Candidate("x", late), Candidate("y", early)]) == "x"


def test_one_and_none() -> None:
    assert decide([], Rules(last=1)) == {}
    assert kept(Rules(last=1), candidates()[:1]) == "a"
    assert Rules().is_empty()
    assert not Rules(labels=(("a", None),)).is_empty()


_MOMENTS = st.datetimes(datetime(2024, 1, 1), datetime(2027, 1, 1), timezones=st.just(UTC))
_RULES = st.builds(
    Rules,
    last=st.integers(0, 4),
    hourly=st.integers(0, 4),
    daily=st.integers(0, 4),
    weekly=st.integers(0, 4),
    monthly=st.integers(0, 4),
    yearly=st.integers(0, 2),
    within=st.timedeltas(timedelta(), timedelta(days=40)),
    labels=st.sampled_from([(), (("k", None),), (("k", "1"),)]),
)
_FOUND = st.lists(
    st.tuples(_MOMENTS, st.sampled_from(["", "1", "2"])),
    min_size=1,
    max_size=30,
    unique_by=lambda one: one[0],
).map(
    lambda all_: [
        Candidate(f"{n}", when, {"k": value} if value else {}) for n, (when, value) in enumerate(all_)
    ]
)


@given(_FOUND, _RULES)
def test_pruning_twice_removes_nothing_more(found: list[Candidate], rules: Rules) -> None:
    """What the rules have kept they keep again; the newest is among it, and what `last` says."""
    first = decide(found, rules)
    stay = [each for each in found if first[each.digest]]
    assert all(decide(stay, rules).values())
    order = sorted(found, key=lambda each: each.created, reverse=True)
    assert all(first[each.digest] for each in order[: max(1, rules.last)])


@given(_FOUND, _RULES, st.randoms())
def test_the_order_does_not_matter(found: list[Candidate], rules: Rules, random: object) -> None:
    """Neither does a stricter rule keep more."""
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert decide(found, rules) == decide(shuffled, rules)
    more = decide(found, Rules(last=rules.last + 1, daily=rules.daily + 1))
    less = decide(found, Rules(last=rules.last, daily=rules.daily))
    assert all(more[digest] for digest, reasons in less.items() if reasons)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("12h", 43200), ("7d", 604800), ("2w", 1209600), ("1d12h", 129600)],
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "7", "d", "7 d", "-7d", "0h", "7y", "1.5h", "999999w", "٣d"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


def test_label_words() -> None:
    assert [parse_label(each) for each in ("k", "k=", "k=v=w")] == [("k", None), ("k", ""), ("k", "v=w")]
