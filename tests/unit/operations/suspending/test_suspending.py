"""Which suspended container is meant, and how much RAM is left for another."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_podman import FakePodman
from fakes import FakeDriver

from gpusnap.base.user_errors import NotFound
from gpusnap.container_hooks import commands
from gpusnap.engines import podman
from gpusnap.operations.suspending import budget, spill, targets, usage
from gpusnap.operations.suspending import suspend as suspending
from gpusnap.operations.suspending.usage import Usage
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError, Refused
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.settings import Settings, Suspend
from gpusnap.runtime_shim.snapshot.preflight import space
from gpusnap.runtime_shim.snapshot.records import journal, reservations, suspensions
from gpusnap.runtime_shim.snapshot.records.journal import Entry
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension
from gpusnap.runtime_shim.snapshot.recovery import restore as recover_restore
from gpusnap.runtime_shim.snapshot.suspended_containers import spill as spilling
from gpusnap.runtime_shim.snapshot.suspended_containers import suspend as suspended_containers

MIB = 1 << 20
ONE = Suspension(
    "aaaa0001@123456789abc",
    "llama",
    "podman",
    "",
    Stage.SUSPENDED,
    (1, 1),
    (1, 1),
    "2026-11-22T19:00:01Z",
    "crun",
)
TWO = replace(ONE, key="aaaa0002@123456789abc", name="qwen", since="2026-11-22T19:00:00Z")
TASK = replace(ONE, key="llama@ba987654321c", engine="containerd", namespace="k8s.io")


class Asked(podman.Inspection):
    """Podman, which knows containers by these names."""

    def __init__(self, **ids: str) -> None:
        self._ids = ids
        self._wanted = ""

    def by(self, name: str) -> Asked:
        """Of a name."""
        self._wanted = name
        return self

    def container(self) -> podman.Container:
        if self._wanted not in self._ids:
            raise NotFound(f"there is no container {self._wanted}")
        return podman.Container(self._ids[self._wanted], self._wanted, "crun", "paused", init=1)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> list[Suspension]:
    """The suspended containers."""
    found = [ONE, TWO]
    monkeypatch.setattr(suspensions, "find", lambda: iter(found))
    return found


def test_names(there: list[Suspension]) -> None:
    """A name, an ID, or the beginning of one; of two of a name the namespace tells."""

    def suspended(name: str, **ids: str) -> Suspension:
        return targets.find_suspended(name, Asked(**ids).by(name))

    assert suspended("llama") == ONE
    assert suspended("aaaa0002") == TWO
    with pytest.raises(GpusnapError, match="several suspended containers are named aaaa"):
        suspended("aaaa")
    with pytest.raises(NotFound, match="no container mistral is suspended"):
        suspended("mistral")
    assert suspended("mistral", mistral="aaaa0002") == TWO  # it was renamed
    with pytest.raises(ContainerError, match="the container mistral is not suspended: it is paused"):
        suspended("mistral", mistral="aaaa0003")
    there.append(TASK)
    with pytest.raises(GpusnapError, match="several") as raised:
        suspended("llama")
    *_, first, last = raised.value.hint.replace(",", "").split()
    assert (suspended(first), suspended(last)) == (ONE, TASK)
    assert targets.is_suspended("qwen", Asked().by("qwen"))
    assert not targets.is_suspended("qwe", Asked().by("qwe"))


def test_the_command_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Podman is not asked again about the container that it was asked about, and is about another."""
    ran: list[str] = []
    asked: list[str] = []

    def container(wanted: str) -> podman.Container:
        asked.append(wanted)
        return podman.Container(wanted, "another", "crun", "running", init=1)

    monkeypatch.setattr(podman, "inspect_container", container)
    monkeypatch.setattr(commands, "_run_after_alone", lambda found, *_, **__: ran.append(found.name))

    def resume(engine: str, wanted: str, given: podman.Inspection) -> None:
        with commands.run_after_resume(replace(ONE, engine=engine, key=wanted), given):
            pass

    resume("podman", "aaaa0001", Asked(llama="aaaa0001").by("llama"))
    assert (ran, asked) == (["llama"], [])
    resume("podman", "aaaa0002", Asked(llama="aaaa0001").by("llama"))
    resume("podman", "aaaa0003", Asked().by("qwen"))
    resume("containerd", "llama", Asked().by("llama"))
    assert (ran, asked) == (["llama", "another", "another"], ["aaaa0002", "aaaa0003"])


@pytest.fixture
def ram(there: list[Suspension], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes in RAM by name; what is spilled has none any more."""
    found = {"llama": 40 * MIB, "qwen": 30 * MIB}

    def spill(key: str, settings: Settings) -> int:
        name = next(each.name for each in there if each.key == key)
        with reservations.claim(str(tmp_path / "gpusnap/room"), patience=0):  # nobody waits for a spill
            size, found[name] = found[name], 0
        return size

    monkeypatch.setattr(budget, "claim", partial(reservations.claim, str(tmp_path / "gpusnap/room")))
    monkeypatch.setattr(budget, "measure_kept", lambda each: (found[each.name], 0))
    monkeypatch.setattr(spilling, "spill", spill)
    return found


def settings(mib: int, over: str = "refuse") -> Settings:
    return Settings(suspend=Suspend(ram=mib * MIB, over=over))


def make_room(mib: int, need: int, over: str = "refuse", leaving: str = "") -> None:
    with budget.claim_room(settings(mib, over), need, leaving=leaving):
        pass


def test_a_budget(ram: dict[str, int]) -> None:
    """What fits is not touched; what does not is refused with figures."""
    make_room(0, 1 << 50)
    make_room(100, 30 * MIB)
    with pytest.raises(
        Refused, match=r"31.0 MiB of GPU memory .*only 30.0 MiB of suspend.ram, 100.0 MiB, is free"
    ) as caught:
        make_room(100, 31 * MIB)
    assert "suspend.over" in caught.value.hint
    with pytest.raises(Refused) as caught:  # nothing that is moved away would help
        make_room(100, 101 * MIB)
    assert caught.value.hint == "raise suspend.ram"
    make_room(100, 31 * MIB, leaving=TWO.key)
    assert ram == {"llama": 40 * MIB, "qwen": 30 * MIB}


def test_what_was_suspended_first_is_spilled(ram: dict[str, int]) -> None:
    """As many as it takes, and none where that would not help."""
    make_room(100, 31 * MIB, "spill")
    assert ram == {"llama": 40 * MIB, "qwen": 0}
    with pytest.raises(Refused):
        make_room(100, 101 * MIB, "spill")
    assert ram["llama"]
    make_room(100, 100 * MIB, "spill")
    assert ram == {"llama": 0, "qwen": 0}


def test_two_suspends_at_once(ram: dict[str, int], there: list[Suspension]) -> None:
    """The second counts what the first is about to take, and not twice once that is there."""
    with budget.claim_room(settings(100), 20 * MIB):
        make_room(100, 10 * MIB)
        with pytest.raises(Refused, match=r"only 10.0 MiB of suspend.ram"):
            make_room(100, 11 * MIB)
        there.append(replace(ONE, name="mistral", stage=Stage.SUSPENDING, owner=state_files.owner()))
        ram["mistral"] = 20 * MIB
        make_room(100, 10 * MIB)
        # It cannot be spilled now, and the hint does not suggest that.
        with pytest.raises(Refused) as caught:
            make_room(100, 81 * MIB, "spill")
        assert caught.value.hint == (
            "try again when the suspends and resumes in progress have ended: gpusnap ps shows them"
        )
        assert ram["llama"]
    there[-1] = replace(there[-1], owner=(1 << 22, 1))  # it was killed: its claim has ended, its files stay
    with pytest.raises(Refused, match=r"only 10.0 MiB of suspend.ram"):
        make_room(100, 11 * MIB)


def test_a_spill_by_the_available_ram(ram: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without suspend.ram: what this host has beside the claims of others, and is only refused later."""
    monkeypatch.setattr(space, "_limit", lambda init: None)
    monkeypatch.setattr(space, "_measure_available", lambda: (250 << 20) - sum(ram.values()))
    with budget.claim_room(settings(0), 10 * MIB):
        make_room(0, 20 * MIB, "spill")  # beside 70 MiB, 10 MiB and the growth of its heap
        make_room(0, 21 * MIB)
        assert ram == {"llama": 40 * MIB, "qwen": 30 * MIB}
        make_room(0, 91 * MIB, "spill")  # it would not help
        assert ram == {"llama": 40 * MIB, "qwen": 30 * MIB}
        make_room(0, 21 * MIB, "spill")
        assert ram == {"llama": 40 * MIB, "qwen": 0}


def test_ram_that_is_claimed_again(
    ram: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspend in progress counts once, also while it fills the RAM: nothing is spilled without need."""
    monkeypatch.setattr(space, "_limit", lambda init: None)
    taken = 0
    monkeypatch.setattr(space, "_measure_available", lambda: (250 << 20) - sum(ram.values()) - taken)
    with (
        budget.claim_room(settings(0), 10 * MIB) as end_early_claim,
        reservations.claim(str(tmp_path / "gpusnap/room")) as job,
    ):
        end_early_claim()
        job.record({reservations.RAM: 10 * MIB})
        make_room(0, 20 * MIB, "spill")
        taken = 6 * MIB
        job.change({reservations.RAM: 4 * MIB})
        make_room(0, 20 * MIB, "spill")
        assert ram == {"llama": 40 * MIB, "qwen": 30 * MIB}
        make_room(0, 21 * MIB, "spill")
        assert ram == {"llama": 40 * MIB, "qwen": 0}


@pytest.mark.parametrize(
    ("at_work", "state"), [(True, "checkpointing"), (False, "cut off"), (None, "running")]
)
def test_one_that_is_being_checkpointed(
    monkeypatch: pytest.MonkeyPatch, at_work: bool | None, state: str
) -> None:
    """It is told apart from one that runs, and so is one whose gpusnap was killed."""
    there = usage._Running("w", "c0ffee", "podman", False, os.getpid())
    me = (os.getpid(), getattr(proc.process(os.getpid()), "start", 0))
    entry = Entry("c0ffee", "/i", me if at_work else (me[0], me[1] + 1), ())
    monkeypatch.setattr(journal, "entries", lambda: () if at_work is None else (entry,))
    monkeypatch.setattr(usage, "_measure_used", lambda driver, running: [(there, {})])
    (found,) = usage._measure_running(FakeDriver(), [there])
    assert found.state == state


@pytest.mark.parametrize("stage", [each for each in suspensions.Stage if each is not Stage.SUSPENDED])
def test_the_state_of_a_killed_suspend_or_resume(stage: Stage) -> None:
    """It is in progress only while its gpusnap is at work."""
    working = replace(ONE, stage=stage, owner=state_files.owner())
    suspending = stage in (Stage.SUSPENDING, Stage.UNDONE)
    assert usage._measure_suspended(working).state == ("suspending" if suspending else "resuming")
    assert usage._measure_suspended(replace(working, owner=(1, 1))).state == "cut off"
    assert usage._measure_suspended(replace(ONE, owner=(1, 1))).state == "suspended"


def test_ps(gpusnap: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a table, as JSON, by a template, and names alone."""
    found = (
        Usage("llama", "a" * 64, "podman", "suspended", (0,), 3 * MIB, 2 * MIB, MIB, "2026-11-22T19:00:00Z"),
        Usage("qwen", "b" * 64, "podman", "running", (0, 1), MIB, 0, 0, ""),
    )
    monkeypatch.setattr(usage, "usages", lambda: found)
    monkeypatch.setattr("gpusnap.cli.commands.suspending.ps.require_root", lambda command: None)
    code, out, err = gpusnap("ps")
    assert (code, err) == (0, "")
    heading, first, second, total = out.splitlines()
    assert total == "GPU memory of 1 container in RAM: 2.0 MiB"
    assert heading.split() == ["name", "state", "GPU", "memory", "RAM", "store", "since"]
    assert first.split()[:9] == ["llama", "suspended", "0", "3.0", "MiB", "2.0", "MiB", "1.0", "MiB"]
    assert second.split() == ["qwen", "running", "0,1", "1.0", "MiB"]
    (document, _) = json.loads(gpusnap("ps", "--json")[1])["containers"]
    assert document["containerId"] == "a" * 64
    assert (document["gpus"], document["ram"], document["stored"]) == ([0], 2 * MIB, MIB)
    assert gpusnap("ps", "--quiet")[1] == "llama\nqwen\n"
    assert gpusnap("ps", "--format", "{{.Name}}: {{.State}}")[1] == "llama: suspended\nqwen: running\n"
    assert "the fields are Name, State" in gpusnap("ps", "--format", "{{.Digest}}")[2]
    monkeypatch.setattr(usage, "usages", lambda: (replace(found[1], state="cut off"),))
    assert gpusnap("ps")[1].endswith("\ncut off: its gpusnap was killed; run gpusnap recover\n")
    monkeypatch.setattr(usage, "usages", tuple)
    assert "none is suspended" in gpusnap("ps")[1]


def test_what_a_restore_left_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the container is suspended, its record would make it look like an incomplete one."""
    did: list[str] = []

    def recover(key: str, driver: Any, *, remove: bool) -> str:
        did.append(f"recover {key}")
        assert not remove
        return "running: 7"

    def suspend(*_: object, **__: object) -> tuple[Suspension, tuple[()]]:
        did.append("suspend")
        return ONE, ()

    for module, name, made in (
        (settings_file, "load_usable", Settings),
        (suspending, "sweep", lambda path: None),
        (suspending, "choose_driver", lambda driver, *_: driver),
        (suspending, "run_around_suspend", lambda *_: nullcontext()),
        (journal, "list_noted", lambda kind: (ONE.key,)),
        (recover_restore, "recover", recover),
        (suspended_containers, "suspend", suspend),
    ):
        monkeypatch.setattr(module, name, made)
    container: Any = SimpleNamespace(key=ONE.key, annotations={})
    found = podman.Container("1" * 64, "w", "gpusnap-runtime", "running")
    early: Any = SimpleNamespace(driver=FakeDriver, container=SimpleNamespace(container=lambda: found))
    engine: Any = SimpleNamespace(kind="podman")
    suspending.suspend_this((engine, container, None), early)  # type: ignore[arg-type]
    assert did == [f"recover {ONE.key}", "suspend"]


def test_one_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Podman can pause it; a checkpoint is not what was wanted."""
    fake = FakePodman(tmp_path / "podman", monkeypatch)
    fake.has(runtime="crun")
    (fake.folder / "path").write_text("/usr/bin/crun\n")
    with pytest.raises(ContainerError) as caught, podman.Inspection("w") as asked:
        targets.find_running("w", asked)
    assert caught.value.hint.startswith("if it uses no GPU, run podman pause w; otherwise remove it")


def test_a_task_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a slash is none in Podman, so nobody is sent there."""
    FakePodman(tmp_path / "podman", monkeypatch)
    monkeypatch.setattr(targets, "CONTAINERD_ROOT", str(tmp_path))
    with pytest.raises(NotFound) as caught, podman.Inspection("k8s.io/w") as asked:
        targets.find_running("k8s.io/w", asked)
    said = "there is no task w in containerd's namespace k8s.io; see ctr --namespace k8s.io task ls"
    assert caught.value.sentence() == said


def test_a_spill_that_nobody_waits_for(there: list[Suspension], monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in / and has to find gpusnap from there; where it cannot be run, that is a sentence."""
    called: list[list[str]] = []

    def run(argv: list[str], **_: object) -> None:
        called.append(argv)
        if len(called) > 1:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", run)
    monkeypatch.setattr(sys, "argv", ["bin/gpusnap"])
    spill.spill_behind("llama", Asked().by("llama"))
    assert called == [
        [f"{os.getcwd()}/bin/gpusnap", "suspend", "--spill", "--wait", "--suspended", ONE.container],
    ]
    with pytest.raises(
        GpusnapError, match=r"llama is suspended, and stays in RAM: .* cannot be run"
    ) as caught:
        spill.spill_behind("llama", Asked().by("llama"))
    assert "suspend --spill --wait llama" in caught.value.hint
