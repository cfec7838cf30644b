"""Processes that stand still, and one thread of them that does not."""

from __future__ import annotations

import atexit
import errno
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import Signalled, signal_main_in, signals_raise, wait_for

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.gpu.api.errors import PermissionRefused
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.ptrace.tracer import Tracer
from gpusnap.runtime_shim.stopping.stop import Guard, drop_stops, go_on, run_only, run_populating, stop

# Two threads that count, each in a file of its own; the first line says the second one's TID. In C without
# stdio: one that is stopped with a lock (the interpreter's, the C library's) keeps the other waiting.
COUNTERS = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
static void *count(void *name)
{
    for (long number = 1;; number++) {
        char text[24];
        int size = snprintf(text, sizeof(text), "%ld", number);
        int file = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (write(file, text, size) != size || close(file) < 0)
            _exit(1);
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
}
static void *second(void *name)
{
    printf("%d\n", gettid());
    fflush(stdout);
    return count(name);
}
int main(int argc, char **argv)
{
    pthread_t thread;
    pthread_create(&thread, NULL, second, argv[argc - 1]);
    count(argv[1]);
}
"""


@functools.cache
def program() -> str:
    """The program of COUNTERS, made once; it goes with this process."""
    folder = tempfile.mkdtemp(prefix="gpusnap-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = f"{folder}/counters"
    words = ["gcc", "-O1", "-static", "-pthread", "-x", "c", "-o", made, "-"]
    subprocess.run(words, input=COUNTERS, text=True, check=True)
    return made


class Counters:
    """A process with two threads that can be seen to run."""

    def __init__(self, folder: Path) -> None:
        self.files = (folder / "first", folder / "second")
        words = [program(), *map(str, self.files)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.tid = int(self.process.stdout.readline())
        self.pid = self.process.pid

    def counts(self) -> tuple[str, str]:
        return self.files[0].read_text(), self.files[1].read_text()

    def runs(self, thread: int) -> None:
        before = self.counts()[thread]
        wait_for(lambda: self.counts()[thread] not in ("", before), f"thread {thread} runs")


@pytest.fixture
def counters(tmp_path: Path) -> Iterator[Counters]:
    found = Counters(tmp_path)
    wait_for(lambda: all(file.exists() for file in found.files), "both threads run")
    yield found
    found.process.kill()
    found.process.communicate()


def test_stop_and_go_on(counters: Counters) -> None:
    """Every thread stands when stop() returns, and each runs again afterwards."""
    assert not proc.is_still(counters.pid)
    stop([counters.pid], timeout=60)
    assert proc.is_still(counters.pid)
    assert counters.counts() == counters.counts()
    stop([counters.pid], timeout=60)  # it stands already
    go_on([counters.pid])
    counters.runs(0)
    counters.runs(1)


def test_stops_that_are_pending(counters: Counters) -> None:
    """One that was sent to a process which stands already is taken back, and the process stands on."""
    stop([counters.pid], timeout=60)
    os.kill(counters.pid, signal.SIGSTOP)
    wait_for(lambda: proc.stop_pending(counters.pid), "the second SIGSTOP is pending")
    drop_stops([counters.pid])
    assert not proc.stop_pending(counters.pid)
    assert proc.is_still(counters.pid)
    go_on([counters.pid])
    counters.runs(0)
    counters.runs(1)


def test_only_one_thread_runs(counters: Counters) -> None:
    """In the block the second thread runs and the first does not; after it neither, and then both again."""
    stop([counters.pid], timeout=60)
    stands = counters.counts()[0]
    for _ in range(2):
        with run_only(counters.pid, counters.tid):
            counters.runs(1)
            assert counters.counts()[0] == stands
        assert proc.is_still(counters.pid)
    go_on([counters.pid])
    counters.runs(0)
    counters.runs(1)


def test_only_one_thread_runs_while_its_mappings_are_populated(counters: Counters) -> None:
    """The same with a tracer of its own; there is nothing to populate, which is said and hinders nobody."""
    stop([counters.pid], timeout=60)
    stands = counters.counts()[0]
    for _ in range(2):
        with run_populating(counters.pid, counters.tid) as done:
            counters.runs(1)
            assert counters.counts()[0] == stands
        assert proc.is_still(counters.pid)
        assert (done.mappings, done.why_not) == (0, "the driver made no large mapping that it populates")
    go_on([counters.pid])
    counters.runs(0)
    counters.runs(1)


def test_a_sigcont_from_elsewhere(counters: Counters) -> None:
    """While one thread alone shall run, the process is stopped again at once; that thread runs on."""
    stop([counters.pid], timeout=60)
    with run_only(counters.pid, counters.tid) as tracer:
        for _ in range(5):
            again = tracer.stopped_again
            os.kill(counters.pid, signal.SIGCONT)
            wait_for(lambda again=again: tracer.stopped_again > again, "it is stopped again")  # type: ignore[misc]
            wait_for(lambda: proc.is_stopped(counters.pid), "its main thread stands")
        counters.runs(1)
    assert proc.is_still(counters.pid)
    go_on([counters.pid])
    counters.runs(0)


def test_a_sigstop_from_elsewhere(counters: Counters) -> None:
    """The thread that shall run does, whatever stops its process; afterwards all stand, and then all run."""
    stop([counters.pid], timeout=60)
    with run_only(counters.pid, counters.tid):
        for _ in range(5):
            os.kill(counters.pid, signal.SIGSTOP)
            counters.runs(1)
    assert proc.is_still(counters.pid)
    drop_stops([counters.pid])
    go_on([counters.pid])
    counters.runs(0)
    counters.runs(1)


def test_a_guard(counters: Counters) -> None:
    """Whoever lets the process go on, it stands again; until the guard has ended."""
    stop([counters.pid], timeout=60)
    guard = Guard([counters.pid])
    for _ in range(5):
        os.kill(counters.pid, signal.SIGCONT)
        wait_for(lambda: proc.is_still(counters.pid), "it stands again")
    guard.stop_watching()
    go_on([counters.pid])
    counters.runs(0)


def test_a_guard_that_is_interrupted_while_it_begins(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is left that nobody could end."""
    signal_main_in(monkeypatch, threading.Thread, "_bootstrap_inner", "gpusnap-guard")
    stop([counters.pid], timeout=60)
    with signals_raise(), pytest.raises(Signalled):
        Guard([counters.pid])
    assert not [each for each in threading.enumerate() if each.name == "gpusnap-guard"]
    go_on([counters.pid])
    counters.runs(0)


@pytest.mark.parametrize("way", [run_only, run_populating])
def test_what_another_one_traces(counters: Counters, way: Callable[[int, int], Any]) -> None:
    """It cannot be traced, and says so before the block begins."""
    stop([counters.pid], timeout=60)
    with run_only(counters.pid, counters.tid):
        with (
            pytest.raises(PermissionRefused, match=f"thread {counters.tid} .* it is not allowed"),
            way(counters.pid, counters.tid),
        ):
            raise AssertionError("the block ran")
        counters.runs(1)
    go_on([counters.pid])
    counters.runs(0)


def test_it_stands_when_the_block_has_ended(counters: Counters) -> None:
    """At once, also where every core is busy: the kernel only wakes the thread to stop by itself."""
    stop([counters.pid], timeout=60)
    way: Callable[[int, int], Any]
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        for way in (run_only, run_populating) * 50:
            with way(counters.pid, counters.tid):
                pass
            assert proc.is_still(counters.pid)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def test_a_tracer_that_fails(counters: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, so that nobody waits for a thread that it does not let run; and the process stands."""
    pid = counters.pid
    stop([pid], timeout=60)

    def fail(tracer: Tracer) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with run_only(pid, pid) as tracer:
        monkeypatch.setattr(Tracer, "_answer_stops", fail)
        wait_for(lambda: tracer.lost, "the tracer's failure")
        assert "Input/output error" in tracer.lost
        monkeypatch.undo()
    assert proc.is_still(pid)


def test_a_process_that_dies_in_the_block(counters: Counters) -> None:
    """Its end is waited for, so that it is gone and no zombie of ours."""
    stop([counters.pid], timeout=60)
    with run_only(counters.pid, counters.tid):
        counters.process.kill()
    counters.process.wait(60)
    assert not proc.is_running(counters.pid)


def test_a_process_that_is_gone() -> None:
    """stop and go_on leave it out; only() and populated() say that it cannot be traced."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    stop([process.pid], timeout=60)
    go_on([process.pid])
    with (
        pytest.raises(PermissionRefused, match=f"thread {process.pid} of process"),
        run_only(process.pid, process.pid),
    ):
        pass
    with (
        pytest.raises(PermissionRefused, match=f"thread {process.pid} of process"),
        run_populating(process.pid, process.pid),
    ):
        pass


def test_a_process_that_does_not_stand_still(counters: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence after the deadline, with the process named."""
    monkeypatch.setattr(proc, "is_still", lambda pid: False)
    with pytest.raises(GpusnapError, match=f"process {counters.pid} .* did not stop within"):
        stop([counters.pid], timeout=0.05)
    go_on([counters.pid])
