"""What the programs here share: they tick, say each time what they hold, and end at the first wrong word."""

from __future__ import annotations

import _ctypes
import argparse
import contextlib
import os
import subprocess
import threading
import time
import warnings
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
    options.add_argument("--forks", type=int, default=0, help="threads that fork and load libraries")
    return options


def _fork_and_load() -> None:
    """Hold the C library's locks most of the time: fork takes malloc's, loading a library the loader's.

    An import would load its library once: Python never unloads one.
    """
    while True:
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        for name in ("libresolv.so.2", "libutil.so.1", "libanl.so.1"):
            with contextlib.suppress(OSError):
                _ctypes.dlclose(_ctypes.dlopen(name, os.RTLD_NOW))


def _programs() -> None:
    while True:
        subprocess.run(["/bin/true"], check=True)


def run(step: Step, options: argparse.Namespace) -> None:
    """Tick, one line each: which, whether right, the checksum, and when.

    When is the time of day: after a restore CLOCK_MONOTONIC goes on from where it was (time_namespaces(7)).
    """
    if options.forks:
        # JAX and Python warn of a fork in a process with threads; it is what is to be tried.
        warnings.simplefilter("ignore")
    for _ in range(options.forks):
        threading.Thread(target=_fork_and_load, daemon=True).start()
    if options.programs:
        threading.Thread(target=_programs, daemon=True).start()
    tick = 0
    while not options.ticks or tick < options.ticks:
        tick += 1
        good, checksum = step(tick)
        word, now = "ok" if good else "BAD", time.time()
        # In one write(2): ranks share the log, and print() may write the end of the line by itself.
        os.write(1, f"pid={os.getpid()} tick={tick} {word} sum={checksum} at={now:.4f}\n".encode())
        if not good:
            raise SystemExit(1)
        if options.pause:
            time.sleep(options.pause)
