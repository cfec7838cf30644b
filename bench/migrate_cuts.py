"""Losses of power during `gpusnap migrate`, of the host that the container leaves, or of the other one.

    mkdir DIR; for name in system data; do truncate -s 600M DIR/$name; mkfs.ext4 -q -F DIR/$name; done
    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 --bind DIR:/mnt/images --
        /opt/gpusnap/bin/python -B /src/bench/migrate_cuts.py [--rounds 20] [--seed 1] [--ways from,to]
        [--options commit=600,noauto_da_alloc] /mnt/images/system /mnt/images/data

The disks are those of power_cuts.py. A second host within the test host (tests/integration/otherhost.py) has
no disks, and no loss of power: the container leaves this host (from), or comes to it (to). In each round this
host loses power at a random moment of the migration, or after it, and starts again with what its disks have;
the processes of the other host continue. Then `gpusnap recover` must succeed on both. The container runs on
one of them, or the command that gpusnap has printed restores it there, or, if it was migrated to this host,
`gpusnap restore`; with every byte right. It does not run on the other one.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from faulthost import (
    COMMAND,
    Bad,
    Done,
    Hung,
    Report,
    parser,
    plain,
    prepare,
    processes,
    run_limited,
    wait_for,
)
from kills import run_again
from otherhost import FOLDER, SSH, other_host
from power_cuts import NAME, STOPPED, STORE, WORK, Disks, boot, call, make_disks, names

from gpusnap.runtime_shim.process import proc

_BACK = FOLDER / "ssh-back"
_BACK_PROGRAM = """\
#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift 2
[ ! -e {off} ] || exit 255
exec nsenter --mount --target={pid} $*
"""
_OFF = FOLDER / "off"
"""This host is off while that exists."""
_RESTORE = re.compile(r"gpusnap (restore \S+)|podman (container restore (?!was )\S+)")
_TICK = re.compile(r"tick=(\d+) (ok|BAD)")
# Of a Podman whose test directory another one has removed, which is the first since the boot.
_RACE = "unable to create kernel-style whiteout"
_WORK = ("/gpuwork", "--tick", "30", "--rest", "24", "--mib", "8")


class Host:
    """One of the two hosts; `words` begin each command there."""

    def __init__(self, name: str, *words: str) -> None:
        self.name, self.words = name, words

    def run(self, *words: str | os.PathLike[str]) -> Done:
        end = time.monotonic() + 30
        while _RACE in (done := run_limited([*self.words, *words])).err and time.monotonic() < end:
            time.sleep(0.5)
        if "Traceback" in done.err:
            raise Bad(f"{self.name}: {done.err}")
        return done

    def podman(self, *words: str) -> Done:
        return self.run("podman", "--runtime", "gpusnap-runtime", *words)

    def recover(self) -> str:
        """Run `gpusnap recover`; return what it says. Raises Bad."""
        done = run_again(lambda: self.run(COMMAND, "recover"))
        if done.code:
            raise Bad(f"recover on {self.name}: {done.err}")
        return done.out + done.err

    def runs(self) -> bool:
        return self.podman("inspect", "--format", "{{.State.Status}}", NAME).out.strip() == "running"

    def names(self) -> list[str]:
        done = self.run(COMMAND, "ls", "--json")
        found = json.loads(done.out)["checkpoints"] if done.code == 0 else []
        return sorted(name for each in found for name in each["names"])

    def ticks(self) -> list[int]:
        found = _TICK.findall(self.podman("logs", NAME).out)
        if any(how == "BAD" for _, how in found):
            raise Bad(f"{self.name}: wrong bytes")
        return [int(tick) for tick, _ in found]

    def goes_on(self) -> None:
        first = len(self.ticks())
        if not wait_for(lambda: len(self.ticks()) > first + 2):
            raise Bad(f"{self.name}: it does not go on: {self.podman('ps', '--all').out}")

    def clear(self) -> None:
        self.run(COMMAND, "recover")
        for each in self.podman("ps", "--all", "--external", "--quiet", "--no-trunc").out.split():
            self.podman("rm", "--force", "--time", "0", each)
        for name in self.names():
            self.run(COMMAND, "rm", name)
        self.run(COMMAND, "gc")


def list_others() -> set[int]:
    """Return the processes of the other host: in its mount namespace, and those that these have started.

    What has entered this host's namespace, as by ssh, is of this host, with all below it.
    """
    other, ours = (os.readlink(f"/proc/{pid}/ns/mnt") for pid in ((FOLDER / "holder").read_text(), "self"))
    found, parents = set[int](), dict[int, int]()
    for pid in proc.pids():
        with suppress(OSError):
            space = os.readlink(f"/proc/{pid}/ns/mnt")
            if space != ours:
                parents[pid] = proc.parent(pid)
            if space == other:
                found.add(pid)
    while below := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= below
    return found


class Cuts:
    """The rounds."""

    def __init__(self, report: Report, disks: Disks) -> None:
        self.report, self._disks = report, disks
        holder = (FOLDER / "holder").read_text()
        self.here = Host("this host")
        self.there = Host("the other host", "nsenter", "--mount", "--target", holder)
        self._stored = set[str]()
        """The names in this host's store after the loss of power."""
        self._longest = {"from": 6.0, "to": 6.0}

    def begin(self, way: str) -> tuple[Host, Host]:
        """Start the container; return the host that it leaves, and the one to which it goes."""
        source, to = (self.here, self.there) if way == "from" else (self.there, self.here)
        for each in (source, to):
            each.clear()
        mount = ("-v", "/usr/local/bin/gpuwork:/gpuwork:ro")
        options = ("--rm",) if random.random() < 0.3 else ()
        done = source.podman(
            *("run", "-d", "--name", NAME, "--device", "nvidia.com/gpu=all"),
            *mount,
            *options,
            "localhost/base",
            *_WORK,
        )
        if done.code:
            raise Bad(done.err)
        wait_for(lambda: len(source.ticks()) > 2)
        call("sync", "--file-system", "/var/lib/containers")
        return source, to

    def one(self, way: str, name: str) -> str:
        source, to = self.begin(way)
        ssh = SSH if way == "from" else _BACK
        keep = ["--keep"] if random.random() < 0.3 else []
        ahead = ["--precopy", "0"] if random.random() < 0.3 else []
        line = [
            *source.words,
            COMMAND,
            "migrate",
            NAME,
            "ssh://gpu2",
            "--quiet",
            "--ssh",
            str(ssh),
            *keep,
            *ahead,
        ]
        with (WORK / "out").open("wb") as out:
            began = time.monotonic()
            process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            ended = True
            try:
                if process.wait(random.triangular(0.3, 1.3, 1.0) * self._longest[way]) == 0:
                    self._longest[way] = time.monotonic() - began
            except subprocess.TimeoutExpired:
                ended = False
            after = time.monotonic() - began
            self.cut()
            with suppress(subprocess.TimeoutExpired):
                process.wait(90)
        code = process.poll()
        if code is None:
            raise Hung(f"{line} did not end within 90 s of the loss of power")
        said = (WORK / "out").read_text(errors="replace")
        when = f"cut after {after:.2f} s, {'ended before' if ended else 'at work'}"
        what = f"{way}, {when}, code {code}, {[*keep, *ahead]}"
        said += f"\nto: {to.recover()}\nsource: {(recovered := source.recover())}\nto: {to.recover()}"
        said += f"\n{source.run(COMMAND, 'recover', '--list').err}\nnames: {source.names()}, {to.names()}"
        try:
            return f"{what}: {self.judge(source, to, said, recovered, moved=code == 0)}"
        except (Bad, AssertionError) as error:
            raise Bad(f"{what}: {error}\n{said}") from error

    def judge(self, source: Host, to: Host, said: str, recovered: str, *, moved: bool) -> str:
        moved = moved or "was migrated to" in said
        left, right = source.runs(), to.runs()
        if left and right:
            raise Bad("it runs on both hosts")
        if left and moved:
            raise Bad("it was migrated, and runs on the source")
        if right:
            if not moved:
                raise Bad("it runs on the other host, and the source does not say so")
            to.goes_on()
            return "runs there"
        if left:
            source.goes_on()
            return "runs on the source"
        if moved:
            to.podman("rm", "--force", "--time", "0", NAME)
            done = to.run(COMMAND, "restore", NAME)
            if done.code:
                raise Bad(f"it was migrated, and cannot be restored there: {done.err}")
            to.goes_on()
            return "restored there"
        found = _RESTORE.search(recovered) or _RESTORE.search(said)
        if found is None:
            if source is self.here and not self._stored:
                return "lost: no checkpoint had been made"
            raise Bad("it runs nowhere, and nothing says how to restore it")
        words = [COMMAND, *found[1].split()] if found[1] else ["podman", *found[2].split()]
        if f"podman rm {NAME} && {' '.join(words).replace(COMMAND, 'gpusnap')}" in recovered:
            source.podman("rm", NAME)
        done = source.run(*(word.rstrip(",;.") for word in words))
        if done.code:
            raise Bad(f"it cannot be restored by {words}: {done.err}")
        source.goes_on()
        return f"restored on the source by {plain(' '.join(words[1:]))}"

    def cut(self) -> None:
        others = list_others()
        stopped = [pid for pid, name in processes().items() if name in STOPPED and pid not in others]
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        copy = WORK / "copies/cut"
        before: list[int] = []
        while self._disks.written() != before:  # what the kernel itself writes would not be of one moment
            call("rm", "-rf", copy.parent)
            copy.parent.mkdir()
            before = self._disks.written()
            self._disks.copy(copy)
        _OFF.touch()
        for pid in list_others():
            if (
                f"--target={os.getpid()}" in " ".join(proc.command(pid))
                or str(_BACK) in proc.command(pid)[:2]
            ):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        boot(self._disks, copy, list_others)
        _OFF.unlink()
        self._stored = names()


def main() -> int:
    options = parser(__doc__ or "", 20)
    options.add_argument("--ways", default="from,to")
    options.add_argument("--options", default="")
    options.add_argument("images", nargs=2, type=Path)
    chosen = options.parse_args()
    report = prepare("migrate_cuts", chosen)
    hosts = other_host((STORE,))
    disks = make_disks(chosen.images, chosen.options, hosts.__enter__)
    _BACK.write_text(_BACK_PROGRAM.format(pid=os.getpid(), off=_OFF))
    _BACK.chmod(0o755)
    cuts = Cuts(report, disks)
    for number in range(chosen.rounds):
        for way in chosen.ways.split(","):
            if report.over(chosen.seconds):
                break
            try:
                said = cuts.one(way, f"{way} {number}")
                report.note(said)
                report.said[way + said.rpartition(":")[2]] += 1
                report.counts["good"] += 1
                print(said, flush=True)
            except (Bad, Hung, AssertionError, OSError, ValueError, subprocess.SubprocessError) as error:
                report.failed(f"{way} {number}", error, WORK / "copies/cut")
    cuts.here.clear()
    cuts.there.clear()
    disks.umount()
    with suppress(subprocess.CalledProcessError):
        call("umount", "/proc/sys/kernel/random/boot_id")
    hosts.__exit__(None, None, None)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
