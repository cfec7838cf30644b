"""Commands that a container names for before its checkpoint and after its restore, in real containers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import waiting
from holding import held
from storehost import COMMAND, SETTINGS, SETTINGS_BUT_RUNTIME, empty_store, gpusnap
from support import DEADLINE, Container, faults, good, kill_at, members, podman, run, sentence, until
from suspendhost import nothing_left

from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.process import proc

# It leaves something running, too, which must not be in the image.
BEFORE = "echo before $GPUSNAP_EVENT >>/log; sleep 1000 & exit 0"
AFTER = "echo after $GPUSNAP_EVENT >>/log"


@pytest.fixture
def store(real: str) -> Iterator[Store]:
    with empty_store(SETTINGS.replace('"crun"', f'"{real}"')) as found:
        yield found


def started(before: str = BEFORE, after: str = AFTER, *options: str) -> Container:
    named = (
        "--annotation",
        f"io.gpusnap.pre-checkpoint={before}",
        "--label",
        f"io.gpusnap.post-restore={after}",
    )
    return Container.start("w", options=(*named, *options))


def log() -> list[str]:
    return good(podman("exec", "w", "cat", "/log")).splitlines()


def test_checkpoint_and_restore(store: Store) -> None:
    """One before and one after; the image has no process of theirs."""
    container = started()
    good(gpusnap("checkpoint", "w"))
    good(gpusnap("restore", "w"))
    container.goes_on()
    assert log() == ["before pre-checkpoint", "after post-restore"]
    assert {proc.comm(pid) for pid in members(container)} == {"gpuwork"}


def test_a_container_that_goes_on(store: Store) -> None:
    """Both, one after the other, and again at the next one."""
    container = started()
    for _ in range(2):
        good(gpusnap("checkpoint", "--leave-running", "w"))
    container.goes_on()
    assert log() == ["before pre-checkpoint", "after post-restore"] * 2


def test_what_fails(store: Store) -> None:
    """The checkpoint, or the command before it: the one after undoes it, and the container runs."""
    container = started()
    faults("checkpoint result=CUDA_ERROR_UNKNOWN")
    try:
        sentence(gpusnap("checkpoint", "w"))
    finally:
        faults("")
    container.goes_on()
    assert log() == ["before pre-checkpoint", "after post-restore"]
    container.remove()
    container = started("echo before >>/log; echo 'it is busy' >&2; exit 3")
    assert "the command pre-checkpoint of the container w ended with exit code 3: it is busy" in sentence(
        gpusnap("checkpoint", "w")
    )
    container.goes_on()
    assert log() == ["before", "after post-restore"]


def test_suspend_and_resume(store: Store) -> None:
    """The other two; a failed one suspends nothing. A checkpoint of what is suspended runs none."""
    options = (
        "--annotation",
        "io.gpusnap.pre-suspend=" + BEFORE,
        "--label",
        "io.gpusnap.post-resume=" + AFTER,
    )
    container = started(BEFORE, AFTER, *options)
    good(gpusnap("suspend", "w"))
    good(gpusnap("checkpoint", "w"))
    good(gpusnap("resume", "w"))
    container.goes_on()
    assert log() == ["before pre-suspend", "after post-resume"]
    assert {proc.comm(pid) for pid in members(container)} == {"gpuwork"}
    container.remove()
    container = started(BEFORE, AFTER, "--annotation", "io.gpusnap.pre-suspend=echo no; exit 4")
    said = sentence(gpusnap("suspend", "w"))
    assert "the command pre-suspend of the container w ended with exit code 4: no" in said
    container.goes_on()


def test_a_deadline(store: Store, tmp_path: Path) -> None:
    """What does not end is killed in the container, with all that it started."""
    container = started("sleep 1000", AFTER, "--annotation", "io.gpusnap.hook-timeout=5")
    assert "pre-checkpoint of the container w did not end within 5 s" in sentence(gpusnap("checkpoint", "w"))
    container.goes_on()
    assert {proc.comm(pid) for pid in members(container)} == {"gpuwork"}


# It says that it has begun, and ends when nobody waits for it any more.
ENDLESS = "echo before >>/log; sleep 1000"
WHY = "gpusnap was killed before its command "


def count(line: str) -> int:
    return podman("exec", "w", "cat", "/log").out.splitlines().count(line)


def kill_while_it_runs(*words: str, line: str = "before") -> None:
    """Kill a gpusnap when a command in the container has said that it has begun."""
    earlier = count(line)
    with waiting.Process([COMMAND, *words], stderr=subprocess.PIPE, text=True) as child:
        until(lambda: count(line) > earlier or child.poll() is not None, "the command in the container")
        child.kill()
        waiting.communicate(child, DEADLINE)


def test_killed_while_the_one_before_runs(store: Store) -> None:
    """`recover` ends it, and runs the one after, once."""
    container = started(ENDLESS)
    kill_while_it_runs("checkpoint", "w")
    said = f"w ({container.id[:12]})  {WHY}post-restore: gpusnap recover runs it"
    assert said in good(gpusnap("recover", "--list")).splitlines()
    (found,) = json.loads(good(gpusnap("recover", "--list", "--json")))
    assert (found["container"], found["kind"], found["name"]) == (container.id, "command", "w")
    assert log() == ["before"]
    assert "its command post-restore was run" in good(gpusnap("recover", "w"))
    assert log() == ["before", "after post-restore"]
    assert {proc.comm(pid) for pid in members(container)} == {"gpuwork"}
    good(gpusnap("recover"))
    assert log() == ["before", "after post-restore"]
    container.goes_on()
    nothing_left()


@pytest.mark.parametrize("then", ["recover", "checkpoint"])
def test_killed_at_the_dump(store: Store, real: str, tmp_path: Path, then: str) -> None:
    """With its runtime, or all of it: `recover` undoes the checkpoint, then runs the one after."""
    container = started()
    with held(tmp_path, real, "checkpoint", SETTINGS_BUT_RUNTIME) as runtime:
        words = [COMMAND, "checkpoint", "w", "--leave-running"]
        child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        until(runtime.met, "the dump")
        child.kill()
        os.kill(runtime.caller, 9)
        runtime.let_go()
        waiting.communicate(child, DEADLINE)
    until(lambda: not run("pgrep", "-x", "podman").out, "the end of Podman")
    if then == "recover":
        said = good(gpusnap("recover"))
        assert f"w ({container.id[:12]})  its command post-restore was run" in said
    else:
        good(gpusnap("recover", "--list"))
        good(gpusnap("recover"))
        good(gpusnap("checkpoint", "w", "--leave-running"))
    container.goes_on()
    assert log()[:2] == ["before pre-checkpoint", "after post-restore"]
    good(gpusnap("recover"))
    nothing_left()


def test_the_checkpoint_is_complete_all_the_same(store: Store, real: str, tmp_path: Path) -> None:
    """Podman and its runtime go on: the one after is due when the container is restored, by whom ever."""
    container = started()
    with held(tmp_path, real, "checkpoint", SETTINGS_BUT_RUNTIME) as runtime:
        child = subprocess.Popen([COMMAND, "checkpoint", "w"], stderr=subprocess.PIPE, text=True)
        until(runtime.met, "the dump")
        child.kill()
        runtime.let_go()
        waiting.communicate(child, DEADLINE)
    until(lambda: not run("pgrep", "-x", "podman").out, "the end of Podman")
    said = good(gpusnap("recover"))
    later = "gpusnap restore runs it; after podman container restore w, gpusnap recover does"
    assert f"w ({container.id[:12]})  {WHY}post-restore: {later}" in said
    good(podman("container", "restore", "w"))
    assert log() == ["before pre-checkpoint"]
    assert "its command post-restore was run" in good(gpusnap("recover"))
    container.goes_on()
    assert log() == ["before pre-checkpoint", "after post-restore"]
    nothing_left()


def test_it_ends_after_the_kill(store: Store) -> None:
    """Nothing is due in a container that was started anew, or is gone."""
    container = started(ENDLESS)
    kill_while_it_runs("checkpoint", "w")
    good(podman("restart", "--time", "0", "w"))
    good(gpusnap("recover"))
    assert log() == ["before"]
    nothing_left()
    good(podman("exec", "w", "rm", "/log"))
    kill_while_it_runs("checkpoint", "w")
    container.remove()
    good(gpusnap("recover"))
    nothing_left()


SUSPENDS = ("--annotation", "io.gpusnap.pre-suspend=" + BEFORE, "--label", "io.gpusnap.post-resume=" + AFTER)


def test_a_killed_suspend_and_a_killed_resume(store: Store) -> None:
    """The one after a resume is run when the suspend is undone, or the resume complete."""
    container = started(BEFORE, AFTER, *SUSPENDS)
    kill_at("driver checkpoint", [COMMAND, "--debug", "suspend", "w"])
    good(gpusnap("recover"))
    container.goes_on()
    assert log() == ["before pre-suspend", "after post-resume"]
    nothing_left()
    good(gpusnap("suspend", "w"))
    kill_at("driver restore", [COMMAND, "--debug", "resume", "w"])
    good(gpusnap("recover"))
    container.goes_on()
    assert log() == ["before pre-suspend", "after post-resume"] * 2
    nothing_left()


def test_killed_while_the_one_after_a_restore_runs(store: Store) -> None:
    """`recover` ends it, and runs it again, as often as it takes."""
    container = started(BEFORE, "echo after >>/log; [ -e /good ] || sleep 1000")
    good(gpusnap("checkpoint", "w"))
    kill_while_it_runs("restore", "w", line="after")
    kill_while_it_runs("recover", line="after")
    good(podman("exec", "w", "touch", "/good"))
    good(gpusnap("recover"))
    container.goes_on()
    assert log()[-1] == "after"
    assert {proc.comm(pid) for pid in members(container)} == {"gpuwork"}
    nothing_left()


# It asks the host for something, and waits for the answer.
ASKS = "rm -f /agent/done; touch /agent/asked; until [ -e /agent/done ]; do sleep 0.02; done"


def test_they_ask_for_gpusnap(store: Store, tmp_path: Path) -> None:
    """A command may call gpusnap, by an agent of the host's; but for its own container it is refused."""
    Container.start("other", gpus=("0",))
    options = ("-v", f"{tmp_path}:/agent", "--annotation", "io.gpusnap.hook-timeout=120")
    suspends = (
        "--annotation",
        f"io.gpusnap.pre-suspend={ASKS}",
        "--annotation",
        f"io.gpusnap.post-resume={ASKS}",
    )
    container = started(ASKS, ASKS, *options, *suspends)
    for words in (["checkpoint"], ["restore"], ["suspend"], ["resume"]):
        child = subprocess.Popen([COMMAND, *words, "w"], stderr=subprocess.PIPE, text=True)
        until((tmp_path / "asked").exists, "the command in the container")
        for refused in ("checkpoint", "suspend"):
            said = sentence(gpusnap(refused, "w"))
            assert "in progress; wait until it has finished; a command of the container itself" in said
        assert "nothing to recover" in gpusnap("recover").err
        good(gpusnap("checkpoint", "other", "--leave-running"))
        (tmp_path / "asked").unlink()
        (tmp_path / "done").touch()
        said = waiting.communicate(child, DEADLINE)[1]
        assert child.returncode == 0, said
    container.goes_on()
    nothing_left()
