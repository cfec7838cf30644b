"""gpusnap history: the checkpoints of one container, what each has added, and how long it took."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from checkpoints import ANNOTATIONS, keep, noise
from fakes import a_manifest

from gpusnap.checkpoints.labels import as_annotations
from gpusnap.checkpoints.statistics import measure_stopped
from gpusnap.oci.store.index import Catalog
from gpusnap.oci.store.store import Store
from gpusnap.oci.store.tags import Entry
from gpusnap.retention.history import history
from gpusnap.runtime_shim.base.transaction import Step

Run = Callable[..., tuple[int, str, str]]
NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture(autouse=True)
def store(host_store: Store) -> Store:
    """This host's, with three checkpoints of w, of which the second changed half, and one of another."""
    timing = (
        Step("inspect", 0.0, 1.0),
        Step("lock", 1.0, 0.5),
        Step("dump", 2.0, 1.0),
        Step("resume", 3.0, 0.25),
    )
    first, second = noise(8, 1), noise(8, 1)
    second[: len(second) // 2] = noise(4, 2)
    for days, memory in ((3, first), (2, second), (1, second)):
        created = (NOW - timedelta(days=days)).isoformat().replace("+00:00", "Z")
        keep(
            host_store,
            memory,
            names=(f"w:{days}",),
            records={"config.dump": b"{}"},
            record=replace(a_manifest(), timing=timing),
            annotations={
                **ANNOTATIONS,
                "org.criu.checkpoint.container.name": "w",
                "org.opencontainers.image.created": created,
                **as_annotations({"day": str(days)}),
            },
        )
    notes = {**ANNOTATIONS, "org.criu.checkpoint.container.name": "other"}
    keep(host_store, names=("other:1",), records={"x": b""}, gpu=False, annotations=notes)
    return host_store


def test_over_time(store: Store) -> None:
    """What each has added: all, half of its memory, and next to nothing."""
    first, second, third = history(store, "w")
    assert [each.names for each in (first, second, third)] == [("w:3",), ("w:2",), ("w:1",)]
    assert first.new == first.size
    assert second.size * 0.3 < second.new < second.size * 0.7
    assert 0 < third.new < third.size * 0.2
    assert {each.pause for each in (first, second, third)} == {2.25}
    assert first.driver == "nvidia 580.159.04"
    assert first.labels == {"day": "3"}
    assert history(store, "w:2") == (first, second, third)
    (other,) = history(store, "other")
    assert (other.pause, other.driver) == (None, "")
    assert history(store, "gone") == ()


def test_how_often_the_index_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often for three as for one: with a thousand, it took half a minute to read it for each."""
    real, read = Catalog.entries, list[str]()

    def entries(catalog: Catalog) -> tuple[Entry, ...]:
        read.append(catalog.path)
        return real(catalog)

    monkeypatch.setattr(Catalog, "entries", entries)
    assert len(history(store, "other")) == 1
    once = len(read)
    assert len(history(store, "w")) == 3
    assert len(read) == 2 * once


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [
        ((), None),
        ((Step("inspect", 0, 1),), None),
        ((Step("lock", 1, 1), Step("write", 2, 5), Step("dump", 7, 1), Step("sync", 8, 9)), 7.0),
        (
            (
                Step("lock", 1, 1),
                Step("dump", 2, 1),
                Step("lock", 3, 1),
                Step("dump", 4, 1),
                Step("resume", 5, 1),
            ),
            5.0,
        ),
        ((Step("dump", 4, 2),), 2.0),
    ],
)
def test_stopped(steps: tuple[Step, ...], seconds: float | None) -> None:
    """From the lock until the processes run again, or until the dump has ended the container."""
    assert measure_stopped(steps) == seconds


def test_the_command(store: Store, gpusnap: Run) -> None:
    """A line each with its age, and JSON; a damaged one is named."""
    code, out, err = gpusnap("history", "w")
    assert (code, err) == (0, "")
    title, *rows, total = out.splitlines()
    assert title.split() == ["created", "age", "name", "size", "new", "pause", "GPUs", "driver", "labels"]
    assert [row.split()[2:6] for row in rows] == [
        ["3", "days", "ago", "w:3"],
        ["2", "days", "ago", "w:2"],
        ["24", "hours", "ago", "w:1"],
    ]
    assert all("2.25 s" in row and row.rstrip().endswith(f"day={3 - at}") for at, row in enumerate(rows))
    assert total.startswith("3 checkpoints, ")
    code, out, err = gpusnap("history", f"oci:{store.path}:w", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["store"], found["container"]) == (store.path, "w")
    assert {*found["checkpoints"][0]} == {
        *("digest", "names", "created", "age", "containerId", "size", "new", "pause", "gpus", "driver"),
        *("labels", "fault", "migrating"),
    }
    assert 3 * 86400 <= found["checkpoints"][0]["age"] < 3 * 86400 + 600
    config = store.layout.read_manifest(store.find("w:2").descriptor).config.digest
    Path(store.path, "blobs/sha256", config.removeprefix("sha256:")).write_bytes(b"{}")
    code, out, err = gpusnap("history", "w")
    assert code == 0
    assert " is damaged: " in out
    code, out, err = gpusnap("history", "gone")
    assert (code, out) == (3, "")
    assert "has no checkpoint of the container gone" in err
