"""What gpusnap writes for systemd, and the examples for it, under a systemd that runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import SRC
from storehost import COMMAND, STORE, empty_store
from support import GPUWORK, good, run, until
from systemdhost import SYSTEMD, Machine, booted

from gpusnap.oci.store.store import Store

pytestmark = pytest.mark.skipif(not SYSTEMD.exists(), reason="needs systemd in the tree")

EXAMPLES = SRC / "examples"
UNITS = Path("/etc/systemd/system")
QUADLETS = Path("/etc/containers/systemd")
SCRIPTS = Path("/usr/local/lib/gpusnap")
QUADLET = "/usr/libexec/podman/quadlet"
TIMER = "gpusnap-checkpoint-w"


@pytest.fixture
def store(crun: None) -> Iterator[Store]:
    """An empty one; what a test has written for systemd is removed after it."""
    before = set(_files())
    with empty_store() as found:
        yield found
    for path in set(_files()) - before:
        path.unlink()


def _files() -> list[Path]:
    folders = (UNITS, QUADLETS, SCRIPTS)
    return [each for folder in folders for each in folder.rglob("*") if each.is_file() or each.is_symlink()]


def start(machine: Machine, name: str) -> None:
    words = ("--device", "nvidia.com/gpu=0", "-v", f"{GPUWORK}:/gpuwork:ro", "localhost/base")
    gpuwork = ("/gpuwork", "--tick", "30", "--rest", "24", "--mib", "4")
    good(machine.run("podman", "--runtime", "gpusnap-runtime", "run", "-d", "--name", name, *words, *gpuwork))
    until(lambda: len(ticks(machine, name)) > 2, f"the first ticks of {name}")


def ticks(machine: Machine, name: str) -> list[int]:
    """What a container has counted; every byte was right."""
    found = re.findall(r"tick=(\d+) (ok|BAD)", machine.run("podman", "logs", name).out)
    assert all(word == "ok" for _, word in found), found
    return [int(number) for number, _ in found]


def checkpoints(machine: Machine, name: str = "w") -> list[dict[str, object]]:
    done = machine.run(COMMAND, "history", name, "--json")
    found: list[dict[str, object]] = json.loads(done.out)["checkpoints"] if not done.code else []
    return found


def test_a_schedule(store: Store) -> None:
    """The timer fires by itself, again and again; --keep-last is obeyed, and a failure shows and passes."""
    with booted() as machine:
        start(machine, "w")
        good(machine.run(COMMAND, "schedule", "w", "--every", "30s", "--keep-last", "1"))
        files = [UNITS / f"{TIMER}.service", UNITS / f"{TIMER}.timer"]
        verify = machine.run("systemd-analyze", "verify", "--man=no", *files)
        assert (verify.code, [line for line in verify.err.splitlines() if TIMER in line]) == (0, [])
        assert machine.run("systemctl", "is-enabled", f"{TIMER}.timer").out.strip() == "enabled"
        listed = json.loads(good(machine.run(COMMAND, "schedule", "--list", "--json")))
        assert [(each["container"], each["every"]) for each in listed] == [("w", 30)]
        first = until(lambda: checkpoints(machine), "the timer has fired", deadline=90)[-1]
        second = until(lambda: newer(machine, first), "the timer has fired again", deadline=90)
        assert second["names"] != first["names"]
        before = ticks(machine, "w")[-1]
        until(lambda: ticks(machine, "w")[-1] > before + 3, "it goes on")

        good(machine.run("systemctl", "stop", f"{TIMER}.timer"))
        until(lambda: machine.state(f"{TIMER}.service") == "inactive", "the last run has ended", deadline=90)
        assert machine.state(f"{TIMER}.service", "Result") == "success"
        assert len(checkpoints(machine)) == 1, "--keep-last 1"
        assert result(machine) == "stopped"

        good(machine.run(COMMAND, "checkpoint", "w", "--leave-running"))
        assert len(checkpoints(machine)) == 2
        good(machine.run("podman", "rm", "--force", "--time", "0", "w"))
        assert machine.run("systemctl", "start", f"{TIMER}.service").code
        assert machine.state(f"{TIMER}.service", "Result") == "exit-code"
        assert f"{TIMER}.service" in machine.run("systemctl", "--failed", "--plain").out
        assert len(checkpoints(machine)) == 1, "a run that fails obeys it, too"

        good(machine.run(COMMAND, "schedule", "w", "--remove"))
        assert not any(file.exists() for file in files)
        assert machine.state(f"{TIMER}.timer", "LoadState") == "not-found"


def test_a_disk_that_is_not_mounted(store: Store, tmp_path: Path) -> None:
    """No run begins without it: it would write below the mount point. The timer goes on."""
    place = tmp_path / "a disk"
    with booted() as machine:
        unit = machine.run("systemd-escape", "--path", "--suffix=mount", place).out.strip()
        (UNITS / unit).write_text(f"[Mount]\nWhat=none\nWhere={place}\nType=broken\n")
        good(machine.run(COMMAND, "schedule", "w", "--every", "30s", "--to", f"oci:{place}/store"))
        verify = machine.run("systemd-analyze", "verify", "--man=no", UNITS / f"{TIMER}.service")
        assert (verify.code, [line for line in verify.err.splitlines() if TIMER in line]) == (0, [])
        start(machine, "w")
        until(lambda: machine.state(unit) == "failed", "the timer has fired", deadline=90)
        until(lambda: machine.state(f"{TIMER}.timer", "SubState") == "waiting", "it waits again")
        assert machine.state(f"{TIMER}.service", "ExecMainStartTimestampMonotonic") == "0"
        assert result(machine) == "dependency"
        assert not any(place.rglob("*"))
        (UNITS / unit).write_text(f"[Mount]\nWhat=tmpfs\nWhere={place}\nType=tmpfs\n")
        good(machine.run("systemctl", "daemon-reload"))
        index = place / "store/index.json"
        until(lambda: not machine.run("test", "-e", index).code, "it has fired again", deadline=90)
        until(lambda: result(machine) == "success", "the run has ended", deadline=90)
        assert not any(place.rglob("*")), "it is on the disk"
        good(machine.run("systemctl", "stop", f"{TIMER}.timer"))
        until(lambda: machine.state(f"{TIMER}.service") == "inactive", "the last run has ended", deadline=90)
        assert machine.state(f"{TIMER}.service", "Result") == "success"
        good(machine.run(COMMAND, "schedule", "w", "--remove"))
        good(machine.run("podman", "rm", "--force", "--time", "0", "w"))


def test_removed_during_a_run(store: Store, tmp_path: Path) -> None:
    """The run goes on to its end, though it has run for longer than systemd's default limit."""
    limit = Path("/etc/systemd/system.conf.d/gpusnap-test.conf")
    limit.parent.mkdir(exist_ok=True)
    limit.write_text("[Manager]\nDefaultTimeoutStartSec=1s\n")
    begun, go, ended = (tmp_path / name for name in ("begun", "go", "ended"))
    program = tmp_path / "program"
    wait = f"until test -e {go}; do sleep 0.1; done"
    program.write_text(f"#!/bin/sh\ncut -d. -f1 /proc/uptime >{begun}\n{wait}\ntouch {ended}\n")
    program.chmod(0o755)
    service = f"{TIMER}.service"
    try:
        with booted() as machine:
            good(machine.run(COMMAND, "schedule", "w", "--every", "1h"))
            text = (UNITS / service).read_text()
            (UNITS / service).write_text(re.sub("(?m)^ExecStart=.*$", f"ExecStart={program}", text))
            good(machine.run("systemctl", "daemon-reload"))
            good(machine.run("systemctl", "start", "--no-block", service))
            until(lambda: begun.exists() and begun.read_text(), "it runs")
            since = int(begun.read_text())
            until(lambda: float(Path("/proc/uptime").read_text().split()[0]) > since + 3, "the limit is over")
            good(machine.run(COMMAND, "schedule", "w", "--remove"))
            assert not any((UNITS / f"{TIMER}.{kind}").exists() for kind in ("service", "timer"))
            assert machine.state(service, "TimeoutStartUSec") == "6h"
            assert machine.state(service) == "activating"
            go.touch()
            until(lambda: machine.state(service) != "activating", "it has ended")
            assert (machine.state(service, "Result"), ended.exists()) == ("success", True)
    finally:
        limit.unlink()


def result(machine: Machine) -> str:
    """What `gpusnap schedule --list` says of the last run."""
    (found,) = json.loads(good(machine.run(COMMAND, "schedule", "--list", "--json")))
    return str(found["result"])


def newer(machine: Machine, than: dict[str, object]) -> dict[str, object] | None:
    found = checkpoints(machine)
    return found[-1] if found and found[-1]["digest"] != than["digest"] else None


def install_quadlet() -> None:
    """examples/quadlet, as docs/tasks/at-boot.md says it, with the workload of the tests."""
    text = (EXAMPLES / "quadlet/server.container").read_text()
    text = text.replace("registry.example/team/server:1", "localhost/base:latest")
    assert "localhost/base" in text
    text += f"Volume={GPUWORK}:/gpuwork:ro\nExec=/gpuwork --tick 30 --mib 4\n"
    for folder in (QUADLETS, SCRIPTS):
        folder.mkdir(parents=True, exist_ok=True)
    (QUADLETS / "server.container").write_text(text)
    shutil.copy(EXAMPLES / "quadlet/server-snapshot.service", UNITS)
    shutil.copy(EXAMPLES / "quadlet/keep.sh", SCRIPTS)
    (SCRIPTS / "keep.sh").chmod(0o755)


def test_quadlet_takes_the_example(store: Store) -> None:
    """Podman's generator makes a service of it that systemd takes."""
    install_quadlet()
    done = run(QUADLET, "--dryrun")
    assert done.code == 0, done.err
    assert "--runtime=gpusnap-runtime" in done.out
    assert "nvidia.com/gpu=0" in done.out
    assert "error" not in done.err.lower()


def test_quadlet_over_a_boot(store: Store) -> None:
    """At shutdown it is checkpointed, at boot it goes on there; once, and after a crash it starts anew."""
    install_quadlet()
    with booted() as machine:
        good(machine.run("systemctl", "enable", "--now", "server-snapshot.service"))
        assert machine.state("server.service") == "active"
        until(lambda: len(ticks(machine, "server")) > 2, "its first ticks")
        last, first_id = ticks(machine, "server")[-1], container_id(machine)
        machine.power_off()
    assert "server:shutdown" in [each.name for each in store.entries()]
    with booted() as machine:
        assert machine.state("server-snapshot.service") == "active", log(machine)
        assert container_id(machine) == first_id, log(machine)
        until(lambda: ticks(machine, "server")[-1] > last + 3, "it goes on")
        found = ticks(machine, "server")
        assert found == list(range(found[0], found[-1] + 1))
        assert "server:shutdown" not in [each.name for each in store.entries()]
    # The machine is gone without a shutdown.
    with booted() as machine:
        assert machine.state("server.service") == "active", log(machine)
        assert container_id(machine) != first_id
        until(lambda: ticks(machine, "server"), "ticks of a new one")
        good(machine.run("systemctl", "disable", "server-snapshot.service"))
        good(machine.run("systemctl", "stop", "server-snapshot.service", "server.service"))
        assert machine.run("podman", "ps", "--all", "--quiet").out == ""


def test_units_that_would_end_it_or_start_it_anew(store: Store) -> None:
    """A checkpoint says that; a suspend that a watchdog would end is refused."""
    install_quadlet()
    text = (QUADLETS / "server.container").read_text()
    wanted = "[Service]\nRestart=always\n"
    (QUADLETS / "server.container").write_text(text + wanted)
    (QUADLETS / "once.container").write_text(
        text.replace("ContainerName=server", "ContainerName=once") + wanted + "RestartPreventExitStatus=137\n"
    )
    (QUADLETS / "strict.container").write_text(
        text.replace("ContainerName=server", "ContainerName=strict") + "[Service]\nWatchdogSec=1h\n"
    )
    with booted() as machine:
        good(machine.run("systemctl", "start", "server.service", "once.service", "strict.service"))
        until(lambda: all(len(ticks(machine, each)) > 2 for each in ("server", "once", "strict")), "ticks")
        before = container_id(machine)
        done = machine.run(COMMAND, "checkpoint", "server", "--leave-running")
        assert ": systemctl stop server.service && gpusnap restore server:" in done.err
        done = machine.run(COMMAND, "checkpoint", "server")
        assert (done.code, "server.service has Restart=always" in done.err) == (0, True), done.err
        until(lambda: machine.state("server.service", "NRestarts") == "1", "systemd starts it anew")
        until(lambda: machine.state("server.service") == "active", "it runs")
        assert container_id(machine) != before
        done = machine.run(COMMAND, "restore", "server")
        assert (done.code, "first: systemctl stop server.service" in done.err) == (1, True), done.err
        done = machine.run(COMMAND, "checkpoint", "once")
        assert (done.code, "GPS-224" in done.err) == (0, False), done.err
        until(lambda: machine.state("once.service") == "failed", "its end")
        assert machine.state("once.service", "NRestarts") == "0"
        done = machine.run(COMMAND, "suspend", "strict")
        assert (done.code, "(WatchdogSec= of strict.service)" in done.err) == (1, True), done.err
        good(machine.run("systemctl", "stop", "server.service", "strict.service"))


def container_id(machine: Machine) -> str:
    return good(machine.run("podman", "container", "inspect", "--format", "{{.Id}}", "server"))


def log(machine: Machine) -> str:
    units = ("-u", "server-snapshot.service", "-u", "server.service")
    return machine.run("journalctl", "--no-pager", *units).out


@pytest.mark.parametrize("way", ["notice", "shutdown"])
def test_preemption(store: Store, tmp_path: Path, way: str) -> None:
    """The unit waits; at the notice it checkpoints the container, and it ends with a shutdown."""
    notice = tmp_path / "notice"
    text = (EXAMPLES / "preemption/preemption.service").read_text()
    line = f"ExecStart={SCRIPTS}/preempt.sh -t 110 -f {notice} w"
    text, count = re.subn("(?m)^ExecStart=.*$", line, text)
    assert count == 1
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    (UNITS / "preemption.service").write_text(text)
    shutil.copy(EXAMPLES / "preemption/preempt.sh", SCRIPTS)
    (SCRIPTS / "preempt.sh").chmod(0o755)
    with booted() as machine:
        start(machine, "w")
        good(machine.run("systemctl", "enable", "--now", "preemption.service"))
        assert machine.state("preemption.service") == "active"
        assert checkpoints(machine) == []
        if way == "notice":
            notice.touch()
            until(lambda: machine.state("preemption.service") == "inactive", "it has ended", deadline=60)
            assert machine.state("preemption.service", "Result") == "success"
            assert len(checkpoints(machine)) == 1
            good(machine.run(COMMAND, "restore", "w"))
            until(lambda: len(ticks(machine, "w")) > 2, "it goes on")
        machine.power_off()
    assert len(store.entries() if (STORE / "index.json").exists() else ()) == (way == "notice")


@pytest.mark.parametrize("seconds", ["30s", "90s", "1h30min", "86400s"])
def test_spans_of_time(crun: None, seconds: str) -> None:
    """What a timer says is what systemd understands."""
    done = run("systemd-analyze", "timespan", seconds)
    assert done.code == 0, done.err
