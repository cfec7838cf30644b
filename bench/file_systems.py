"""A store on other file systems: each command that writes or reads one, with the disk as it is and full.

    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 --bind /srv/xfs:/mnt/xfs --
        /opt/gpusnap/bin/python -B /src/bench/file_systems.py [--runtime crun] [--rounds 5] /mnt/xfs

Each directory is the root of a file system of some 600 MiB, which is filled. A container of 24 MiB on
softgpu, which checks every byte at each tick, is checkpointed there into a store and an archive, suspended
with --spill, restored from each, and copied. Then the disk is filled: before a checkpoint, which has to fail
with a message, and the container to continue; and, --rounds times, at a random moment of a checkpoint. Where
that has ended the container, it has to be restored, with every byte right, once there is room again. Exit
code 1 if anything was lost or left behind.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from faulthost import COMMAND, Bad, parser, prepare, remove_all, run_limited
from shimhost import write_settings
from support import Container, Done, good, podman

NAME = "w"
_PIECE = bytes(1 << 20)
_ROOM = 3 << 20
"""Bytes that a full disk has left: enough to begin a checkpoint, and too few for its memory."""
_ENOUGH = 80 << 20


def gpusnap(*words: str) -> Done:
    begin = time.monotonic()
    done = run_limited([COMMAND, *words])
    said = (done.out + done.err).strip().replace("\n", "; ")
    print(f"    {time.monotonic() - begin:5.2f} s  {' '.join(words)}: exit code {done.code}; {said[:200]}")
    return done


def fill(folder: Path, leaving: int) -> Path:
    """Write a file until the disk has so many bytes of room, or none."""
    path = folder / "filled"
    with path.open("ab", buffering=0) as file, suppress(OSError):
        while os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize > leaving:
            file.write(_PIECE)
            os.fsync(file.fileno())
    return path


def fill_meanwhile(folder: Path, container: Container, words: list[str], seconds: float) -> None:
    """Fill the disk after so many seconds of a checkpoint; then the container runs, or can be restored."""

    def during(process: subprocess.Popen[bytes]) -> None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        fill(folder, 0)

    filled = fill(folder, _ENOUGH)
    done = run_limited([COMMAND, "checkpoint", *words, NAME], during=during)
    filled.unlink()
    said = done.err.strip().replace("\n", "; ")
    print(
        f"    full after {seconds:.2f} s  {' '.join(words)}: exit code {done.code}; {said[:300]}", flush=True
    )
    if "Traceback" in said:
        raise Bad(said)
    gpusnap("recover")
    if container.inspect()["State"]["Status"] != "running":
        restored = gpusnap("restore", NAME) if not done.code else None
        if restored is None or restored.code:
            good(podman("container", "restore", NAME))
    container.goes_on()


def check(folder: Path, runtime: str, rounds: int) -> None:
    """Run all of it on one file system. Raises Bad, AssertionError."""
    store, archive, other = folder / "store", str(folder / "w.tar.zst"), f"oci:{folder}/other:{NAME}"
    write_settings(f'runtime = "{runtime}"\n[memory]\nchunk-size = "1M"\n[store]\npath = "{store}"\n')
    container = Container.start(NAME, "--mib", "24")
    good(gpusnap("checkpoint", "--leave-running", NAME))
    good(gpusnap("suspend", "--spill", "--wait", NAME))
    good(gpusnap("resume", NAME))
    container.goes_on()
    for place in ("", archive, other):
        good(gpusnap("checkpoint", *(["--to", place] if place else []), NAME))
        good(podman("rm", NAME))
        good(gpusnap("restore", place or NAME))
        container.goes_on()
    good(gpusnap("copy", NAME, f"{other}2"))
    filled = fill(folder, _ROOM)
    options: tuple[list[str], list[str]] = ([], ["--leave-running"])
    for each in options:
        if gpusnap("checkpoint", *each, NAME).code == 0:
            raise Bad("a checkpoint succeeded on a full disk")
        container.goes_on()
    filled.unlink()
    for number in range(rounds):
        fill_meanwhile(folder, container, options[number % 2], random.uniform(0.1, 0.6))
    good(gpusnap("checkpoint", NAME))
    good(podman("rm", NAME))
    good(gpusnap("restore", NAME))
    container.goes_on()
    good(gpusnap("verify", "--all"))
    good(gpusnap("gc"))
    if left := list((store / "staging").iterdir()):
        raise Bad(f"left: {left}")
    said = gpusnap("recover").err
    if "nothing to recover" not in said and "no container needs recovery" not in said:
        raise Bad("there is something to recover")


def main() -> int:
    options = parser(__doc__ or "", 4)
    options.add_argument("--runtime", default="crun")
    options.add_argument("directories", nargs="+", type=Path)
    chosen = options.parse_args()
    prepare("file_systems", chosen)
    bad = 0
    for folder in chosen.directories:
        print(folder, flush=True)
        try:
            check(folder, chosen.runtime, chosen.rounds)
            print("    good", flush=True)
        except (Bad, AssertionError, OSError) as error:
            bad += 1
            print(f"    bad: {error}", flush=True)
        finally:
            remove_all()
            for name in ("store", "other"):
                shutil.rmtree(folder / name, ignore_errors=True)
            for name in ("w.tar.zst", "filled"):
                (folder / name).unlink(missing_ok=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
