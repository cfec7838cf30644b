"""How long a checkpoint is likely to take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import keep
from doctor_trees import only
from fakes import ID, a_manifest

from gpusnap.doctor.base.free_space import Speed
from gpusnap.doctor.container_checks import duration
from gpusnap.doctor.container_checks.duration import EarlierCheckpoint
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.base.transaction import Step

GIB = 1 << 30


def test_estimate() -> None:
    """The measured checkpoint of docs/benchmarks.md lies within: 12.7 GiB, 7.07 s at 2.8 GiB/s."""
    found = duration.estimate(int(12.7 * GIB), GIB >> 1, 2.8 * GIB)
    assert found.low < 7.07 < found.high
    assert duration.estimate(0, 0, None).low < 1


def test_a_slow_disk_is_slower() -> None:
    """The high end goes by the disk."""
    slow, fast = (duration.estimate(GIB, 0, rate * GIB).high for rate in (0.1, 2))
    assert slow > fast + 5


def test_from_earlier() -> None:
    """Twice the bytes take about twice the time; the range has both of two."""
    found = duration.from_earlier(
        2 * GIB, [EarlierCheckpoint("a", GIB, 4.5), EarlierCheckpoint("b", GIB, 2.5)]
    )
    assert found.low == pytest.approx((0.5 + 4) * 0.8)
    assert found.high == pytest.approx((0.5 + 8) * 1.25)


def test_earlier(tmp_path: Path) -> None:
    """Those of the container, or else all; of a store that is not there none."""
    path = str(tmp_path / "store")
    assert duration.list_earlier(path, ID) == ()
    store = Store(path)
    record = replace(a_manifest(), timing=(Step("a", 0.0, 1.0), Step("b", 1.0, 2.5)))
    for name, container in (("one", ID), ("two", "another")):
        keep(store, bytearray(8192), names=(name,), record=replace(record, container=container))
    assert duration.list_earlier(path, ID) == (EarlierCheckpoint(ID, 3 << 20, 3.5),)
    assert len(duration.list_earlier(path, "a third")) == 2
    assert duration.list_earlier(path, ID, patience=-1.0) == ()


@pytest.mark.parametrize(
    ("before", "disk", "said"),
    [
        ([EarlierCheckpoint(ID, GIB, 3.0)], None, "its own earlier checkpoints in the store (1)"),
        ([EarlierCheckpoint("other", GIB, 3.0)], None, "other containers' earlier checkpoints"),
        (
            [EarlierCheckpoint(ID, GIB >> 4, 9.0), EarlierCheckpoint(ID, GIB, 3.0)],
            None,
            "earlier checkpoints in the store (1)",
        ),
        ([EarlierCheckpoint(ID, GIB >> 4, 9.0)], None, "an unmeasured disk"),
        ([], Speed(GIB, GIB), "the disk's write rate, 1.0 GiB/s"),
        ([], None, "an unmeasured disk"),
    ],
)
def test_check(before: list[EarlierCheckpoint], disk: Speed | None, said: str) -> None:
    """A range, called an estimate, with what it rests on."""
    verdict, found = only(duration.check(ID, GIB, 0, before, disk))
    assert verdict == "ok"
    assert "estimate" in found.says
    assert said in found.says
    assert found.facts["low"] < found.facts["high"]
