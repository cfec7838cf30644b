"""Several checkpoints of a container that goes on: labels, history, prune, and a restore of what stayed."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import shimhost
import waiting
from storehost import COMMAND, PLAIN, STORE, done, empty_store
from support import Container, good, run, until

from gpusnap.oci.store.store import Store

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Debian's, Fedora's.
QUADLET = ("/usr/libexec/podman/quadlet", "/usr/lib/podman/quadlet")


@pytest.fixture(autouse=True)
def store(crun: None) -> Iterator[Store]:
    """This host's, empty, gone afterwards."""
    with empty_store(PLAIN) as made:
        yield made


def test_keep_the_last(store: Store, tmp_path: Path) -> None:
    """Of three checkpoints the first goes, with its blobs, and the last one is restored byte by byte."""
    shimhost.write_settings(f'{PLAIN}[metrics]\ntextfile = "{tmp_path}"\n')
    container = Container.start("w", "--mib", "8")
    for step in ("1", "2", "3"):
        done("checkpoint", "w", "--leave-running", "--label", f"step={step}")
        container.goes_on()
        until(lambda: datetime.now(UTC).strftime("%S") != stamp(store), "another second, another name")
    found = done("history", "w")["checkpoints"]
    assert [each["labels"] for each in found] == [{"step": "1"}, {"step": "2"}, {"step": "3"}]
    assert all(0 < each["pause"] < 60 and each["driver"].startswith("nvidia ") for each in found)
    assert found[0]["new"] == found[0]["size"]
    assert 0 < found[1]["new"] <= found[1]["size"]
    pruned = done("prune", "w", "--keep-last", "2", "--gc")
    assert [each["reasons"] for each in pruned["checkpoints"]] == [[], ["last"], ["last"]]
    assert pruned["collected"]["blobs"] > 0
    assert done("prune", "w", "--keep-last", "2", "--dry-run")["collected"] is None
    assert [each["damaged"] for each in done("verify", "--all")] == [[]]
    container.remove()
    good(run(COMMAND, "restore", "w"))
    restored = Container("w")
    restored.goes_on()
    restored.remove()
    metrics = (tmp_path / "gpusnap.prom").read_text()
    assert 'gpusnap_checkpoints_total{container="w"} 3\n' in metrics
    assert 'gpusnap_restores_total{container="w"} 1\n' in metrics
    assert f'gpusnap_checkpoint_pause_seconds{{container="w"}} {found[-1]["pause"]}\n' in metrics


def test_what_a_timer_runs(store: Store) -> None:
    """The two commands of the service, as its file has them, twice: the container goes on, one is kept."""
    container = Container.start("w", "--mib", "8")
    unit = good(run(COMMAND, "schedule", "w", "--every", "30m", "--keep-last", "1", "--dry-run"))
    commands = [
        shlex.split(line.partition("=")[2]) for line in unit.splitlines() if line.startswith("ExecStart=")
    ]
    assert len(commands) == 2
    for _ in range(2):
        for command in commands:
            good(run(*command))
        container.goes_on()
        until(lambda: datetime.now(UTC).strftime("%S") != stamp(store), "another second, another name")
    assert len([each for each in store.entries() if each.name]) == 1
    container.remove()


def stamp(store: Store) -> str:
    """The seconds in the names of checkpoints."""
    return max(each.name for each in store.entries())[-2:]


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that writes down what it is asked, as nothing else could start a unit here; its notes."""
    notes = tmp_path / "asked"
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\necho "$*" >>{notes}\n')
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/local/bin:{os.environ['PATH']}")
    return notes


def test_boot_and_shutdown(store: Store, systemctl: Path) -> None:
    """examples/quadlet: without a checkpoint the unit starts; after a shutdown the container goes on."""
    script = str(EXAMPLES / "quadlet/keep.sh")
    good(run(script, "start", "w", "w.service"))
    assert systemctl.read_text() == "start w.service\n"
    Container.start("w", "--mib", "8")
    good(run(script, "stop", "w"))
    assert good(run("podman", "ps", "--all", "--quiet")) == ""
    good(run(script, "start", "w", "w.service"))
    assert systemctl.read_text() == "start w.service\n"
    container = Container("w")
    container.goes_on()
    assert {each.name for each in store.entries()} == {"w:restored"}
    container.remove()
    good(run(script, "start", "w", "w.service"))
    assert systemctl.read_text() == "start w.service\n" * 2
    good(run(script, "stop", "w"))


def test_boot_without_a_shutdown(store: Store, systemctl: Path) -> None:
    """examples/quadlet: after a crash a container with a checkpoint NAME:warm starts from that, each time."""
    script = str(EXAMPLES / "quadlet/keep.sh")
    container = Container.start("w", "--mib", "8")
    good(run(COMMAND, "checkpoint", "--leave-running", "--name", "w:warm", "w"))
    for _ in range(2):
        container.remove()
        good(run(script, "start", "w", "w.service"))
        container = Container("w")
        container.goes_on()
    assert not systemctl.exists()
    assert {each.name for each in store.entries()} == {"w:warm"}
    container.remove()


def test_boot_without_gpusnap(store: Store, systemctl: Path, tmp_path: Path) -> None:
    """examples/quadlet: where gpusnap is not found nothing starts anew, and nothing is removed."""
    container, away = Container.start("w", "--mib", "8"), tmp_path / "away"
    shutil.move(COMMAND, away)
    try:
        for words in (("start", "w", "w.service"), ("stop", "w")):
            done = run(str(EXAMPLES / "quadlet/keep.sh"), *words)
            assert done.code == 1
            assert done.err.startswith("keep.sh: gpusnap is not found in ")
    finally:
        shutil.move(away, COMMAND)
    assert not systemctl.exists()
    container.goes_on()
    container.remove()


def test_quadlet_takes_the_example(host: None) -> None:
    """Podman's generator makes a service of it that runs the container by gpusnap-runtime."""
    quadlet = next((each for each in QUADLET if os.path.exists(each)), None)
    if quadlet is None:
        pytest.skip("needs Quadlet")
    made = good(run("env", f"QUADLET_UNIT_DIRS={EXAMPLES}/quadlet", quadlet, "-dryrun"))
    (line,) = (line for line in made.splitlines() if line.startswith("ExecStart="))
    assert "--runtime=gpusnap-runtime run " in line
    assert "--device=nvidia.com/gpu=0" in line or "--device nvidia.com/gpu=0" in line


def is_caught(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal: proc_pid_status(5), SigCgt."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("way", ["file", "signal"])
def test_preemption(store: Store, systemctl: Path, tmp_path: Path, way: str) -> None:
    """examples/preemption: nothing happens before the notice; then the checkpoint is where it shall be."""
    container = Container.start("w", "--mib", "8")
    notice, other = tmp_path / "notice", f"oci:{STORE}"
    words = ["-f", str(notice)] if way == "file" else ["-s"]
    script = [str(EXAMPLES / "preemption/preempt.sh"), "-t", "120", "-o", f"{other}:w", *words, "w"]
    with waiting.Process(script, stderr=subprocess.PIPE, text=True) as process:
        container.goes_on()
        assert process.poll() is None
        if way == "file":
            notice.touch()
        else:
            until(lambda: is_caught(process.pid, signal.SIGUSR1), "the script listens")
            process.send_signal(signal.SIGUSR1)
        _, said = waiting.communicate(process, 180)
    assert process.returncode == 0, said
    assert said.startswith("preempt.sh: w has 120 s\n")
    container.remove()
    good(run(COMMAND, "restore", f"{other}:w"))
    restored = Container("w")
    restored.goes_on()
    restored.remove()


def test_a_report(store: Store, tmp_path: Path) -> None:
    """Of a real checkpoint: all parts are there, and no argument of the program is."""
    container = Container.start("w", "--mib", "8")
    done("checkpoint", "w", "--leave-running")
    text = good(run(COMMAND, "report", "--last", "-o", "-"))
    assert "not available: " not in text
    assert "\nCRIU: 4" in text
    assert "  driver checkpoint" in text
    assert "\n-- dump.log\n" in text  # which Podman removes where the dump succeeded
    assert "--mib" not in text
    container.remove()
