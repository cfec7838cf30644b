"""Which checkpoints `gpusnap ls --filter` shows."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gpusnap.checkpoints.list import Kind, Row, describe
from gpusnap.listing.filters import filter_lines, rows_of
from gpusnap.runtime_shim.base.errors import UsageError

NOW = datetime(2026, 3, 10, tzinfo=UTC)


def row(number: int, *names: str, kind: Kind = "checkpoint", container: str = "server") -> Row:
    notes = {
        "org.opencontainers.image.created": f"2026-03-0{number}T00:00:00Z",
        "org.criu.checkpoint.container.name": container,
        "io.gpusnap.container.id": str(number) * 64,
    }
    return describe(f"sha256:{number:064x}", names, kind, {}, notes)


ROWS = (
    row(1, "server:1"),
    row(2, "server:2", "good"),
    row(3, "db:1", container="db"),
    row(4, kind="pages"),
)


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ([], ["server:1", "server:2", "good", "db:1", ""]),
        (["name=server"], ["server:1", "server:2"]),
        (["name=server:2"], ["server:2"]),
        (["name=*:1"], ["server:1", "db:1"]),
        (["name=serv"], []),
        (["name=server:1", "name=good"], ["server:1", "good"]),
        (["name=server", "since=server:1"], ["server:2"]),
        (["container=db"], ["db:1"]),
        (["container=33333333"], ["db:1"]),
        (["container=3"], []),
        (["dangling=true"], [""]),
        (["dangling=false", "container=db"], ["db:1"]),
        (["kind=pages"], [""]),
        (["before=good"], ["server:1"]),
        (["before=server"], ["server:1"]),
        (["before=server:latest"], ["server:1"]),
        (["before=2026-03-03"], ["server:1", "server:2", "good"]),
        (["since=8d"], ["db:1", ""]),
        (["since=192h"], ["db:1", ""]),
        ([f"since={2:064x}"], ["db:1", ""]),
    ],
)
def test_chosen(filters: list[str], names: list[str]) -> None:
    """Values of one key are alternatives; all keys have to fit."""
    assert [line.name for line in filter_lines(ROWS, filters, NOW)] == names


@pytest.mark.parametrize(
    "word",
    [
        "",
        "name",
        "size=1",
        "kind=x",
        "dangling=1",
        "since=nobody",
        "before=2026-99-99",
        "since=",
        "since=999999w",
    ],
)
def test_what_is_no_filter(word: str) -> None:
    """It is refused, with what would be one."""
    with pytest.raises(UsageError) as raised:
        filter_lines(ROWS, [word], NOW)
    assert raised.value.hint


def test_rows() -> None:
    """A checkpoint is there once, with the names that are left."""
    (found,) = rows_of(filter_lines(ROWS, ["name=server:2", "name=good"], NOW))
    assert found.names == ("server:2", "good")
    (alone,) = rows_of(filter_lines(ROWS, ["name=good"], NOW))
    assert alone.names == ("good",)
