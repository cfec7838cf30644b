"""What `gpusnap recover --list` shows."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import get_args

import pytest
from fakes import Family

from gpusnap.cli.recover_list import Kind, Names, PendingOperation, documents, line, list_waiting
from gpusnap.engines import podman
from gpusnap.operations.suspending.left_paused import PausedContainer
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.records.journal import Entry, JournalProcess
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension
from gpusnap.runtime_shim.snapshot.restoring.record import Restore


def restore(container: str, owner: tuple[int, int]) -> Restore:
    return Restore(container, "/image", owner, ("crun",), "/bundle", "", True, ())


def test_waiting() -> None:
    """One line for each by container, and the same as JSON; processes that have ended are left out."""
    with Family() as family:
        process = proc.process(family.init)
        assert process is not None
        alive, dead = JournalProcess(process.pid, process.start, ()), JournalProcess(process.pid, 1, ())
        at_work = (process.pid, process.start)
        gone = (process.pid, process.start + 1)
        found = list_waiting(
            [Entry("c", "/i", gone, (alive, dead)), Entry("d", "/i", gone, (dead,))],
            [restore("b", gone), restore("a", at_work)],
        )
        assert [line(each, Names()) for each in found] == [
            "a  gpusnap is working on it  image: /image",
            "b  its restore was interrupted  image: /image",
            f"c  its checkpoint was interrupted; processes: {process.pid}  image: /i",
            "d  its checkpoint was interrupted; processes: none  image: /i",
        ]
    assert json.loads(json.dumps(documents(found, Names({"c": "server"}))))[2] == {
        "container": "c",
        "kind": "checkpoint",
        "at_work": False,
        "processes": [process.pid],
        "image": "/i",
        "why": "",
        "name": "server",
    }
    assert documents((), Names()) == []


def test_an_end_that_podman_has_not_noticed() -> None:
    """It is in the list, by the name that Podman has just given."""
    (found,) = list_waiting((), (), unnoticed=[podman.Container("c", "w", "gpusnap-runtime", "stopped")])
    said = "it has ended, and Podman was killed before it cleaned up"
    assert line(found, Names({"c": "w"})) == f"w (c)  {said}"
    assert json.loads(json.dumps(documents([found], Names())))[0]["kind"] == "ended"


def test_a_pods_container_that_is_paused() -> None:
    """The line has the command that resumes it."""
    (found,) = list_waiting((), (), paused=[PausedContainer("c", (7,))])
    assert line(found, Names()).endswith("unless one is in progress: ctr --namespace k8s.io tasks resume c")
    (document,) = documents([found], Names())
    assert (document["kind"], document["processes"]) == ("paused", (7,))


def test_what_the_documentation_says() -> None:
    """It names all kinds, and no other ones, and all fields, as programs read them."""
    text = (Path(__file__).parents[3] / "docs/commands.md").read_text()
    (said,) = re.findall(r"^## gpusnap recover\n.*?^(As JSON: .*?)$", text, re.MULTILINE | re.DOTALL)
    fields, _, kinds = said.partition(" The kind is ")
    assert sorted(re.findall(r"`(\w+)`", kinds)) == sorted(get_args(Kind))
    for each in dataclasses.fields(PendingOperation):
        assert re.search(rf"\b{each.name}\b", fields)


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What people call a container; Podman is asked once, and the ID stays where it does not answer."""
    asked: list[float] = []
    known, other, third = "a" * 64, "b" * 64, "c" * 64

    def tell(*, seconds: float) -> dict[str, str]:
        asked.append(seconds)
        if len(asked) > 1:
            raise GpusnapError("Podman did not respond")
        return {other: "server"}

    monkeypatch.setattr(podman, "names", tell)
    names = Names({known: "llama"})
    shown = [names.format_name(each) for each in (known, other, third, "no-id")]
    assert shown == ["llama (aaaaaaaaaaaa)", "server (bbbbbbbbbbbb)", third, "no-id"]
    assert len(asked) == 1
    assert Names().format_name(other) == other


def test_one_that_podman_has_as_running() -> None:
    """Though it is suspended."""
    asleep = Suspension("k", "llama", "podman", "", Stage.SUSPENDED, (1, 1), (1, 1), "", "crun")
    (found,) = list_waiting([], [], awake=[asleep])
    said = line(found, Names({found.container: found.name}))
    assert said == f"llama ({found.container[:12]})  it is suspended, but Podman lists it as running"


def test_one_with_a_held_thread() -> None:
    """It is suspended, and no suspend or resume of it was interrupted."""
    asleep = Suspension("k", "llama", "podman", "", Stage.SUSPENDED, (1, 1), (1, 1), "", "crun")
    (found,) = list_waiting([], [], moving=[asleep])
    assert line(found, Names({"k": "llama"})).endswith(
        "it is suspended, and a thread of it would receive no signal"
    )
