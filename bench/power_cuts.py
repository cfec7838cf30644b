"""Losses of power: what the disks have after a command, and at random moments of it.

    mkdir DIR; for name in system data; do truncate -s 600M DIR/$name; mkfs.ext4 -q -F DIR/$name; done
    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 --bind DIR:/mnt/images --
        /opt/gpusnap/bin/python -B /src/bench/power_cuts.py [--rounds 8] [--seed 1]
        [--ways checkpoint,checkpoint-rm,leave-running,to-file,podman,restore,copy,rm,tag,prune,pull,spill,
        recover]
        [--options commit=600,noauto_da_alloc] /mnt/images/system /mnt/images/data

The two images have a new file system each (ext4, XFS with --options nouuid, Btrfs). The first one holds
Podman's storage, the second one gpusnap's store and records, archives, and a log that the container has open.
While a command runs, the images are copied again and again, with the command's processes stopped meanwhile,
and once more when it has ended. A file system that writes by itself only after minutes, as with --options,
has nothing in such a copy but what was synced.

After each command, --rounds of the copies and the last one are what the disks have after a loss of power:
all processes are killed, /run is empty, the ID of the boot is another one, and the copies are mounted. Then
`gpusnap recover`, `verify --all` and `gc` must succeed, the checkpoints from before are there, and the next
checkpoint succeeds. In the last copy, the new checkpoint is there as well, and a restore goes on with every
byte right. Exit code 1 if that fails once.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from faulthost import (
    COMMAND,
    Bad,
    Done,
    Hung,
    Report,
    descendants,
    parser,
    plain,
    prepare,
    processes,
    remove_all,
    run_limited,
)
from registryhost import running
from shimhost import write_settings
from support import Container, good, podman

from gpusnap.runtime_shim.process import proc

NAME = "w"
WAYS = (
    *("checkpoint", "checkpoint-rm", "leave-running", "to-file", "podman", "restore", "copy", "rm"),
    *("tag", "prune", "pull", "spill", "recover"),
)
_ENDS = ("checkpoint", "checkpoint-rm", "to-file", "podman", "restore")
STORAGE, RECORDS = Path("/var/lib/containers"), Path("/var/lib/gpusnap")
DATA = Path("/mnt/power-data")
STORE, ARCHIVE, LOG = DATA / "store", DATA / "w.tar", DATA / "log"
WORK = Path("/var/tmp/power-cuts")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_GONE = ("/run/containers", "/run/libpod", "/run/gpusnap", "/run/crun", "/run/netns", "/dev/shm/libpod_lock")
STOPPED = ("gpusnap", "gpusnap-runtime", "podman")
# With >, CRIU compares the size of the log; with >>, it does not, so a container may have written more to it.
_SCRIPT = (
    "(exec 3{into}/data/log/w; while :; do echo line >&3; sleep 0.05; done) & "
    "exec /gpuwork --tick 30 --rest 24 --mib 4"
)


def call(*words: str | os.PathLike[str]) -> None:
    subprocess.run(words, check=True)


@dataclass
class Disks:
    """The two images, mounted, with what is on them in its places."""

    options: str

    @property
    def images(self) -> tuple[Path, Path]:
        return WORK / "system", WORK / "data"

    def mount(self) -> None:
        system = Path("/mnt/power-system")
        for image, place in zip(self.images, (system, DATA), strict=True):
            place.mkdir(exist_ok=True)
            call("mount", "-o", ",".join(filter(None, ("loop", self.options))), image, place)
        for folder, place in ((system / "containers", STORAGE), (DATA / "records", RECORDS)):
            folder.mkdir(exist_ok=True)
            place.mkdir(exist_ok=True)
            call("mount", "--bind", folder, place)
        LOG.mkdir(exist_ok=True)

    def umount(self) -> None:
        """Unmount them, and what was mounted below them, and below /run."""
        ours = (str(STORAGE), str(RECORDS), str(DATA), "/mnt/power-system")
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            place = line.split()[4]
            if any(place == each or place.startswith(each + "/") for each in (*ours, *_GONE)):
                # What Podman mounted in its storage before is hidden below ours.
                subprocess.run(["umount", place], check=place in ours, stderr=subprocess.DEVNULL)

    def copy(self, to: Path) -> None:
        to.mkdir()
        for image in self.images:
            call("cp", "--sparse=always", image, to)

    def written(self) -> list[int]:
        return [os.stat(image).st_mtime_ns for image in self.images]


class Copies(threading.Thread):
    """Copies the disks while a command runs, each time at one moment."""

    def __init__(self, disks: Disks) -> None:
        super().__init__()
        self._disks = disks
        self._over = threading.Event()
        self.found: list[Path] = []
        shutil.rmtree(WORK / "copies", ignore_errors=True)
        (WORK / "copies").mkdir()

    def run(self) -> None:
        last: list[int] = []
        while not self._over.wait(random.uniform(0.001, 0.01)):
            if self._disks.written() != last:
                last = self._take() or last

    def end(self) -> Path:
        """Return the last one, of now."""
        now = WORK / "copies/last"
        self._disks.copy(now)
        self._over.set()
        self.join()
        return now

    def _take(self) -> list[int]:
        stopped = [pid for pid, name in processes().items() if name in STOPPED]
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        try:
            path = WORK / f"copies/{len(self.found):04}"
            before = self._disks.written()
            self._disks.copy(path)
            if self._disks.written() == before:  # what the kernel itself writes would not be of one moment
                self.found.append(path)
                return before
            shutil.rmtree(path)
            return []
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def boot(disks: Disks, copy: Path, others: Callable[[], set[int]] = set) -> None:
    """Lose power, and start again with a copy of the disks. `others`: the processes of another host."""
    theirs = others()
    for group in Path("/sys/fs/cgroup").rglob("cgroup.freeze"):
        with suppress(OSError):
            below = " ".join(each.read_text() for each in group.parent.rglob("cgroup.procs"))
            if not theirs & set(map(int, below.split())):
                group.write_text("0")
    _end_all(disks, others)
    for top in map(Path, _GONE):
        # Not a directory itself: the kernel would unmount what another host has there.
        for path in top.iterdir() if top.is_dir() else [top]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    for folder in Path("/run/softgpu").glob("[0-9]*"):
        if int(folder.name) not in others():
            shutil.rmtree(folder)
    for image in disks.images:
        # Another file, if something of the former one is not unmounted yet.
        call("cp", "--sparse=always", "--remove-destination", copy / image.name, image)
    disks.mount()
    volatile = STORAGE / "storage/overlay-containers/volatile-containers.json"
    if volatile.exists() and not volatile.stat().st_size:
        volatile.unlink()  # Podman does not sync it, and takes an empty one for none
    other = WORK / "boot_id"
    other.write_text(f"00000000-0000-4000-8000-{random.randrange(10**12):012}\n")
    with suppress(subprocess.CalledProcessError):
        subprocess.run(["umount", _BOOT], check=True, stderr=subprocess.DEVNULL)
    call("mount", "--bind", other, _BOOT)


def _end_all(disks: Disks, others: Callable[[], set[int]]) -> None:
    """End all processes, and unmount the disks."""
    ours = {1, os.getpid(), *proc.list_ancestors(os.getpid())}
    end = time.monotonic() + 20
    while True:
        while victims := processes().keys() - ours - others():
            for pid in victims:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                raise Bad(f"these do not end: {processes()}")
            time.sleep(0.05)
        try:
            disks.umount()
            return
        except subprocess.CalledProcessError:  # such as by one that another host has just begun here
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def gpusnap(*words: str | os.PathLike[str]) -> Done:
    done = run_limited([COMMAND, *words])
    if "Traceback" in done.err:
        raise Bad(done.err)
    return done


def names() -> set[str]:
    """The names in the store's index, as it is on the disk."""
    index = STORE / "index.json"
    entries = json.loads(index.read_text())["manifests"] if index.exists() else []
    found = (each.get("annotations", {}).get("org.opencontainers.image.ref.name", "") for each in entries)
    return {each for each in found if each}


def start(*options: str, into: str = ">>") -> Container:
    container = Container.start(
        NAME, script=_SCRIPT.format(into=into), options=["-v", f"{LOG}:/data/log", *options]
    )
    call("sync", "--file-system", STORAGE)  # not the container's creation is what this is about
    return container


def end_container() -> None:
    """Remove it; one with --rm may be left in Podman's storage alone."""
    for each in podman("ps", "--all", "--external", "--quiet", "--no-trunc").out.split():
        podman("rm", "--force", "--time", "0", each)


def interrupt() -> None:
    """Kill a checkpoint at a random moment, with all that it has started."""

    def kill(process: subprocess.Popen[bytes]) -> None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(random.uniform(0.2, 1.5))
        for pid in descendants(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    run_limited([COMMAND, "checkpoint", NAME], during=kill)


def run_way(way: str) -> tuple[Done, Sequence[str]]:
    """Run its command; return what it said, and the command that restores the container after it."""
    match way:
        case "podman":
            return podman("container", "checkpoint", NAME), ("podman", "container", "restore", NAME)
        case "checkpoint" | "checkpoint-rm":
            return gpusnap("checkpoint", NAME), (COMMAND, "restore", NAME)
        case "leave-running":
            return gpusnap("checkpoint", "--leave-running", NAME), (COMMAND, "restore", NAME)
        case "to-file":
            return gpusnap("checkpoint", "--to", ARCHIVE, NAME), (COMMAND, "restore", str(ARCHIVE))
        case "restore":
            return gpusnap("restore", NAME), (COMMAND, "restore", NAME)
        case "copy":
            return gpusnap("copy", "first", f"oci:{DATA}/new/folder/store:copied"), (
                *(COMMAND, "restore"),
                f"oci:{DATA}/new/folder/store:copied",
            )
        case _:
            return run_way_of_a_store(way)


def run_way_of_a_store(way: str) -> tuple[Done, Sequence[str]]:
    """Do the same for the ways of stores, and for `recover`."""
    match way:
        case "tag":
            return gpusnap("tag", "first", "third"), (COMMAND, "restore", "third")
        case "prune":
            return gpusnap("prune", "--keep-last", "1", "--gc"), (COMMAND, "restore", "first")
        case "pull":
            with running() as registry:
                there = f"{registry.host}/w:v1"
                good(gpusnap("push", "--plain-http", "first", there))
                for name in ("first", "second"):
                    good(gpusnap("rm", name))
                good(gpusnap("gc"))
                return gpusnap("pull", "--plain-http", there, "--to", f"oci:{STORE}:pulled"), (
                    COMMAND,
                    "restore",
                    "pulled",
                )
        case "spill":
            return gpusnap("suspend", "--spill", "--wait", NAME), (COMMAND, "restore", "first")
        case "recover":
            return gpusnap("recover"), (COMMAND, "restore", "first")
        case _:
            return gpusnap("rm", "--gc", "second"), (COMMAND, "restore", "first")


def check(before: set[str], after: set[str] | None, restore: Sequence[str]) -> str:
    """Check what is left; `after`: the names in the store, if the command had ended. Raises Bad."""
    there = names()
    if not before <= there or (after is not None and there != after):
        raise Bad(f"{sorted(there)} in the store; before: {sorted(before)}, after: {sorted(after or ())}")
    recovered = gpusnap("recover")
    good(recovered)
    if there:
        good(gpusnap("verify", "--all"))
    if after is not None:
        if restore[-1] != NAME:
            end_container()
        good(run_limited(restore))
        Container(NAME).goes_on()
    good(gpusnap("gc"))
    if there:
        good(gpusnap("verify", "--all"))
    end_container()
    start()
    good(gpusnap("checkpoint", "--leave-running", NAME))
    return plain((recovered.out + recovered.err).strip().splitlines()[-1])


def run(way: str, disks: Disks, report: Report, rounds: int) -> None:
    """Run a way's command once, and check the copies."""
    end_container()
    start(*(["--rm"] if way == "checkpoint-rm" else []), into=">" if way in _ENDS else ">>")
    if way == "restore":
        good(gpusnap("checkpoint", NAME))
    if way == "prune":
        for _ in range(2):
            good(gpusnap("checkpoint", "--leave-running", NAME))
    if way == "spill":
        good(gpusnap("suspend", NAME))
    if way == "recover":
        interrupt()
    before = names()
    copies = Copies(disks)
    copies.start()
    try:
        done, restore = run_way(way)
    finally:
        last = copies.end()
    good(done)
    after = names()
    if way in ("leave-running", "restore"):  # the container is there, and has to be removed first
        restore = (*restore[:2], max(each for each in after if each.startswith(f"{NAME}:")))
    chosen = sorted(random.sample(copies.found, min(rounds, len(copies.found))))
    for copy in [*chosen, last]:
        try:
            boot(disks, copy)
            report.said[check(before & after, after if copy is last else None, restore)] += 1
            report.counts[f"{way}, good"] += 1
        except (Bad, Hung, AssertionError, OSError, ValueError, subprocess.CalledProcessError) as error:
            report.failed(f"{way}, {copy.name} of {len(copies.found)}", error, copy)
        report.note(f"{way} {copy.name} of {len(copies.found)}")


def make_disks(given: Sequence[Path], options: str, before: Callable[[], object] = lambda: None) -> Disks:
    """Return the disks, from copies of these images, with Podman's storage; `before` they are mounted."""
    for number in range(8):
        with suppress(FileExistsError):
            os.mknod(f"/dev/loop{number}", stat.S_IFBLK | 0o600, os.makedev(7, number))
    with suppress(FileExistsError):
        os.mknod("/dev/loop-control", stat.S_IFCHR | 0o600, os.makedev(10, 237))
    WORK.mkdir()
    disks = Disks(options)
    call("cp", "--archive", STORAGE, WORK / "containers")
    for each, image in zip(given, disks.images, strict=True):
        call("cp", "--sparse=always", each, image)
    write_settings(f'runtime = "crun"\n[memory]\nchunk-size = "1M"\n[store]\npath = "{STORE}"\n')
    before()
    disks.mount()
    call("cp", "--archive", f"{WORK}/containers/.", STORAGE)
    return disks


def main() -> int:
    options = parser(__doc__ or "", 8)
    options.add_argument("--ways", default=",".join(WAYS))
    options.add_argument("--options", default="")
    options.add_argument("images", nargs=2, type=Path)
    chosen = options.parse_args()
    report = prepare("power_cuts", chosen)
    disks, first = make_disks(chosen.images, chosen.options), WORK / "first"
    start()
    for name in ("first", "second"):
        good(gpusnap("checkpoint", "--leave-running", "--to", f"oci:{STORE}:{name}", NAME))
    remove_all()
    disks.umount()
    disks.copy(first)
    disks.mount()
    for way in chosen.ways.split(","):
        if report.over(chosen.seconds):
            break
        run(way, disks, report, chosen.rounds)
        boot(disks, first)
    remove_all()
    disks.umount()
    call("umount", _BOOT)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
