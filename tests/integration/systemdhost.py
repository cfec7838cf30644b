"""systemd as PID 1 of a machine within the test host: units, timers, Quadlet's generator, boot and shutdown.

It has a PID namespace, mounts and control groups of its own, and /run is empty at each boot. The disk is the
test host's: what a test writes below /etc stays from one boot to the next, until the test removes it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support import Done, run, until

SYSTEMD = Path("/usr/lib/systemd/systemd")
_GROUP = Path("/sys/fs/cgroup/booted")
_KEPT = "/var/lib/softgpu-run"
# What the driver has in /run stays there, as the device nodes in /dev do.
_BOOT = f"""\
echo $$ >{_GROUP}/cgroup.procs
mkdir -p {_KEPT}
mount --make-rprivate /
mount --bind /run/softgpu {_KEPT}
exec unshare --fork --kill-child --pid --mount --cgroup --uts --ipc sh -ec '
mount -t proc proc /proc
mount -t tmpfs -o mode=755 run /run
mkdir /run/softgpu /run/lock
mount --bind {_KEPT} /run/softgpu
mount -t cgroup2 cgroup2 /sys/fs/cgroup
exec {SYSTEMD} --system --unit=multi-user.target --log-target=null --show-status=0'
"""
_ENVIRONMENT = {"container": "gpusnap-test", "PATH": os.environ["PATH"]}
# What a boot and a shutdown with a checkpoint may take on a machine with other work.
_SECONDS = 120.0


class Machine:
    """One boot."""

    def __init__(self, process: subprocess.Popen[bytes], pid: int) -> None:
        self._process, self._pid = process, pid

    def run(self, *words: str | os.PathLike[str]) -> Done:
        """Run a command there."""
        return run("nsenter", "--all", "--target", str(self._pid), "--", *words)

    def state(self, unit: str, what: str = "ActiveState") -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", what, unit).out.strip()

    def power_off(self) -> None:
        """Stop all units, in their order."""
        self.run("systemctl", "--no-block", "poweroff")
        self._process.wait(_SECONDS)


@contextmanager
def booted() -> Iterator[Machine]:
    """A machine that has booted; it is gone after the block, also where nobody has powered it off."""
    _GROUP.mkdir(exist_ok=True)
    script = subprocess.Popen(["sh", "-ec", f"{_BOOT}"], stdin=subprocess.DEVNULL, env=_ENVIRONMENT)
    try:
        init = until(lambda: _init_of(script.pid), "systemd is PID 1", deadline=_SECONDS)
        machine = Machine(script, init)
        until(
            lambda: machine.run("systemctl", "is-system-running").out.strip() in ("running", "degraded"),
            "systemd has booted",
            deadline=_SECONDS,
        )
        yield machine
    finally:
        script.kill()
        script.wait(30)
        until(_is_removed, "its control groups are gone")


def _init_of(parent: int) -> int:
    """The systemd that unshare has started; 0 before that."""
    with suppress(OSError, ValueError, IndexError):
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if Path(f"/proc/{children[0]}/comm").read_text() == "systemd\n":
            return int(children[0])
    return 0


def _is_removed() -> bool:
    """Remove its control groups, the inner ones first; whether all are gone."""
    for folder, _, _ in os.walk(_GROUP, topdown=False):
        with suppress(OSError):
            os.rmdir(folder)
    return not _GROUP.exists()
