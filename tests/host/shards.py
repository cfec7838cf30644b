"""The integration tests, one test host for each file of them, one more at once than there are cores.

    tests/host/shards.py [--suite sid] [pytest's options]

Most of their time is waiting: for ticks, for CRIU, for a container to end. Each file runs in a test host of
its own, so they do not meet; the output of a file is printed when it is done. Exit code 1 where a test
failed. Names of files among the options choose these alone.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
TESTS = Path("tests/integration")
# Unit tests with control groups of version 2, which a machine with version 1 beside it does not let us make.
UNIT = dict.fromkeys(("test_frozen.py", "test_lull.py"), Path("tests/unit"))
HOST = "tests/host/host"
ENTER = ["enter", "--env", "GPUSNAP_TESTHOST=1", "--"]
PYTEST = ["/opt/gpusnap/bin/python", "-B", "-m", "pytest", "-p", "no:cacheprovider", "-q", "--color=no"]
# The longest ones, which nobody wants to wait for at the end.
FIRST = [
    "test_neighbours.py",
    "test_recover.py",
    "test_remap.py",
    "test_keep.py",
    "test_ranks.py",
    "test_killed_restore.py",
    "test_containerd.py",
    "test_criu_plugins.py",
    "test_artifacts.py",
    "test_bench.py",
    "test_podman.py",
]
# pytest's exit code where the options select no test of a file; sysexits of a run that was ended.
NONE_SELECTED = 5
_SUMMARY = re.compile(r"(\d+) (passed|failed|skipped|error)")


class Shards:
    """Files that wait, and what has become of the others."""

    def __init__(self, files: Sequence[str], options: Sequence[str], *, suite: Sequence[str] = ()) -> None:
        self._waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in files:
            self._waiting.put(name)
        self._options = options
        self._host = [HOST, *suite, *ENTER]
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False
        self.failed: list[str] = []
        self.counts: dict[str, int] = {}

    def work(self) -> None:
        """One test host after the other, until no file waits."""
        while True:
            try:
                name = self._waiting.get_nowait()
            except queue.Empty:
                return
            begun = time.monotonic()
            code, said = self._run(name)
            with self._lock:
                if code not in (0, NONE_SELECTED):
                    self.failed.append(name)
                for number, what in _SUMMARY.findall(said.splitlines()[-1] if said.strip() else ""):
                    self.counts[what] = self.counts.get(what, 0) + int(number)
                if code != NONE_SELECTED:
                    print(f"--- {name}, {time.monotonic() - begun:.0f} s\n{said.rstrip()}", flush=True)

    def end(self) -> None:
        """Have all of them end as an interrupt would, and begin no more."""
        with self._lock:
            self._ended = True
            running = list(self._running)
        for process in running:
            process.send_signal(signal.SIGINT)

    def _run(self, name: str) -> tuple[int, str]:
        argv = [*self._host, *PYTEST, str(UNIT.get(name, TESTS) / name), *self._options]
        with self._lock:
            if self._ended:
                return 130, ""
            process = subprocess.Popen(
                argv,
                cwd=CHECKOUT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self._running.add(process)
        said, _ = process.communicate()
        with self._lock:
            self._running.discard(process)
        return process.returncode, said


def selected(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files to run, the longest first, and the other words, which are pytest's."""
    named = [Path(word).name for word in words if word.endswith(".py")]
    found = named or sorted([*UNIT, *(path.name for path in (CHECKOUT / TESTS).glob("test_*.py"))])
    found.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    return found, [word for word in words if not word.endswith(".py")]


def main() -> int:
    words = sys.argv[1:]
    suite, words = (words[:2], words[2:]) if words[:1] == ["--suite"] else ([], words)
    shards = Shards(*selected(words), suite=suite)
    # A sixth of a file's time nobody works: it waits for ticks, and for containers to end.
    threads = [threading.Thread(target=shards.work) for _ in range((os.cpu_count() or 1) + 1)]

    def stop(_number: int, _frame: object) -> None:
        shards.end()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("=== " + ", ".join(f"{number} {what}" for what, number in sorted(shards.counts.items())))
    if shards.failed:
        print("failed: " + " ".join(sorted(shards.failed)))
    return 1 if shards.failed or not shards.counts else 0


if __name__ == "__main__":
    sys.exit(main())
