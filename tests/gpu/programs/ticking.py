"""What the programs here share: they tick, say each time what they hold, and end at the first wrong word."""

from __future__ import annotations

import argparse
import os
import subprocess
import threading
import time
from collections.abc import Callable

Step = Callable[[int], tuple[bool, str]]
"""One tick, by number from 1 on: whether all of memory was right, and a checksum of what was computed."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all of them take."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--mib", type=int, default=256, help="device memory that is checked word by word")
    options.add_argument("--ticks", type=int, default=0, help="end after so many (0: never)")
    options.add_argument("--pause", type=float, default=0.03, help="seconds between ticks")
    options.add_argument("--programs", action="store_true", help="run programs all the time, by vfork")
    return options


def _programs() -> None:
    while True:
        subprocess.run(["/bin/true"], check=True)


def run(step: Step, options: argparse.Namespace) -> None:
    """Tick, one line each: which, whether right, the checksum, and when.

    When is the time of day: after a restore CLOCK_MONOTONIC goes on from where it was (time_namespaces(7)).
    """
    if options.programs:
        threading.Thread(target=_programs, daemon=True).start()
    tick = 0
    while not options.ticks or tick < options.ticks:
        tick += 1
        good, checksum = step(tick)
        word, now = "ok" if good else "BAD", time.time()
        print(f"pid={os.getpid()} tick={tick} {word} sum={checksum} at={now:.4f}", flush=True)
        if not good:
            raise SystemExit(1)
        if options.pause:
            time.sleep(options.pause)
