"""What a test can have its registry do wrong, and what the registry notes of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CutAnswer", "CutBody", "NoAnswer", "Rule", "Say", "Seen"]


@dataclass(frozen=True, slots=True)
class Say:
    """Answer that, and do nothing."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class CutBody:
    """Close the connection after so many bytes of the request's body, which count as received."""

    after: int


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """Close the connection after so many bytes of the answer's body."""

    after: int


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Do what is asked, and close the connection without a word."""


@dataclass(slots=True)
class Rule:
    """What to do to the next `times` requests of a method whose path and query fit, after `skip` of them."""

    method: str
    path: str
    do: Say | CutBody | CutAnswer | NoAnswer
    times: int = 1
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it came."""

    method: str
    path: str
    headers: Mapping[str, str]
