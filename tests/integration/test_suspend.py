"""`gpusnap suspend` and `resume`: a container off its GPUs, kept in RAM, and back."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gpuhost
import pytest
import waiting
from conftest import SRC
from holding import Held, held
from storehost import COMMAND, done, gpusnap
from support import (
    DEADLINE,
    GPUS_CONF,
    RUNTIME,
    STATE,
    Container,
    faults,
    good,
    kill_at,
    members_of,
    podman,
    run,
    sentence,
    until,
)
from suspendhost import (
    ends_without_a_trace,
    gpu_memory,
    is_suspended,
    nothing_left,
    resumed,
    suspended,
    usage,
)

from gpusnap.engines import podman as engine
from gpusnap.runtime_shim.base.errors import AlreadyPaused
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.records import journal, reservations, suspensions

SUSPEND_STEPS = ("inspect", "pause", "look", "hold", "lock", "driver checkpoint", "pages", "freeze")
MOMENTS = 8
RESUME_STEPS = ("plan", "hold", "driver restore", "freeze", "let go", "go on")


@pytest.fixture
def small_gpus(crun: None) -> Iterator[None]:
    """GPUs with room for one container of 32 MiB, and no more."""
    gpuhost.install(SRC / "softgpu" / "build", GPUS_CONF.replace("memory=2GiB", "memory=48MiB"))
    yield
    podman("rm", "--force", "--all", "--time", "0")
    gpuhost.install(SRC / "softgpu" / "build", GPUS_CONF)


def test_there_and_back(real: str) -> None:
    """Twice in a row: the GPUs are free meanwhile, no tick is left out, and nothing is left in the end."""
    container = Container.start("w", "--procs", "2", "--mib", "8", workers=2)
    assert usage("w")["state"] == "running"
    for _ in range(2):
        before = usage("w")["gpuMemory"]
        suspended(container)
        log = container.log()
        found = usage("w")
        assert found["gpuMemory"] == before
        assert found["ram"] >= 2 * 8 << 20
        assert (found["stored"], found["engine"]) == (0, "podman")
        assert gpu_memory() == 0
        assert container.log() == log
        resumed(container)
        nothing_left()
    assert usage("w")["state"] == "running"


def test_unpause_is_refused(real: str) -> None:
    """In one sentence that names the command; the container stays as it is, and can be resumed."""
    container = Container.start("w")
    suspended(container)
    said = sentence(podman("unpause", "w"))
    assert "container w is suspended" in said
    assert "gpusnap resume w" in said
    assert "is already suspended; gpusnap resume w resumes it" in sentence(gpusnap("suspend", "w"))
    assert usage("w")["state"] == "suspended"
    resumed(container)
    good(podman("pause", "w"))
    good(podman("unpause", "w"))
    container.goes_on()


def test_a_pause_of_somebody_else(crun: None) -> None:
    """Between our look and our own pause: it stays, and the suspend says whose it is."""
    container = Container.start("w")
    good(podman("pause", "w"))
    with pytest.raises(AlreadyPaused, match="was paused by another process"):
        engine.pause(container.inspect()["Id"])
    good(podman("unpause", "w"))
    container.goes_on()


def test_unpause_while_it_is_suspended(real: str) -> None:
    """Podman has it as paused; its runtime must not be about to thaw it when the suspend is done."""
    container = Container.start("w")
    faults("checkpoint hang=600000")
    with waiting.Process([COMMAND, "suspend", "w"], stdin=subprocess.DEVNULL) as suspend:
        until(lambda: container.inspect()["State"]["Status"] == "paused", "the pause")
        said = sentence(podman("unpause", "w"))
        faults("")
    assert suspend.returncode == 0
    assert "container w is being suspended; wait until that has finished, then run gpusnap resume w" in said
    assert container.inspect()["State"]["Status"] == "paused"
    assert is_suspended(container)
    resumed(container)


@pytest.mark.parametrize("words", [("rm", "--force", "--time", "0", "w"), ("kill", "w")], ids=["rm", "kill"])
def test_the_end_of_a_suspended_container(real: str, words: tuple[str, ...]) -> None:
    """What was kept for it goes with it."""
    container = Container.start("w")
    suspended(container)
    good(podman(*words))
    ends_without_a_trace()
    assert usage("w") == {}


@pytest.mark.parametrize("way", ["suspend", "resume"])
def test_the_end_in_the_middle(crun: None, way: str) -> None:
    """Is no success; nothing is left."""
    container = Container.start("w")
    if way == "resume":
        suspended(container)
    faults(f"{'checkpoint' if way == 'suspend' else 'restore'} hang=600000")
    with waiting.Process([COMMAND, way, "w"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as command:
        assert command.stderr is not None
        stage = {"suspend": "suspending", "resume": "resuming"}[way]
        until(lambda: stages() == [stage] and paused(container), "the middle")
        killed = podman("kill", "w")  # which waits 5 s for the end; on a busy machine, that may be too short
        assert killed.code == 0 or "timed out waiting for file" in killed.err
        faults("")
        said = command.stderr.read().decode()
    assert command.returncode == 1, said
    assert way == "suspend" or "container w exited while it was resumed" in said
    assert usage("w") == {}
    ends_without_a_trace()


def stages() -> list[str]:
    """How far what is suspended is."""
    return [each.stage.value for each in suspensions.find()]


def paused(container: Container) -> bool:
    """Whether Podman has it so."""
    return str(container.inspect()["State"]["Status"]) == "paused"


# `gpusnap resume w` that gets a SIGTERM when the driver has given the memory back.
_ASKED_LATE = """
import os, signal, sys
from gpusnap.cli.entry import main
from gpusnap.runtime_shim.snapshot.records.reservations import GpuClaim
from gpusnap.runtime_shim.snapshot.suspended_containers import resume

back, leave = [], GpuClaim._leave

def bring_back(*words, before=resume._bring_back, **named):
    before(*words, **named)
    back.append(True)

def leave_it(claim):
    leave(claim)
    if back:
        os.kill(os.getpid(), signal.SIGTERM)

resume._bring_back, GpuClaim._leave = bring_back, leave_it
sys.argv = ["gpusnap", "resume", "w"]
sys.exit(main())
"""


def test_asked_to_stop_when_the_memory_is_back(crun: None) -> None:
    """Nothing of that is undone any more, so the resume goes on to its end."""
    container = Container.start("w")
    suspended(container)
    good(run(sys.executable, "-c", _ASKED_LATE))
    container.goes_on()
    nothing_left()


def test_an_end_that_nobody_saw(crun: None) -> None:
    """Its processes are killed, and the runtime that would have cleaned up: the next command does."""
    container = Container.start("w")
    suspended(container)
    init = container.pid
    found = next(iter(suspensions.find()))
    os.kill(init, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{init}").exists(), "its end")
    until(lambda: container.inspect()["State"]["Status"] == "exited", "Podman's clean-up")
    suspensions.write(found)  # as if the runtime had never been asked to delete it
    assert usage("w") == {}
    nothing_left()


def test_a_worker_that_is_killed(crun: None) -> None:
    """While the container is suspended: a resume brings the others back, and says which one is gone."""
    container = Container.start("w", "--procs", "2", workers=2)
    suspended(container)
    worker = next(iter(suspensions.find())).processes[-1]
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: not proc.is_same(worker.pid, worker.start), "its end")
    said = gpusnap("resume", "w")
    assert said.code == 0, said.err
    assert f"process {worker.pid} of container w (PID {worker.inner_pid} in it) was killed while" in said.err
    nothing_left()


def test_the_thawed_by_hand_stand_on(crun: None) -> None:
    """Whoever thaws the cgroup lets no GPU process run, and the container can be resumed."""
    container = Container.start("w", "--procs", "2", workers=2)
    init = container.pid
    groups = Path(f"/proc/{init}/cgroup").read_text().splitlines()
    group = Path("/sys/fs/cgroup" + next(line.split(":", 2)[2] for line in groups if line.startswith("0::")))
    suspended(container)
    frozen = [each for each in (group, group.parent) if (each / "cgroup.freeze").read_text().strip() == "1"]
    for each in frozen:
        (each / "cgroup.freeze").write_text("0")
    assert frozen
    resumed(container)


def test_no_room_on_the_gpu(small_gpus: None) -> None:
    """A resume is refused with the reasons before anything changes, and succeeds when there is room."""
    container = Container.start("w", "--mib", "32", gpus=("0",))
    suspended(container)
    other = Container.start("other", "--mib", "32", gpus=("0",))
    said = sentence(gpusnap("resume", "w"))
    assert "no GPU that container w can see fits its GPU 0" in said
    assert "free" in said
    assert "container other uses " in said
    assert said.endswith(": gpusnap swap other w [GPS-401]")
    assert usage("w")["state"] == "suspended"
    other.goes_on()
    other.remove()
    resumed(container)
    nothing_left()


@contextmanager
def dumping(container: Container, folder: Path) -> Iterator[tuple[Held, subprocess.Popen[str]]]:
    """A checkpoint, into the directory `image` there, that waits before its dump until it is let go."""
    line = [RUNTIME, "checkpoint", "--leave-running", "--image-path", str(folder / "image")]
    line += ["--work-path", str(folder), container.id]
    with (
        held(folder, "crun", "checkpoint", "") as runtime,
        waiting.Process(line, stderr=subprocess.PIPE, text=True) as shim,
    ):
        until(runtime.met, "the dump")
        yield runtime, shim


@pytest.mark.parametrize("for_good", [False, True], ids=["for a moment", "for good"])
def test_somebody_takes_the_memory_during_a_checkpoint(
    small_gpus: None, tmp_path: Path, for_good: bool
) -> None:
    """The driver is not asked to restore what has no room, which could end it: gpusnap waits, or says so."""
    container = Container.start("w", "--mib", "32", gpus=("0",))
    with dumping(container, tmp_path) as (runtime, shim):
        other = Container.start("other", "--mib", "32", gpus=("0",))
        runtime.let_go()
        until(lambda: is_waiting_for_room(tmp_path, shim), "the end of the dump")
        if not for_good:
            other.remove()
        said = shim.communicate(timeout=60)[1]
    if not for_good:
        assert (shim.returncode, "free memory" in said) == (0, False), said
        container.goes_on()
        return
    assert shim.returncode != 0
    assert "GPU 0 has not enough free memory for the container to continue (1" in said
    assert f"the checkpoint in {tmp_path / 'image'} is complete" in said
    other.goes_on()
    other.remove()
    assert f"{container.name}" in good(gpusnap("recover", container.id))
    container.goes_on()


def test_a_resume_during_a_checkpoint(small_gpus: None, tmp_path: Path) -> None:
    """It is refused the memory that a container will need again after its dump."""
    other = Container.start("other", "--mib", "32", gpus=("0",))
    suspended(other)
    container = Container.start("w", "--mib", "32", gpus=("0",))
    with dumping(container, tmp_path) as (runtime, shim):
        said = sentence(gpusnap("resume", "other"))
        runtime.let_go()
        failed = shim.communicate(timeout=60)[1]
    assert shim.returncode == 0, failed
    assert "reserved by another restore or checkpoint; " in said
    container.goes_on()
    container.remove()
    resumed(other)
    nothing_left()


@pytest.mark.parametrize("then", ["recover", "ends"])
def test_a_resume_after_a_killed_checkpoint(small_gpus: None, tmp_path: Path, then: str) -> None:
    """The memory waits for the container until it has it again, which `recover` sees to, or has ended."""
    other = Container.start("other", "--mib", "32", gpus=("0",))
    suspended(other)
    container = Container.start("w", "--mib", "32", gpus=("0",))
    with dumping(container, tmp_path) as (runtime, shim):
        os.kill(runtime.caller, signal.SIGKILL)
        runtime.let_go()
        shim.communicate(timeout=60)
    assert "reserved by another restore or checkpoint; " in sentence(gpusnap("resume", "other"))
    if then == "recover":
        good(gpusnap("recover", container.id))
        assert reservations.read_reserved() == {}
        container.goes_on()
    container.remove()
    assert reservations.read_reserved() == {}
    resumed(other)
    good(gpusnap("recover"))
    nothing_left()


def is_waiting_for_room(folder: Path, shim: subprocess.Popen[str]) -> bool:
    """Whether CRIU has dumped the container, so that its GPU state comes next; or gpusnap has ended."""
    log = folder / "dump.log"
    return shim.poll() is not None or (log.exists() and "Dumping finished successfully" in log.read_text())


@pytest.mark.parametrize("real", ["runc"], indirect=True)
def test_a_driver_that_fails(real: str) -> None:
    """A checkpoint of the driver's that fails is undone; so is a restore, and the next one succeeds."""
    container = Container.start("w")
    faults("checkpoint result=CUDA_ERROR_UNKNOWN")
    assert "could not" in sentence(gpusnap("suspend", "w"))
    faults("")
    assert container.inspect()["State"]["Status"] == "running"
    container.goes_on()
    nothing_left()
    suspended(container)
    faults("restore result=CUDA_ERROR_UNKNOWN")
    assert "could not" in sentence(gpusnap("resume", "w"))
    assert usage("w")["state"] == "suspended"
    faults("")
    resumed(container)
    nothing_left()


def test_a_container_without_a_gpu(crun: None) -> None:
    """Is refused, and not paused."""
    good(podman("run", "-d", "--name", "w", "localhost/base", "sleep", "1000"))
    assert "uses a GPU" in sentence(gpusnap("suspend", "w"))
    assert Container("w").inspect()["State"]["Status"] == "running"


def test_two_at_once(crun: None) -> None:
    """While one gpusnap is at work on a container, another is refused."""
    container = Container.start("w")
    suspended(container)
    key = next(iter(suspensions.find())).key
    with journal.hold(key):
        assert "another gpusnap is still working" in sentence(gpusnap("resume", "w"))
    resumed(container)


def test_several(crun: None) -> None:
    """Each on its own; one that is not there fails alone."""
    first, second = Container.start("first"), Container.start("second")
    said = gpusnap("suspend", "first", "none", "second", "--json")
    assert said.code != 0
    assert "there is no container none" in said.err
    assert {each["name"]: each["state"] for each in done("ps")["containers"]} == {
        "first": "suspended",
        "second": "suspended",
    }
    assert good(gpusnap("ps", "--quiet")).splitlines() == ["first", "second"]
    good(gpusnap("resume", "first", "second"))
    first.goes_on()
    second.goes_on()


# Its runtime is asked to pause and to go on, which the first test here does with both: one of them each.
@pytest.mark.parametrize("real", ["crun"], indirect=True)
def test_killed_suspend(real: str) -> None:
    """At each step: `recover` has the container run on; nothing is lost, and it can be suspended then."""
    container = Container.start("w", "--procs", "2", workers=2)
    for step in SUSPEND_STEPS:
        kill_at(step, [COMMAND, "--debug", "suspend", "w"])
        gpusnap("recover")
        if step == SUSPEND_STEPS[-1] and is_suspended(container):
            good(gpusnap("resume", "w"))  # it was quicker than we, and had done all that a suspend does
        assert container.inspect()["State"]["Status"] == "running", step
        container.goes_on()
        nothing_left()
    suspended(container)
    resumed(container)


@pytest.mark.parametrize("real", ["runc"], indirect=True)
def test_killed_resume(real: str) -> None:
    """At each step: `recover` finishes it, or leaves it suspended where nothing had begun."""
    container = Container.start("w", "--procs", "2", workers=2)
    for step in RESUME_STEPS:
        suspended(container)
        kill_at(step, [COMMAND, "--debug", "resume", "w"])
        begun = not is_suspended(container)
        assert begun or step == "plan"  # killed there, it may have come to what it does before its next step
        gpusnap("recover")
        assert is_suspended(container) is not begun
        if not begun:
            good(gpusnap("resume", "w"))
        assert container.inspect()["State"]["Status"] == "running", step
        container.goes_on()
        nothing_left()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_suspend_that_ends_before_its_podman_begins(
    crun: None, tmp_path: Path, number: signal.Signals
) -> None:
    """By a signal: `recover`, or its own undo, does not have the container paused afterwards."""
    container = Container.start("w")
    late = tmp_path / "podman"
    late.write_text(
        f"""#!/bin/sh
[ "$1" != pause ] || {{ : >{tmp_path}/begun; until [ -e {tmp_path}/go ]; do sleep 0.02; done; }}
exec /usr/bin/podman "$@"
"""
    )
    late.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with begin("suspend", "w", env=environment) as command:
        until((tmp_path / "begun").exists, "podman pause")
        command.send_signal(number)
        if number is signal.SIGINT:
            lets_go_on(command, tmp_path / "go")
    if number is signal.SIGKILL:
        with begin("recover") as command:
            lets_go_on(command, tmp_path / "go")
    assert container.inspect()["State"]["Status"] == "running"
    container.goes_on()
    nothing_left()


def begin(*words: str, env: dict[str, str] | None = None) -> waiting.Process:
    """A gpusnap that goes on meanwhile."""
    return waiting.Process([COMMAND, *words], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env)


def lets_go_on(command: subprocess.Popen[bytes], go: Path) -> None:
    """Have Podman begin once a command says that it waits for it, and wait for the command's end."""
    assert command.stderr is not None
    assert select.select([command.stderr], [], [], DEADLINE)[0], "it does not say that it waits"
    said = command.stderr.readline().decode()
    go.touch()
    waiting.communicate(command, DEADLINE)
    assert "waiting for podman pause of the container" in said


@pytest.mark.parametrize("way", ["suspend", "resume"])
def test_killed_while_the_driver_has_a_lock(crun: None, way: str) -> None:
    """Its thread stands with that until it is let run: before, `recover` asks nobody who waits for it."""
    container = Container.start("w", "--procs", "2", workers=2)
    init = container.pid
    if way == "resume":
        suspended(container)
    faults(f"{'checkpoint' if way == 'suspend' else 'restore'} hang=600000 keeps-gpu count=1")
    with waiting.Process([COMMAND, way, "w"], stdin=subprocess.DEVNULL) as command:
        until(lambda: keeps_gpu(init), "the driver's lock")
        command.kill()
    faults("")
    assert keeps_gpu(init)
    said = run(COMMAND, "recover", seconds=DEADLINE)
    assert said.code == 0, said.err
    container.goes_on()
    nothing_left()


def keeps_gpu(init: int) -> bool:
    """Whether a process of a container, given by its init, has the lock of a GPU (softgpu/src/store.h)."""
    for pid in members_of(init):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                locks = Path(f"/proc/{pid}/fdinfo/{file.name}").read_text()
                if file.readlink().parent == STATE / "mem" and "FLOCK" in locks:
                    return True
    return False


def test_killed_at_any_moment(crun: None) -> None:
    """Of a suspend or a resume, within the time that one takes: `recover` and a resume have it run on."""
    container = Container.start("w", "--procs", "2", workers=2)
    began = time.monotonic()
    suspended(container)
    seconds = time.monotonic() - began
    for number in range(MOMENTS):
        command = "resume" if is_suspended(container) else "suspend"
        moment = random.uniform(0.2, 1.0) * seconds
        with waiting.Process(
            [COMMAND, command, "w"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(moment)
            process.kill()
        gpusnap("recover")
        if is_suspended(container) and number % 2:
            good(gpusnap("resume", "w"))
        if not is_suspended(container):
            container.goes_on()
            nothing_left()
    if is_suspended(container):
        good(gpusnap("resume", "w"))
    assert usage("w")["state"] == "running"
    container.goes_on()
    nothing_left()
