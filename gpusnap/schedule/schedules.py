"""`gpusnap schedule`: a timer and a service of systemd that checkpoint a container periodically.

The service has Type=oneshot: systemd runs one instance at a time, the command after the checkpoint runs only
if that has succeeded, and a failure is its state, which `systemctl status` shows.

`gpusnap prune` runs before the checkpoint, too. What earlier runs have left that failed after they had
written, such as checkpoints that a registry did not take, could otherwise fill the disk. Then each checkpoint
would fail, and nothing would be removed any more.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

from gpusnap.base.user_errors import NotFound
from gpusnap.doctor.base.sources import ask
from gpusnap.engines.install.files import put_file, unlink
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.files import NOTHING_THERE, sync_folder
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError, advise, reason
from gpusnap.runtime_shim.runtime.child_process import Finished
from gpusnap.schedule import unit_files

FOLDER = "/etc/systemd/system"
_PREFIX = "gpusnap-checkpoint-"
_TIMER = ".timer"
# The links of timers that systemd starts at boot, below FOLDER.
_WANTED = "timers.target.wants"
_RUNNING = "/run/systemd/system"  # sd_booted(3); also a folder of units, systemd.unit(5)
_LONGEST = 256 - len(".service")  # unit names, systemd.unit(5)
_SHORTEST = timedelta(seconds=30)
# Name of a container (libpod, define.NameRegex).
_NAME = compile_later(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*", re.ASCII)
# Limit on a run: longer than any checkpoint takes, so that one that hangs ends, and the next may begin.
_RUN_LIMIT = "6h"
# For undoing a checkpoint that is stopped.
_STOP_LIMIT = "10min"

# Bytes of a unit file.
_LARGEST = 1 << 16

# The properties of a service and its timer in `systemctl show`.
_STATE = (
    "Result",
    "ActiveState",
    "ExecMainStartTimestampMonotonic",
    "InactiveExitTimestampMonotonic",
    "Job",
    "LastTriggerUSecMonotonic",
)
# Seconds; systemd.time(7), "Parsing Time Spans".
_UNITS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1,
    "min": 60,
    "h": 3600,
    "d": 86400,
    "w": 7 * 86400,
    "month": 30.4375 * 86400,
    "y": 365.25 * 86400,
}
_SPAN = compile_later(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s|min|h|d|w|month|y)\b", re.ASCII)
# Seconds by which the rounding of a time span may be wrong; no interval is that short.
_ROUNDED = 1.0

Run = Callable[[Sequence[str]], Finished | None]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A container, how often it is checkpointed, and by which commands."""

    container: str
    every: timedelta
    checkpoint: tuple[str, ...]
    """The words after `gpusnap checkpoint --leave-running`, except the container."""
    prune: tuple[str, ...] = ()
    """The words after `gpusnap prune`; empty: nothing is removed."""
    program: str = "/usr/bin/gpusnap"
    network: bool = False
    """Whether the checkpoints go to a registry."""
    store: str = ""
    """The absolute path of the store: if it is on a disk that systemd mounts, no run begins without that."""

    @property
    def name(self) -> str:
        """Return the name of the units, without .timer and .service."""
        return _PREFIX + unit_files.escape(self.container)

    def files(self) -> dict[str, str]:
        """Return the content of each unit file by its name. Raises UsageError."""
        try:
            return {f"{self.name}.service": self._service(), f"{self.name}.timer": self._timer()}
        except ValueError as error:
            raise UsageError(f"no systemd unit can be made: {error}") from error

    def check(self) -> None:
        """Raise UsageError if systemd would not accept it."""
        if self.every < _SHORTEST:
            raise UsageError(
                f"every {self.every.total_seconds():g} s is too often", hint="the shortest interval is 30s"
            )
        if not _NAME.fullmatch(self.container):
            raise UsageError(
                f"{self.container[:80]!r} is not a valid container name", hint="podman ps lists them"
            )
        if len(self.name) > _LONGEST:
            raise UsageError(f"{self.container[:80]!r} is too long for the name of a systemd unit")
        self.files()

    def _service(self) -> str:
        run = (self.program, "checkpoint", "--leave-running", *self.checkpoint, "--", self.container)
        prune = unit_files.command_line((self.program, "prune", *self.prune)) if self.prune else ""
        lines = [
            "# Written by gpusnap schedule; gpusnap schedule --remove removes it.",
            "[Unit]",
            f"Description=Checkpoint of the container {unit_files.value(self.container)}",
            *(("After=network-online.target", "Wants=network-online.target") if self.network else ()),
            *((f"RequiresMountsFor={unit_files.path(self.store)}",) if self.store else ()),
            "",
            "[Service]",
            "Type=oneshot",
            *((f"ExecStartPre=-{prune}",) if prune else ()),
            f"ExecStart={unit_files.command_line(run)}",
            *((f"ExecStart={prune}",) if prune else ()),
            # Only gpusnap gets a signal: it undoes its work, and that of the programs that it has started.
            "KillMode=mixed",
            f"TimeoutStartSec={_RUN_LIMIT}",
            f"TimeoutStopSec={_STOP_LIMIT}",
            "",
        ]
        return "\n".join(lines)

    def _timer(self) -> str:
        seconds = int(self.every.total_seconds())
        return "\n".join(
            (
                "# Written by gpusnap schedule; gpusnap schedule --remove removes it.",
                "[Unit]",
                f"Description=Checkpoints of the container {unit_files.value(self.container)}",
                "",
                "[Timer]",
                f"OnActiveSec={seconds}s",
                f"OnUnitActiveSec={seconds}s",
                "AccuracySec=1s",
                "",
                "[Install]",
                "WantedBy=timers.target",
                "",
            )
        )


@dataclass(frozen=True, slots=True)
class FoundSchedule:
    """A schedule of this host, by its unit files."""

    container: str
    every: int
    """Seconds; 0 if the timer does not have it any more."""
    commands: tuple[str, ...]
    unit: str
    """The name of the timer."""
    result: str
    """Result of the last run in systemd's terms: success, exit-code, timeout…; "dependency" if it did not
    begin, because the store is not mounted; "running"; "stopped" if the timer is, so that no run follows;
    empty if there was none."""


def write(schedule: Schedule, *, run: Run = ask) -> list[str]:
    """Write the units and start the timer; return the paths. An existing schedule is replaced.

    A timer that is the same continues: if it began anew, its first run would be one interval away again.
    After a failure or an interruption, the former schedule exists, or none. Raises GpusnapError.
    """
    schedule.check()
    _check_systemd()
    files = {os.path.join(FOLDER, name): text.encode() for name, text in schedule.files().items()}
    before = {path: data for path in files if (data := _content(path)) is not None}
    try:
        for path, data in files.items():
            _put(path, data)
        _systemctl(run, "daemon-reload")
        _systemctl(run, "enable", "--", f"{schedule.name}.timer")
        _sync_link()
        timer = os.path.join(FOLDER, f"{schedule.name}.timer")
        verb = "start" if before.get(timer) == files[timer] else "restart"
        _systemctl(run, verb, "--", f"{schedule.name}.timer")
    except BaseException as error:
        if len(before) < len(files):
            _take_back(schedule, files, run)
        elif _restore(schedule, before, run) and isinstance(error, GpusnapError):
            raise type(error)(
                f"{error}; the schedule is unchanged", hint=error.hint, code=error.code
            ) from error
        raise
    return [*files]


def _take_back(schedule: Schedule, paths: Iterable[str], run: Run) -> None:
    """Remove everything of a schedule."""
    with suppress(GpusnapError):
        remove(schedule.container, run=run)
    for path in paths:  # even if systemd does not answer
        with suppress(GpusnapError):
            unlink(path)


def _restore(schedule: Schedule, before: Mapping[str, bytes], run: Run) -> bool:
    """Restore the former unit files, and their timer; return whether the files exist again."""
    try:
        for path, data in before.items():
            _put(path, data)
    except GpusnapError:
        return False
    # The running timer is still the old one, unless its restart was what failed.
    for words in (("daemon-reload",), ("start", "--", f"{schedule.name}.timer")):
        with suppress(GpusnapError):
            _systemctl(run, *words)
    return True


def _put(path: str, data: bytes) -> None:
    try:
        put_file(path, data, 0o644)
    except OSError as error:
        raise GpusnapError(
            f"{path} cannot be written: {reason(error)}",
            hint=advise(error) or "run it as root",
            code="GPS-103",
        ) from error


def _sync_link() -> None:
    """Sync the link of the timer to disk, which systemctl does not: without it nothing starts at a boot."""
    for folder in (os.path.join(FOLDER, _WANTED), FOLDER):
        try:
            sync_folder(folder)
        except OSError as error:
            if error.errno not in NOTHING_THERE:
                raise GpusnapError(
                    f"{folder} cannot be flushed to disk: {reason(error)}",
                    hint=advise(error) or "run it as root",
                    code="GPS-103",
                ) from error


def _content(path: str) -> bytes | None:
    """Return the content of a unit file; None if there is none."""
    try:
        with open(path, "rb") as file:
            return file.read(_LARGEST)
    except OSError:
        return None


def remove(container: str, *, run: Run = ask) -> list[str]:
    """Stop the timer, and remove its units; return the paths. A running checkpoint continues to its end.

    Without its service, systemd would stop that: the time limit would be systemd's default of 90 s, and all
    processes would get its signals, CRIU too. So the service exists in /run then, until the next boot. Raises
    NotFound, GpusnapError.
    """
    name = _PREFIX + unit_files.escape(container)
    paths = [os.path.join(FOLDER, name + kind) for kind in (".timer", ".service")]
    there = [path for path in paths if os.path.lexists(path)]
    if not there:
        raise NotFound(
            f"there is no schedule for the container {container}", hint="gpusnap schedule --list lists them"
        )
    if os.path.isdir(_RUNNING):
        if paths[0] in there:
            _systemctl(run, "disable", "--now", "--", f"{name}.timer")
            _sync_link()
        copy = os.path.join(_RUNNING, f"{name}.service")
        data = _content(paths[1])
        if data is not None and _is_running(run, f"{name}.service"):
            _put(copy, data)
        else:
            unlink(copy)
        for path in there:
            unlink(path)
        _systemctl(run, "daemon-reload")
    for path in there:
        unlink(path)
    return there


def list_timers(root: str = "/") -> dict[str, str]:
    """Return the timers of all schedules of a host, with their containers. Raises GpusnapError."""
    try:
        names = sorted(os.listdir(os.path.join(root, FOLDER.removeprefix("/"))))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise GpusnapError(f"{FOLDER} cannot be read: {reason(error)}", code="GPS-005") from error
    return {
        name: unit_files.unescape(name.removeprefix(_PREFIX).removesuffix(_TIMER))
        for name in names
        if name.startswith(_PREFIX) and name.endswith(_TIMER)
    }


def list_schedules(*, run: Run = ask) -> Iterator[FoundSchedule]:
    """Return all schedules of this host. Raises GpusnapError."""
    for name, container in list_timers().items():
        base = name.removesuffix(_TIMER)
        timer, service = _settings(name), _settings(f"{base}.service")
        seconds = next((text for key, text in timer if key == "OnUnitActiveSec"), "").removesuffix("s")
        yield FoundSchedule(
            container,
            int(seconds) if seconds.isascii() and seconds.isdigit() else 0,
            tuple(text for key, text in service if key == "ExecStart"),
            name,
            _result(run, base),
        )


def _settings(name: str) -> list[tuple[str, str]]:
    """Return the lines KEY=VALUE of a unit file; empty if it cannot be read."""
    try:
        with open(os.path.join(FOLDER, name), encoding="utf-8", errors="replace") as file:
            pairs = [line.strip().partition("=") for line in file.read(_LARGEST).splitlines()]
    except OSError:
        return []
    return [(key, text) for key, equals, text in pairs if equals]


def _result(run: Run, base: str) -> str:
    """Return the result of the last run of `base`.service, which `base`.timer starts."""
    if not os.path.isdir(_RUNNING):
        return ""
    units = (f"{base}.service", f"{base}.timer")
    done = run(["systemctl", "show", f"--property={','.join(_STATE)}", "--", *units])
    if done is None or done.code:
        return ""
    service, timer, *_ = [*map(_parse_properties, done.out.split("\n\n")), {}]
    if service.get("ActiveState") == "activating" or service.get("Job"):
        return "running"
    if timer.get("ActiveState") in ("inactive", "failed"):
        return "stopped"
    began = service.get("InactiveExitTimestampMonotonic", "")
    triggered = _parse_span(timer.get("LastTriggerUSecMonotonic", ""))
    if began.isdecimal() and triggered > int(began) / 1e6 + _ROUNDED:
        return "dependency"  # Result is that of an earlier run
    ran = service.get("ExecMainStartTimestampMonotonic", "0") not in ("", "0")
    return service.get("Result", "") if ran else ""


def _is_running(run: Run, service: str) -> bool:
    """Return whether a service is at work, or may be: systemd does not answer."""
    done = run(["systemctl", "show", "--property=ActiveState", "--", service])
    state = _parse_properties(done.out).get("ActiveState") if done is not None else None
    return state not in ("inactive", "failed")


def _parse_properties(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def _parse_span(text: str) -> float:
    """Return a time span of systemd, such as 5h 5min 15.049902s, in seconds."""
    return sum(float(count) * _UNITS[unit] for count, unit in _SPAN.findall(text))


def _check_systemd() -> None:
    if not os.path.isdir(_RUNNING):
        raise GpusnapError(
            "systemd is not running on this host, so nothing can start a timer",
            hint="use --dry-run to print the units; another scheduler may run their commands",
        )


def _systemctl(run: Run, *words: str) -> None:
    done = run(["systemctl", *words])
    if done is not None and done.code == 0:
        return
    said = "it cannot be run, or does not respond" if done is None else _last_line(done)
    raise GpusnapError(
        f"{shlex.join(['systemctl', *words])} failed: {said}", hint="run it as root", code="GPS-005"
    )


def _last_line(done: Finished) -> str:
    return (done.err.strip().splitlines() or [f"exit code {done.code}"])[-1]
