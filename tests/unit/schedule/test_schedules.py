"""gpusnap schedule: what is written, what systemd is told, and that nothing of it stays."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from fake_podman import ID, FakePodman
from synced import Synced

from gpusnap.base.user_errors import NotFound
from gpusnap.engines.install.files import put_file
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError
from gpusnap.runtime_shim.runtime.child_process import Finished
from gpusnap.schedule import schedules
from gpusnap.schedule.schedules import Schedule, list_schedules, remove, write

Run = Callable[..., tuple[int, str, str]]
HALF_HOUR = timedelta(minutes=30)


class Systemctl:
    """Stands in for systemctl; `fails`: the words with which it fails."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = ""
        self.says = ""

    def __call__(self, argv: Sequence[str]) -> Finished:
        self.calls.append(shlex.join(argv[1:]))
        if self.fails and self.fails in self.calls[-1]:
            return Finished(1, "", "Failed to do it: Access denied\n")
        return Finished(0, self.says, "")


@pytest.fixture
def units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of unit files, on a host that systemd runs."""
    folder = tmp_path / "units"
    folder.mkdir()
    monkeypatch.setattr(schedules, "FOLDER", str(folder))
    monkeypatch.setattr(schedules, "_RUNNING", str(tmp_path))
    return folder


@pytest.fixture
def systemctl() -> Systemctl:
    return Systemctl()


def settings_of(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_units() -> None:
    """One run at a time, pruning before it and only after success, a deadline for each."""
    made = Schedule(
        "tr-1",
        HALF_HOUR,
        ("--to", "oci:/srv/a b"),
        ("--keep-last", "5", "--", "tr-1"),
        "/bin/gpusnap",
        store='/srv/a b"$100%',
    )
    service, timer = map(settings_of, made.files().values())
    assert [*made.files()] == ["gpusnap-checkpoint-tr\\x2d1.service", "gpusnap-checkpoint-tr\\x2d1.timer"]
    assert service["Type"] == ["oneshot"]
    assert service["ExecStart"] == [
        '/bin/gpusnap checkpoint --leave-running --to "oci:/srv/a b" -- tr-1',
        "/bin/gpusnap prune --keep-last 5 -- tr-1",
    ]
    assert service["ExecStartPre"] == ["-/bin/gpusnap prune --keep-last 5 -- tr-1"]
    assert service["RequiresMountsFor"] == ['"/srv/a b\\"$100%%"']
    assert service["TimeoutStartSec"]
    assert service["KillMode"] == ["mixed"]
    assert "After" not in service
    assert (timer["OnActiveSec"], timer["OnUnitActiveSec"]) == (["1800s"], ["1800s"])
    assert timer["WantedBy"] == ["timers.target"]
    plain = settings_of(Schedule("w", HALF_HOUR, ()).files()["gpusnap-checkpoint-w.service"])
    assert (len(plain["ExecStart"]), "ExecStartPre" in plain) == (1, False)
    pushed = Schedule("w", HALF_HOUR, ("--to", "registry.example/w:v1"), network=True)
    assert settings_of(pushed.files()["gpusnap-checkpoint-w.service"])["After"] == ["network-online.target"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("name", ["w", "a-b.c_d", "x" * 60])
def test_systemd_takes_them(tmp_path: Path, name: str) -> None:
    """`systemd-analyze verify` has nothing to say."""
    made = Schedule(
        name, HALF_HOUR, ("--label", 'a=100% $HOME "x" \\n'), ("--keep-last", "5"), "/bin/true", network=True
    )
    for file, text in made.files().items():
        (tmp_path / file).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / file) for file in made.files())],
        capture_output=True,
        text=True,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "gpusnap-checkpoint" in line]
    assert (done.returncode, ours) == (0, [])


def test_there_and_gone(units: Path, systemctl: Systemctl) -> None:
    """Written, listed with how the last run ended, changed by another call, removed."""
    paths = write(Schedule("tr-1", HALF_HOUR, ()), run=systemctl)
    assert sorted(paths) == sorted(str(each) for each in units.iterdir())
    timer = "'gpusnap-checkpoint-tr\\x2d1.timer'"
    assert systemctl.calls == ["daemon-reload", f"enable -- {timer}", f"restart -- {timer}"]
    assert all(Path(path).stat().st_mode & 0o777 == 0o644 for path in paths)
    (units / "other.timer").write_text("")
    for state, result in (
        ("Result=success\nActiveState=inactive\nExecMainStartTimestampMonotonic=0\n", ""),
        ("Result=exit-code\nActiveState=failed\nExecMainStartTimestampMonotonic=7\n", "exit-code"),
        ("Result=success\nActiveState=activating\nExecMainStartTimestampMonotonic=7\n", "running"),
    ):
        systemctl.says = state
        (found,) = list_schedules(run=systemctl)
        assert (found.container, found.every, found.result) == ("tr-1", 1800, result)
        assert found.commands == ("/usr/bin/gpusnap checkpoint --leave-running -- tr-1",)
    write(Schedule("tr-1", timedelta(hours=1), ()), run=systemctl)
    assert [each.every for each in list_schedules(run=systemctl)] == [3600]
    systemctl.calls.clear()
    systemctl.says = "ActiveState=inactive\n"
    assert sorted(remove("tr-1", run=systemctl)) == sorted(paths)
    show = "show --property=ActiveState -- 'gpusnap-checkpoint-tr\\x2d1.service'"
    assert systemctl.calls == [f"disable --now -- {timer}", show, "daemon-reload"]
    assert [each.name for each in units.iterdir()] == ["other.timer"]
    assert [each.name for each in units.parent.iterdir()] == ["units"]
    with pytest.raises(NotFound, match="there is no schedule for the container tr-1"):
        remove("tr-1", run=systemctl)


def test_a_loss_of_power(units: Path, systemctl: Systemctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was reported is on disk, with the link of systemctl's by which the timer starts at the boot."""
    link = units / "timers.target.wants/gpusnap-checkpoint-w.timer"

    def run(argv: Sequence[str]) -> Finished:
        if "enable" in argv:
            link.parent.mkdir()
            link.symlink_to(units / link.name)
        elif "disable" in argv:
            link.unlink()
            link.parent.rmdir()
        return systemctl(argv)

    synced = Synced(units, monkeypatch)
    paths = write(Schedule("w", HALF_HOUR, ()), run=run)
    assert all(synced.has_file(path) for path in paths)
    assert synced.has(link)
    remove("w", run=run)
    assert not any(synced.has(path) for path in (*paths, str(link)))


def test_the_same_again(units: Path, systemctl: Systemctl) -> None:
    """However often it is given, the timer fires; only another interval begins anew."""
    for every, keep, verb in ((60, (), "restart"), (60, ("--keep-last", "1"), "start"), (30, (), "restart")):
        systemctl.calls.clear()
        write(Schedule("w", timedelta(minutes=every), (), keep), run=systemctl)
        timer = "gpusnap-checkpoint-w.timer"
        assert systemctl.calls == ["daemon-reload", f"enable -- {timer}", f"{verb} -- {timer}"]


@pytest.mark.parametrize("state", ["activating", "deactivating", ""])
def test_removed_during_a_run(units: Path, systemctl: Systemctl, state: str) -> None:
    """systemd still has the service that runs, with its limits, until the next boot; not for ever."""
    write(Schedule("w", HALF_HOUR, ()), run=systemctl)
    content = (units / "gpusnap-checkpoint-w.service").read_bytes()
    systemctl.says = f"ActiveState={state}\n" if state else ""
    remove("w", run=systemctl)
    left = units.parent / "gpusnap-checkpoint-w.service"
    assert ([*units.iterdir()], left.read_bytes()) == ([], content)
    write(Schedule("w", HALF_HOUR, ()), run=systemctl)
    systemctl.says = "ActiveState=failed\n"
    remove("w", run=systemctl)
    assert ([*units.iterdir()], left.exists()) == ([], False)


@pytest.mark.parametrize(
    ("began", "job", "triggered", "timer", "result"),
    [
        pytest.param(18315083036, "", "5h 5min 15.049902s", "active", "success", id="it began"),
        pytest.param(18315083036, "", "5h 5min 45.123432s", "active", "dependency", id="it did not begin"),
        pytest.param(0, "", "2min 3s", "active", "dependency", id="none has begun"),
        pytest.param(
            18315083036, "Job=712\n", "5h 5min 45.123432s", "active", "running", id="it waits for the disk"
        ),
        pytest.param(8640000000000, "", "3month 1w 1d 16h 30min", "active", "success", id="after months"),
        pytest.param(
            8640000000000, "", "3month 1w 1d 16h 31min 2.5s", "active", "dependency", id="not after months"
        ),
        pytest.param(18315083036, "", "0", "active", "success", id="started by hand"),
        pytest.param(18315083036, "", "5h 5min 15.049902s", "inactive", "stopped", id="a stopped timer"),
        pytest.param(18315083036, "", "0", "failed", "stopped", id="a timer that has failed"),
    ],
)
def test_a_run_that_did_not_begin(
    units: Path, systemctl: Systemctl, began: int, job: str, triggered: str, timer: str, result: str
) -> None:
    """systemd's Result is that of the run before, such as success."""
    write(Schedule("tr-1", HALF_HOUR, ()), run=systemctl)
    service = f"Result=success\nActiveState=inactive\nInactiveExitTimestampMonotonic={began}\n{job}"
    systemctl.says = (
        f"{service}ExecMainStartTimestampMonotonic={began}\n\n"
        f"Result=success\nActiveState={timer}\nLastTriggerUSecMonotonic={triggered}\n"
    )
    (found,) = list_schedules(run=systemctl)
    assert found.result == result


@pytest.mark.parametrize("fails", ["daemon-reload", "enable", "restart", "e"])
def test_a_systemd_that_refuses(units: Path, systemctl: Systemctl, fails: str) -> None:
    """Nothing is left of it, and the sentence is systemd's; also where it refuses all (e)."""
    systemctl.fails = fails
    with pytest.raises(GpusnapError, match=rf"^systemctl .*{fails}.* failed: Failed to do it: Access denied"):
        write(Schedule("w", HALF_HOUR, ()), run=systemctl)
    assert [*units.iterdir()] == []


@pytest.mark.parametrize("fails", ["daemon-reload", "enable", "restart", "e"])
def test_a_change_that_fails(units: Path, systemctl: Systemctl, fails: str) -> None:
    """The schedule that was there goes on: a container must not be without checkpoints for a changed one."""
    write(Schedule("w", HALF_HOUR, ()), run=systemctl)
    before = {each: each.read_text() for each in units.iterdir()}
    systemctl.calls.clear()
    systemctl.fails = fails
    with pytest.raises(GpusnapError, match=r"Access denied; the schedule is unchanged$"):
        write(Schedule("w", timedelta(hours=1), ()), run=systemctl)
    assert {each: each.read_text() for each in units.iterdir()} == before
    assert systemctl.calls[-2:] == ["daemon-reload", "start -- gpusnap-checkpoint-w.timer"]
    assert not [call for call in systemctl.calls if call.startswith("disable")]


@pytest.mark.parametrize("there", [False, True])
def test_an_interrupt(units: Path, systemctl: Systemctl, there: bool) -> None:
    """Ctrl-C in between leaves no units whose timer was never started."""
    if there:
        write(Schedule("w", HALF_HOUR, ()), run=systemctl)
    before = {each: each.read_text() for each in units.iterdir()}

    def run(argv: Sequence[str]) -> Finished:
        if "enable" in argv:
            raise KeyboardInterrupt
        return systemctl(argv)

    with pytest.raises(KeyboardInterrupt):
        write(Schedule("w", timedelta(hours=1), ()), run=run)
    assert {each: each.read_text() for each in units.iterdir()} == before


def test_a_full_disk(units: Path, systemctl: Systemctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second file cannot be written: the first one is as it was, too."""
    write(Schedule("w", HALF_HOUR, ()), run=systemctl)
    before = {each: each.read_text() for each in units.iterdir()}
    count = 0

    def put(path: str, data: bytes, mode: int) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put_file(path, data, mode)

    monkeypatch.setattr(schedules, "put_file", put)
    with pytest.raises(GpusnapError, match="cannot be written") as raised:
        write(Schedule("w", timedelta(hours=1), ("--tcp-established",)), run=systemctl)
    assert raised.value.hint == "free some space there"
    assert {each: each.read_text() for each in units.iterdir()} == before


def test_without_systemd(units: Path, systemctl: Systemctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_RUNNING", "/nowhere")
    with pytest.raises(GpusnapError, match="systemd is not running on this host"):
        write(Schedule("w", HALF_HOUR, ()), run=systemctl)
    assert [*units.iterdir()] == []
    assert systemctl.calls == []


@pytest.mark.parametrize(
    ("container", "every", "said"),
    [
        ("w", timedelta(seconds=29), "is too often"),
        ("a b", HALF_HOUR, "is not a valid container name"),
        ("../x", HALF_HOUR, "is not a valid container name"),
        ("-" + "x", HALF_HOUR, "is not a valid container name"),
        ("x" * 250, HALF_HOUR, "too long"),
    ],
)
def test_what_is_refused(units: Path, container: str, every: timedelta, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        write(Schedule(container, every, ()))
    assert [*units.iterdir()] == []


# The command.


@pytest.fixture
def host(host_store: Store, units: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    """A container w; a systemctl that does all it is told."""
    fake = FakePodman(tmp_path / "podman", monkeypatch)
    fake.has()
    (tmp_path / "bin").mkdir(exist_ok=True)
    program = Path(tmp_path / "bin/systemctl")
    program.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/systemctl\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr("gpusnap.cli.commands.schedule.program", lambda name: f"/usr/bin/{name}")
    return fake


def test_dry_run(host: FakePodman, units: Path, gpusnap: Run, tmp_path: Path) -> None:
    """The units as they would be; paths are absolute, and the container is named by its name."""
    code, out, err = gpusnap(
        *("schedule", ID[:12], "--every", "1d12h", "--to", f"oci:{tmp_path}/s", "--label", "by=timer"),
        *("--keep-last", "5", "--keep-within", "2d", "--keep-label", "best", "--dry-run"),
    )
    assert (code, err) == (0, "")
    assert settings_of(out)["ExecStart"] == [
        f"/usr/bin/gpusnap checkpoint --leave-running --label by=timer --to oci:{tmp_path}/s -- w",
        "/usr/bin/gpusnap prune --keep-last 5 --keep-within 172800s --keep-label best --gc -- "
        f"oci:{tmp_path}/s w",
    ]
    assert settings_of(out)["ExecStartPre"] == [f"-{settings_of(out)['ExecStart'][1]}"]
    assert settings_of(out)["RequiresMountsFor"] == [f"{tmp_path}/s"]
    assert settings_of(out)["OnUnitActiveSec"] == ["129600s"]
    assert [*units.iterdir()] == []


@pytest.mark.parametrize("to", [(), ("--to", "registry.example/w:v1")])
def test_the_store_of_this_host(
    host: FakePodman, host_store: Store, gpusnap: Run, monkeypatch: pytest.MonkeyPatch, to: tuple[str, ...]
) -> None:
    """Its disk is needed, also for a checkpoint that is pushed; the program is named by its absolute path."""
    monkeypatch.setattr("gpusnap.cli.commands.schedule.program", lambda name: f"./bin/{name}")
    code, out, err = gpusnap("schedule", "w", "--every", "30m", *to, "--dry-run")
    assert (code, err) == (0, "")
    assert settings_of(out)["RequiresMountsFor"] == [host_store.path]
    assert settings_of(out)["ExecStart"][0].startswith(f"{os.getcwd()}/bin/gpusnap checkpoint ")


def test_the_commands(host: FakePodman, units: Path, gpusnap: Run) -> None:
    """Made, listed, removed; each as JSON, too."""
    code, out, err = gpusnap("schedule", "w", "--every", "30m", "--keep-last", "5")
    assert (code, err) == (0, "")
    assert out.startswith("w is checkpointed every 30 min, by gpusnap-checkpoint-w.timer\n")
    assert gpusnap("schedule", "--list")[1].splitlines()[1].split() == [
        *("w", "30", "min", "gpusnap-checkpoint-w.timer"),
    ]
    code, out, err = gpusnap("schedule", "--list", "--json")
    assert [(each["container"], each["every"]) for each in json.loads(out)] == [("w", 1800)]
    code, out, err = gpusnap("schedule", "w", "--remove", "--json")
    assert (code, len(json.loads(out)["removed"])) == (0, 2)
    assert gpusnap("schedule", "--list")[1] == "no container has a schedule\n"


def test_a_container_that_is_not_there(
    host: FakePodman, units: Path, gpusnap: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come later."""

    def container(word: str) -> object:
        raise NotFound(f"there is no container {word}")

    monkeypatch.setattr("gpusnap.engines.podman.inspect_container", container)
    code, out, err = gpusnap("schedule", "later", "--every", "1h", "--json")
    assert (code, json.loads(out)["written"], err) == (
        0,
        True,
        "note: there is currently no container later\n",
    )


def test_a_container_that_cannot_be_checkpointed(host: FakePodman, units: Path, gpusnap: Run) -> None:
    """Each run would fail; only systemd would say so."""
    host.has(runtime="crun")
    code, _, err = gpusnap("schedule", "w", "--every", "1h")
    assert code == 0
    assert err.startswith("note: the container w uses the runtime crun, which does not support GPUs; ")


def test_a_container_with_a_health_check(host: FakePodman, units: Path, gpusnap: Run) -> None:
    """It runs: what holds for a suspended one is not said of it."""
    host.has(Config={"HealthcheckOnFailureAction": "restart"})
    code, _, err = gpusnap("schedule", "w", "--every", "1h")
    assert code == 0
    assert "suspended" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no container is given; gpusnap schedule CONTAINER --every"),
        (("--remove",), "no container is given; gpusnap schedule CONTAINER --remove"),
        (("w", "--list"), "--list lists all schedules"),
        (("--list", "--remove"), "--list lists all schedules"),
        (("w",), "no interval is given"),
        (("w", "--every", "soon"), "is not a duration"),
        (("w", "--every", "1h", "--to", "./w.tar"), "is a single file"),
        (("w", "--every", "1h", "--to", "oci:s:w"), "names a single checkpoint"),
        (("w", "--every", "1h", "--label", "=x"), "is not a valid label"),
        (("gone", "--remove"), "there is no schedule"),
    ],
)
def test_wrong_lines(host: FakePodman, units: Path, gpusnap: Run, words: tuple[str, ...], said: str) -> None:
    code, out, err = gpusnap("schedule", *words)
    assert (code != 0, out) == (True, "")
    assert said in err
    assert [*units.iterdir()] == []
