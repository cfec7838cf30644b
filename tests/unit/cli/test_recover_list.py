"""What gpusnap recover --list says of migrations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outgoing import outgoing

from gpusnap.checkpoints import migrations
from gpusnap.checkpoints.migrations import OutgoingMigration
from gpusnap.cli.recover_list import Names, line, list_waiting
from gpusnap.migration.records import Record

LEAVING = outgoing(container="ab12", route=(), checkpoint="w:2026-01-01")
COMING = Record(id="1" * 32, state="coming", name="v")


@pytest.mark.parametrize(
    ("leaving", "coming", "at_work", "said"),
    [
        (LEAVING, None, True, "gpusnap is migrating w to gpu2"),
        (LEAVING, None, False, "the migration of w to gpu2 was interrupted"),
        (
            replace(LEAVING, digest="sha256:ab"),
            None,
            False,
            "the migration of w to gpu2 was interrupted; w may run there; its checkpoint is w:2026-01-01",
        ),
        (None, COMING, False, "the migration of v to this host was interrupted"),
        (None, replace(COMING, at_work=True), True, "gpusnap is receiving v from another host"),
    ],
)
def test_migrations(
    monkeypatch: pytest.MonkeyPatch,
    leaving: OutgoingMigration | None,
    coming: Record | None,
    at_work: bool,
    said: str,
) -> None:
    """A sentence each: whether it was interrupted, and where the container may run."""
    monkeypatch.setattr(migrations, "is_alive", lambda owner, boot: at_work)
    (found,) = list_waiting((), (), leaving=[leaving] if leaving else (), coming=[coming] if coming else ())
    assert found.at_work is at_work
    assert line(found, Names({found.container: ""})).partition("  ")[2] == said
