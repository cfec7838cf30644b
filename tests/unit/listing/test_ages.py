"""How long ago something was."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gpusnap.listing.ages import format_age

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "just now"),
        (-30, "just now"),
        (1, "1 second ago"),
        (59, "59 seconds ago"),
        (60, "1 minute ago"),
        (3599, "59 minutes ago"),
        (3600, "1 hour ago"),
        (47 * 3600, "47 hours ago"),
        (48 * 3600, "2 days ago"),
        (13 * 86400, "13 days ago"),
        (14 * 86400, "2 weeks ago"),
        (61 * 86400, "2 months ago"),
        (3 * 365 * 86400, "3 years ago"),
        (-3600, "2026-03-04 06:06 UTC"),
    ],
)
def test_ago(seconds: int, said: str) -> None:
    """In the largest unit that has two of it, or one."""
    created = (NOW - timedelta(seconds=seconds)).isoformat()
    assert format_age(created, NOW) == said


def test_what_is_no_time() -> None:
    """It may be anybody's text; without a zone it is UTC."""
    assert format_age("yesterday", NOW) == "yesterday"
    assert format_age("", NOW) == ""
    assert format_age("2026-03-04T05:06:02", NOW) == "5 seconds ago"
    assert format_age("\x1b[2J", NOW) == "\\x1b[2J"


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"])
def test_a_year_that_is_none_in_utc(text: str) -> None:
    """It is no time that can be reckoned with, and nothing fails for it."""
    assert format_age(text, NOW) == text
