"""The story of the demo, the same for a real GPU and for softgpu. Started by demo.py.

    story.py --here | --software [--mib N]
    story.py --tidy      remove what a killed one left

Exit code 0: all was as it should be. 1: it was not, and one sentence says what. 130: stopped. In each case
the container, its image and the folder are removed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "tests" / "host")]

import image  # noqa: E402  the paths come first
import places  # noqa: E402
import ticks  # noqa: E402
from commands import Commands, Stopped  # noqa: E402
from report import DemoError, say, title  # noqa: E402

NAME = "gpusnap-demo"
IMAGE = f"localhost/{NAME}"
# Not below /tmp: the name is always the same, so that the next run finds what a killed one left, and in a
# folder that all may write to, somebody else could have made it.
FOLDER = Path(f"/var/lib/{NAME}")
GPUWORK = CHECKOUT / "softgpu" / "build" / "bin" / "gpuwork"
ARCHIVE = FOLDER / "checkpoint.tar.zst"
TICKS_BEFORE, TICKS_AFTER = 3, 3


def main() -> int:
    parser = argparse.ArgumentParser()
    which = parser.add_mutually_exclusive_group(required=True)
    for name in ("here", "software", "tidy"):
        which.add_argument(f"--{name}", dest="place", action="store_const", const=name)
    parser.add_argument("--mib", type=int, default=64)
    options = parser.parse_args()
    begin, commands = time.monotonic(), Commands()
    try:
        with _folder(commands):
            said = "" if options.place == "tidy" else _tell(commands, options.place, options.mib)
    except DemoError as error:
        say(f"demo: {error}", file=sys.stderr)
        return 1
    except Stopped:
        say("demo: stopped; container, image and files are removed", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads on, and Python must not complain at exit
        return 1
    if said:
        say(f"\n{said}\n{time.monotonic() - begin:.1f} s in all; container, image and files are removed.")
    return 0


@contextlib.contextmanager
def _folder(commands: Commands) -> Iterator[None]:
    """FOLDER, held against another demo, and nothing of an earlier one there; all is removed at the end."""
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    held = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError("another demo runs on this machine; run this again when it has ended") from None
        _empty(commands)
        try:
            yield
        finally:
            commands.tidying = True
            _empty(commands)
            FOLDER.rmdir()
    finally:
        os.close(held)


def _empty(commands: Commands) -> None:
    for words in (("rm", "--force", "--ignore", "--time", "0", NAME), ("rmi", "--force", "--ignore", IMAGE)):
        code, done = commands.attempt("podman", *words)
        if code:
            raise DemoError(f"`podman {' '.join(words)}` failed ({done.err.strip()}); remove {NAME} yourself")
    for entry in FOLDER.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _tell(commands: Commands, where: str, mib: int) -> str:
    """The whole story; what was shown, in a sentence."""
    place = places.here(FOLDER) if where == "here" else places.software()
    story = Story(commands, place, mib)
    story.prepare()
    story.start()
    story.checkpoint()
    story.remove()
    story.restore()
    story.check()
    story.timeline()
    return story.summary


class Story:
    """Each method is a step, in this order."""

    def __init__(self, commands: Commands, place: places.Place, mib: int) -> None:
        self._commands = commands
        self._place = place
        self._mib = mib
        self._before: list[ticks.Tick] = []
        self._used = 0
        self._restored_at = datetime.now(UTC)
        self.summary = ""

    def _podman(self, *words: str, show: bool = True) -> float:
        """Run Podman with gpusnap-runtime; how long it took."""
        return self._commands.run("podman", "--runtime", self._place.runtime, *words, show=show).seconds

    def _log(self) -> list[ticks.Tick]:
        _, done = self._commands.attempt("podman", "logs", "--timestamps", NAME)
        return ticks.parse(done.out, done.err)

    def prepare(self) -> None:
        title("1. Make an image: gpuwork, a C program that uses CUDA, and its libraries from this machine")
        tar = FOLDER / "image.tar"
        image.write(tar, GPUWORK, self._place.libraries)
        self._commands.run("podman", "import", str(tar), IMAGE)
        tar.unlink()

    def start(self) -> None:
        title(
            f"2. Start it. It fills {self._mib} MiB of GPU memory; each tick a kernel on the GPU adds one\n"
            "   to every word, and the program compares every word with what it must be"
        )
        # --log-driver: the log goes into the checkpoint, so that it can be checked from its first line.
        options = ("--detach", "--name", NAME, "--network", "host", "--log-driver", "k8s-file")
        workload = (f"/{GPUWORK.name}", "--mib", str(self._mib))
        self._podman("run", *options, *self._place.options, IMAGE, *workload)
        self._wait_for_ticks(TICKS_BEFORE)
        self._before = self._log()
        for tick in self._before[-TICKS_BEFORE:]:
            say(f"  {tick.line}")
        self._used = ticks.gpu_memory(self._before[-1].gpus)
        say(f"  in use on that GPU: {ticks.size(self._used)}")

    def checkpoint(self) -> None:
        title("3. Checkpoint it to a file. Podman knows nothing of GPUs: gpusnap-runtime does that part")
        seconds = self._podman("container", "checkpoint", "--export", str(ARCHIVE), NAME)
        from gpusnap.operations.open import load_manifest

        own = max(step.start + step.seconds for step in load_manifest(str(ARCHIVE)).timing)
        say(f"  took {seconds:.1f} s: {own:.1f} s gpusnap-runtime with CRIU, the rest Podman's packing")
        say(f"  size of the file: {ticks.size(ARCHIVE.stat().st_size)}")

    def remove(self) -> None:
        title("4. Remove the container. The file is all that is left")
        self._podman("rm", NAME)
        gpus, limit = self._before[-1].gpus, self._used - (self._mib << 20) * 3 // 4

        def is_free() -> bool:
            return ticks.gpu_memory(gpus) <= limit

        self._commands.until(is_free, "the release of the container's GPU memory", deadline=15)
        say(f"  in use on that GPU: {ticks.size(ticks.gpu_memory(gpus))}")

    def restore(self) -> None:
        title("5. Restore it from the file")
        self._restored_at = datetime.now(UTC)
        seconds = self._podman("container", "restore", "--import", str(ARCHIVE))
        say(f"  took {seconds:.1f} s")

    def check(self) -> None:
        title("6. Check: does it go on where it was, with its GPU memory as it was?")
        at_restore = len(self._log())
        self._wait_for_ticks(at_restore + TICKS_AFTER)
        log = self._log()
        ticks.check(log)
        if len(log) < len(self._before) or log[: len(self._before)] != self._before:
            raise DemoError("the restored container's log does not begin as the first one's; report this")
        for line in ticks.around(log, self._restored_at, TICKS_AFTER):
            say(f"  {line}")
        say(f"  {len(log)} ticks, none missing, every word right in each")
        say(f"  in use on that GPU: {ticks.size(ticks.gpu_memory(log[-1].gpus))}")
        self.summary = (
            f"A running container with {self._mib} MiB in GPU memory became a file, and the file a running\n"
            "container again: no tick lost, no word wrong. Nothing changed in the program or the image."
        )

    def timeline(self) -> None:
        title("7. What gpusnap did at the checkpoint")
        say(f"$ {self._place.gpusnap} inspect {ARCHIVE}")
        os.environ.setdefault("COLUMNS", "110")
        from gpusnap.cli import main as cli

        cli.command.main(["inspect", str(ARCHIVE)], prog_name="gpusnap", standalone_mode=False)

    def _wait_for_ticks(self, count: int) -> None:
        def enough() -> bool:
            found = self._log()
            ticks.check(found)
            if len(found) < count and self._stopped():
                raise DemoError(
                    f"the workload ended before tick {count}, with the words: {self._last_words()}"
                )
            return len(found) >= count

        self._commands.until(enough, f"tick {count} of the workload")

    def _stopped(self) -> bool:
        _, done = self._commands.attempt("podman", "inspect", "--format", "{{.State.Running}}", NAME)
        return done.out.strip() != "true"

    def _last_words(self) -> str:
        _, done = self._commands.attempt("podman", "logs", "--tail", "1", NAME)
        return (done.out + done.err).strip() or "none"


if __name__ == "__main__":
    sys.exit(main())
