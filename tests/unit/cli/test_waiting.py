"""What `gpusnap recover --list` shows."""

from __future__ import annotations

import json

from fakes import Family

from gpusnap.cli.recover_list import as_json, line, waiting
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.records.journal import Entry, Suspended
from gpusnap.runtime_shim.snapshot.restore_record import Restore


def restore(container: str, owner: tuple[int, int]) -> Restore:
    return Restore(container, "/image", owner, ("crun",), "/bundle", "", True, ())


def test_waiting() -> None:
    """One line for each by container, and the same as JSON; processes that have ended are left out."""
    with Family() as family:
        process = proc.process(family.init)
        assert process is not None
        alive, dead = Suspended(process.pid, process.start, ()), Suspended(process.pid, 1, ())
        at_work = (process.pid, process.start)
        gone = (process.pid, process.start + 1)
        found = waiting(
            [Entry("c", "/i", gone, (alive, dead)), Entry("d", "/i", gone, (dead,))],
            [restore("b", gone), restore("a", at_work)],
        )
        assert [line(each) for each in found] == [
            "a  gpusnap is at work on it  image: /image",
            "b  its restore was cut off  image: /image",
            f"c  its checkpoint was cut off; processes: {process.pid}  image: /i",
            "d  its checkpoint was cut off; processes: none  image: /i",
        ]
    assert json.loads(as_json(found))[2] == {
        "container": "c",
        "kind": "checkpoint",
        "at_work": False,
        "processes": [process.pid],
        "image": "/i",
        "why": "",
    }
    assert as_json(()) == "[]"
