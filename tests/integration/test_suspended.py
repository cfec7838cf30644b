"""What can be done with a suspended container: checkpoint it, move its memory to the store, swap it in."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import gpuhost
import pytest
import shimhost
import waiting
from conftest import SRC
from holding import held
from storehost import COMMAND, PLAIN, PLAIN_BUT_RUNTIME, STORE, done, empty_store, gpusnap
from support import DEADLINE, GPUS_CONF, Container, faults, good, kill_at, podman, run, sentence, until
from suspendhost import ends_without_a_trace, nothing_left, resumed, suspended, usage

from gpusnap.oci.store.paths import PRECIOUS
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.shim import overrides


@pytest.fixture
def store(crun: None) -> Iterator[Store]:
    """An empty store of this host's."""
    with empty_store(PLAIN) as store:
        yield store


@pytest.fixture
def small_gpus(crun: None) -> Iterator[None]:
    """GPUs with room for one container of 32 MiB, and no more."""
    gpuhost.install(SRC / "softgpu" / "build", GPUS_CONF.replace("memory=2GiB", "memory=48MiB"))
    yield
    podman("rm", "--force", "--all", "--time", "0")
    gpuhost.install(SRC / "softgpu" / "build", GPUS_CONF)


def staged(store: Store) -> list[str]:
    """The folders of those who write to it, or have something there for a while."""
    folder = Path(store.path) / "staging"
    return os.listdir(folder) if folder.exists() else []


def test_checkpoint(real: str, tmp_path: Path) -> None:
    """From RAM: no GPU is touched, the container stays suspended, and both it and the checkpoint go on."""
    with empty_store(f'runtime = "{real}"\n[store]\npath = "{STORE}"\n'):
        container = Container.start("w", "--procs", "2", "--mib", "8", workers=2)
        suspended(container)
        faults("checkpoint result=CUDA_ERROR_UNKNOWN\nrestore result=CUDA_ERROR_UNKNOWN")
        assert "a checkpoint copies it from there" in good(gpusnap("doctor", "w"))
        made = done("checkpoint", "w")
        archive = tmp_path / "w.tar.zst"
        said = gpusnap("checkpoint", "w", "--to", archive)
        assert "w stays suspended" in said.err, said.err
        faults("")
        assert made["memory"] == usage("w")["gpuMemory"]
        assert container.inspect()["State"]["Status"] == "paused"
        assert usage("w")["state"] == "suspended"
        resumed(container)
        nothing_left()
        for what in (made["name"], archive):
            container.remove()
            good(gpusnap("restore", what))
            container = Container("w")
            container.goes_on()


@pytest.mark.parametrize(
    ("word", "script"),
    [
        ("unpause", '/usr/bin/podman "$@"; kill -TERM $PPID; exec sleep 60'),
        ("unpause", "kill -TERM $PPID; exec sleep 60"),
        ("pause", 'kill -TERM $PPID; exec /usr/bin/podman "$@"'),
    ],
    ids=["unpaused", "not unpaused", "paused"],
)
def test_a_checkpoint_is_interrupted(store: Store, tmp_path: Path, word: str, script: str) -> None:
    """Podman shows the container as running for the checkpoint, and as paused afterwards in any case."""
    container = Container.start("w", "--mib", "8")
    suspended(container)
    wrapper = tmp_path / "podman"
    wrapper.write_text(f'#!/bin/sh\ncase $1 in {word}) {script};; esac\nexec /usr/bin/podman "$@"\n')
    wrapper.chmod(0o755)
    said = run(COMMAND, "checkpoint", "w", env={"HOME": "/root", "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert said.code == 128 + signal.SIGTERM
    assert "w stays suspended" in said.err, said.err
    assert "GPS-021" not in said.err
    assert container.inspect()["State"]["Status"] == "paused"
    assert usage("w")["state"] == "suspended"
    assert json.loads(good(gpusnap("recover", "--list", "--json"))) == []
    assert store.entries() == ()
    resumed(container)
    nothing_left()


def test_no_room_for_a_checkpoint(store: Store, tmp_path: Path) -> None:
    """It stays suspended, which the error says, and nothing of the checkpoint is left."""
    container = Container.start("w", "--mib", "8")
    suspended(container)
    small = tmp_path / "small"
    small.mkdir()
    wrapper = tmp_path / "crun"
    wrapper.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" --image-path "*) /usr/bin/crun "$@" || exit;'
        f" head -c 4G /dev/zero > {small}/other 2>/dev/null; exit 0;; esac\n"
        'exec /usr/bin/crun "$@"\n'
    )
    wrapper.chmod(0o755)
    good(run("mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "none", str(small)))
    try:
        shimhost.write_settings(f'runtime = "{wrapper}"\n[store]\npath = "{STORE}"\n')
        said = gpusnap("checkpoint", "w", "--to", f"oci:{small}/store")
        assert said.code != 0
        assert " is full: " in said.err
        assert "stays suspended" in said.err
        assert "to run" not in said.err
        assert "runs again" not in said.err
    finally:
        run("umount", str(small))
    assert usage("w")["state"] == "suspended"
    resumed(container)
    nothing_left()


def test_device_nodes_that_are_taken_away(store: Store) -> None:
    """podman update takes them, with crun; they are back before the driver has to open them again."""
    container = Container.start("w", "--mib", "8")
    suspended(container)
    podman("update", "--cpus", "0.5", "w")
    said = gpusnap("resume", "w")
    assert said.code == 0, said.err
    assert re.search(
        r"note: container w could no longer open .*/dev/nvidia0.*; access was restored \[GPS-217\]", said.err
    )
    container.goes_on()
    podman("update", "--cpus", "0.5", "w")
    said = gpusnap("checkpoint", "--leave-running", "w")
    assert said.code == 0, said.err
    assert "access was restored [GPS-217]" in said.err
    container.goes_on()
    said = gpusnap("checkpoint", "--leave-running", "w")
    assert "GPS-217" not in said.err
    podman("update", "--cpus", "0.5", "w")
    said = gpusnap("suspend", "w")
    assert "container w could no longer open" in said.err
    resumed(container)
    nothing_left()


def test_a_restore_after_an_update(real: str, tmp_path: Path) -> None:
    """Podman keeps rules that forbid all devices; a restore, in place or anew, has those of the devices."""
    with empty_store(f'runtime = "{real}"\n[store]\npath = "{STORE}"\n'):
        container = Container.start("w", "--mib", "8")
        good(podman("update", "--restart=no", "w"))
        config = Path(container.inspect()["OCIConfigPath"])
        rules = json.loads(config.read_text())["linux"]["resources"]["devices"]
        assert not any(each["allow"] for each in rules), "Podman does so no longer"
        done("checkpoint", "w")
        good(gpusnap("restore", "w"))
        container.goes_on()
        done("checkpoint", "w", "--leave-running")
        container.goes_on()
        container.remove()
        good(gpusnap("restore", "w"))
        container = Container("w")
        container.goes_on()
        container.remove()


def test_a_health_check_during_a_checkpoint(store: Store) -> None:
    """It fails, as nothing can run in the container; Podman does not end it for that."""
    checked = ("--health-cmd", "true", "--health-interval", "disable", "--health-retries", "1")
    container = Container.start("w", options=(*checked, "--health-on-failure", "kill"))
    suspended(container)
    with overrides.order(container.id, pages="chunks", asleep=True):
        good(podman("unpause", "w"))  # as for Podman's checkpoint
        failed = podman("healthcheck", "run", "w")
        good(podman("pause", "w"))
    assert "container w is suspended, so its health check fails" in sentence(failed)
    assert container.inspect()["State"]["Health"]["FailingStreak"] == 1
    resumed(container)
    suspended(container)
    with overrides.order(container.id, pages="chunks", asleep=True):
        good(podman("unpause", "w"))
        good(podman("kill", "w"))
    ends_without_a_trace()


def test_a_health_check_that_runs_meanwhile(store: Store, tmp_path: Path) -> None:
    """Podman does not see that it takes too long, and does not end the container."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    options = [
        "-v",
        f"{tmp_path}:{tmp_path}",
        "--health-cmd",
        f"touch {begun}; until test -e {go}; do :; done",
    ]
    options += ["--health-interval", "disable", "--health-retries", "1", "--health-timeout", "10m"]
    container = Container.start("w", options=(*options, "--health-on-failure", "kill"))
    check = ["podman", "--runtime", "gpusnap-runtime", "healthcheck", "run", container.id]
    with waiting.Process(check, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as checking:
        until(begun.exists, "the check has begun")
        suspended(container)
        assert checking.wait(DEADLINE)
    go.touch()
    resumed(container)
    assert container.inspect()["State"]["Health"]["FailingStreak"] == 0


def test_one_that_is_ended_during_its_checkpoint(store: Store, tmp_path: Path) -> None:
    """The checkpoint is made, and nobody says that the container stays suspended."""
    suspended(Container.start("w"))
    real, wrapper = shutil.which("podman"), tmp_path / "podman"
    wrapper.write_text(f'#!/bin/sh\n[ "$1" != pause ] || {real} kill w >&2\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    said = run(COMMAND, "checkpoint", "w", env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert said.code == 0, said.err
    assert "w has stopped; to continue it: gpusnap restore w" in said.err
    assert "GPS-021" not in said.err
    assert len(store.entries()) == 1
    ends_without_a_trace()


def test_plain_podman_does_not_checkpoint_it(crun: None, tmp_path: Path) -> None:
    """Podman refuses a paused container, and our runtime one that would end."""
    container = Container.start("w")
    suspended(container)
    assert podman("container", "checkpoint", "w").code != 0
    assert "a checkpoint leaves it suspended" in sentence(run(*container.line(tmp_path)))
    resumed(container)


def test_a_killed_checkpoint(store: Store, tmp_path: Path) -> None:
    """Podman may take it for one that runs; it stays suspended, and a resume has all of it run."""
    container = Container.start("w")
    suspended(container)
    for recovered in (True, False):
        kill_at_podman(container, tmp_path / str(recovered))
        assert usage("w")["state"] == "suspended"
        if recovered:
            assert "marked as paused in Podman again" in good(gpusnap("recover"))
            assert container.inspect()["State"]["Status"] == "paused"
        resumed(container)
        nothing_left()
        suspended(container)


def kill_at_podman(container: Container, folder: Path) -> None:
    """Kill `gpusnap checkpoint` when Podman has been told that the container runs, and CRIU dumps it."""
    folder.mkdir()
    with (
        held(folder, "crun", "checkpoint", PLAIN_BUT_RUNTIME) as crun,
        waiting.Process(
            [COMMAND, "checkpoint", container.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as command,
    ):
        until(crun.met, "the checkpoint")
        command.kill()
    good(podman("ps", "--all"))  # it answers when nobody is at work on the container


def test_spill(real: str) -> None:
    """RAM is free, the store has it, no gc takes it; it comes back from there, and nothing is left."""
    with empty_store(f'runtime = "{real}"\n[store]\npath = "{STORE}"\n') as store:
        container = Container.start("w", "--procs", "2", "--mib", "8", workers=2)
        suspended(container, "--spill", "--wait")
        found = usage("w")
        assert found["ram"] == 0
        assert found["stored"] >= 2 * 8 << 20
        good(gpusnap("gc"))
        assert len(staged(store)) == 1
        resumed(container)
        nothing_left()
        assert staged(store) == []


def test_spill_in_the_background(store: Store) -> None:
    """Of one that is suspended already, too; the command does not wait for it."""
    container = Container.start("w", "--mib", "8")
    suspended(container)
    assert usage("w")["ram"]
    good(gpusnap("suspend", "--spill", "w"))
    until(lambda: not usage("w")["ram"], "the end of the spill")
    made = done("checkpoint", "w")
    assert usage("w")["stored"]
    resumed(container)
    container.remove()
    nothing_left()
    good(gpusnap("restore", made["name"]))
    Container("w").goes_on()


def test_a_spilled_one_is_removed(store: Store) -> None:
    """And with it what it had in the store."""
    container = Container.start("w")
    suspended(container, "--spill", "--wait")
    container.remove()
    until(lambda: staged(store) == [], "the end of what is in the store")
    nothing_left()


def test_damage_in_the_store(store: Store) -> None:
    """A byte that is wrong is found before the driver sees it, and the container stays suspended."""
    container = Container.start("w", "--mib", "8")
    suspended(container, "--spill", "--wait")
    blobs = sorted(Path(store.path).glob("staging/*/blobs/sha256/*"), key=lambda blob: blob.stat().st_size)
    good_bytes = blobs[-1].read_bytes()
    blobs[-1].chmod(0o600)
    blobs[-1].write_bytes(good_bytes[:-1] + bytes([good_bytes[-1] ^ 1]))
    said = sentence(gpusnap("resume", "w"))
    assert blobs[-1].name in said or "GPS-" in said
    assert usage("w")["state"] in ("suspended", "cut off")
    blobs[-1].write_bytes(good_bytes)
    gpusnap("recover")
    if usage("w")["state"] == "suspended":
        good(gpusnap("resume", "w"))
    container.goes_on()


def test_the_budget(store: Store) -> None:
    """What does not fit is refused with figures, or what was suspended first is spilled."""
    first, second = Container.start("first", "--mib", "32"), Container.start("second", "--mib", "32")
    shimhost.write_settings(PLAIN + '[suspend]\nram = "96M"\n')
    suspended(first)
    said = sentence(gpusnap("suspend", "second"))
    assert "of suspend.ram, 96.0 MiB" in said
    assert "but only " in said
    second.goes_on()
    shimhost.write_settings(PLAIN + '[suspend]\nram = "96M"\nover = "spill"\n')
    suspended(second)
    assert usage("first")["ram"] == 0
    assert usage("first")["stored"]
    assert usage("second")["ram"]
    resumed(first)
    resumed(second)
    nothing_left()


def test_another_gpu(store: Store) -> None:
    """One that sees both comes back on the other, with every byte right; what it does not see is refused."""
    container = Container.start("w", "--gpus", "0")
    suspended(container)
    resumed(container, "--gpu-map", "0=1,1=0")
    assert usage("w")["gpus"] == [1]
    suspended(container)
    container.remove()
    narrow = Container.start("narrow", gpus=("0",))
    suspended(narrow)
    said = sentence(gpusnap("resume", "--gpu-map", "0=1", "narrow"))
    assert "; to move it to GPU 1 of this host: gpusnap checkpoint narrow && podman rm --force narrow" in said
    assert usage("narrow")["state"] == "suspended"
    resumed(narrow)
    suspended(narrow)
    done("checkpoint", "narrow")
    good(podman("rm", "--force", "--time", "0", "narrow"))
    good(gpusnap("restore", "--gpu-map", "0=1", "narrow"))
    assert usage("narrow")["gpus"] == [1]
    Container("narrow").goes_on()


def test_swap(small_gpus: None) -> None:
    """There and back, on one GPU that has room for one of them; what fails is undone."""
    first = Container.start("first", "--mib", "32", gpus=("0",))
    suspended(first)
    second = Container.start("second", "--mib", "32", gpus=("0",))
    swapped = json.loads(good(gpusnap("swap", "second", "first", "--json")))
    assert (swapped["out"]["container"], swapped["in"]["container"]) == ("second", "first")
    first.goes_on()
    assert usage("second")["state"] == "suspended"
    good(gpusnap("swap", "first", "second"))
    second.goes_on()
    faults("restore result=CUDA_ERROR_UNKNOWN count=4")
    said = sentence(gpusnap("swap", "second", "first"))
    faults("")
    gpusnap("resume", "second")
    assert "second" in said
    second.goes_on()
    assert usage("first")["state"] == "suspended"


def test_killed_swap(small_gpus: None) -> None:
    """Nothing is lost: `recover` has each of the two run, or be suspended as a whole."""
    first = Container.start("first", "--mib", "32", gpus=("0",))
    suspended(first)
    second = Container.start("second", "--mib", "32", gpus=("0",))
    out, into = second, first
    for step in ("driver checkpoint", "plan", "driver restore"):
        kill_at(step, [COMMAND, "--debug", "swap", out.name, into.name])
        gpusnap("recover")
        if usage(out.name)["state"] == usage(into.name)["state"] == "suspended":
            good(gpusnap("resume", into.name))
        states = {each.name: usage(each.name)["state"] for each in (first, second)}
        assert sorted(states.values()) == ["running", "suspended"], f"{step}: {states}"
        running = first if states["first"] == "running" else second
        running.goes_on()
        out, into = running, second if running is first else first


def test_a_swap_that_cannot_fit(small_gpus: None) -> None:
    """Is refused before anything is touched."""
    first = Container.start("first", "--mib", "32", gpus=("0",))
    suspended(first)
    second = Container.start("second", "--mib", "8", gpus=("1",))
    third = Container.start("third", "--mib", "32", gpus=("0",))
    said = sentence(gpusnap("swap", "second", "first"))
    assert "no GPU that container first can see fits its GPU 0" in said
    assert "container third uses " in said
    assert said.endswith(": gpusnap swap third first [GPS-401]")
    second.goes_on()
    third.goes_on()


def test_killed_spill(store: Store) -> None:
    """The bytes are in RAM or in the store as a whole, and what was written for nothing goes."""
    container = Container.start("w", "--mib", "8")
    suspended(container)
    for at in ("write", "switch"):
        kill_at(at, [COMMAND, "--debug", "suspend", "--spill", "--wait", "w"])
        assert usage("w")["state"] == "suspended"
    resumed(container)
    nothing_left()
    # One that was killed before it had marked its directory leaves that to gc (oci/store/store.py).
    assert not [name for name in staged(store) if (Path(store.path) / "staging" / name / PRECIOUS).exists()]
    good(gpusnap("gc"))
    assert staged(store) == []


def test_one_that_is_resumed_before_its_spill_begins(store: Store) -> None:
    """The process that moves its memory behind it does not suspend it again."""
    container = Container.start("w", "--mib", "8")
    done = gpusnap("suspend", "--spill", "--wait", "--suspended", "w")
    assert "not suspended" in sentence(done)
    container.goes_on()
    nothing_left()


def test_what_a_killed_spill_leaves_in_ram(store: Store) -> None:
    """Killed when the journal names the store, and the RAM is not free yet: the next one frees it."""
    container = Container.start("w", "--mib", "8")
    suspended(container)
    left = {path: path.read_bytes() for path in Path(tmpfs.FOLDER).glob("*/*")}
    assert left
    good(gpusnap("suspend", "--spill", "--wait", "w"))
    for path, content in left.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert usage("w")["ram"]
    good(gpusnap("suspend", "--spill", "--wait", "w"))
    assert usage("w")["ram"] == 0
    resumed(container)
    nothing_left()


def test_renamed(crun: None) -> None:
    """Podman's name of the day counts, also where another container has the old one."""
    container = Container.start("w")
    suspended(container)
    good(podman("rename", "w", "v"))
    good(podman("run", "-d", "--name", "w", "localhost/base", "sleep", "1000"))
    assert usage("v")["state"] == "suspended"
    assert usage("w") == {}
    assert "the container w is not suspended: it is running" in sentence(gpusnap("resume", "w"))
    resumed(Container("v"))
    nothing_left()


def test_a_swap_whose_command_fails(crun: None) -> None:
    """The one that came in runs; the other one stays suspended, and both are not on the GPU at once."""
    first = Container.start("first", options=("--annotation", "io.gpusnap.post-resume=exit 3"))
    suspended(first)
    second = Container.start("second")
    said = sentence(gpusnap("swap", "second", "first"))
    assert "first is resumed, but the command post-resume of the container first ended with exit" in said
    assert "; first runs, and second is suspended" in said
    first.goes_on()
    assert usage("second")["state"] == "suspended"
    first.remove()
    resumed(second)


def test_a_resume_during_a_checkpoint(store: Store) -> None:
    """Is refused: the checkpoint would have Podman pause it afterwards, as if it were still suspended."""
    container = Container.start("w")
    suspended(container)
    container_id = container.inspect()["Id"]
    with overrides.order(container_id, pages="chunks", asleep=True):  # as a checkpoint does
        assert "another gpusnap checkpoint, suspend or resume" in sentence(gpusnap("resume", "w"))
    with overrides.keep_alone(container_id):  # as a resume does
        assert "another gpusnap checkpoint, suspend or resume" in sentence(gpusnap("checkpoint", "w"))
    assert usage("w")["state"] == "suspended"
    resumed(container)
    nothing_left()
