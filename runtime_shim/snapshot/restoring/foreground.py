"""Runs the real runtime at a restore in a thread, does other work meanwhile, and watches it.

Because it runs in a thread, a signal can end a restore at any moment, and so can a CRIU log that grows
without limit. Without --detach, it runs until the container ends, while the GPU state is restored.

A limit on the size of files (setrlimit(2), RLIMIT_FSIZE) would not work for the log: it would also apply to
the container's own files, which CRIU writes and whose size it sets (deleted files, memfds, tmpfs).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from gpusnap.runtime_shim.base.errors import GpusnapError, RuntimeFailed, make_unforeseen, raise_as
from gpusnap.runtime_shim.base.transaction import forward_signals, hold_signals, stop_if_asked
from gpusnap.runtime_shim.process import pidfd, proc
from gpusnap.runtime_shim.runtime.command_line import RestoreCall
from gpusnap.runtime_shim.runtime.criu import descendants, scratch_files
from gpusnap.runtime_shim.runtime.criu.run import Invocation
from gpusnap.runtime_shim.runtime.criu.scratch_files import scratch

LARGEST_LOG = 256 << 20
"""Bytes of CRIU's log; the log of a thousand processes takes a few MiB."""
_INTERVAL = 0.01  # seconds between two checks of the PID file, the log, and signals


class RuntimeThread:
    """The real runtime in a thread. `run` gets a function that takes the runtime's PID."""

    def __init__(self, run: Callable[[Callable[[int], object]], Invocation], log: str) -> None:
        """`log`: the path of CRIU's log."""
        self._pids: list[int] = []
        self._ended: list[Invocation | GpusnapError] = []
        self._run, self._log = run, log
        self._thread = threading.Thread(target=self._work)

    def wait_until_restored(self, pid_file: str | None) -> bool:
        """Start the runtime, and wait until it has restored the container; False if it ended before.

        Without a PID file, that is at its end. Signals are held back and checked for, see
        transaction.hold_signals. Raises Interrupted, and RuntimeFailed for a log that is too large; the
        runtime and everything that it started have ended then.
        """
        others = descendants.children()
        self._thread.start()
        while self._thread.is_alive() and not (pid_file and _is_written(pid_file)):
            self._thread.join(_INTERVAL)
            try:
                stop_if_asked()
                self._check_log()
            except GpusnapError:
                descendants.kill_all(
                    but=others, waited=lambda: self._pids, ended=lambda: not self._thread.is_alive()
                )
                raise
        return self._thread.is_alive()

    def stand_for(self, name: str) -> Invocation:
        """From now on only pass signals to the runtime, which passes them to the container.

        Raises GpusnapError if it could not be run.
        """
        runs = bool(self._pids)
        with forward_signals(partial(pidfd.send, self._pids[0])) if runs else hold_signals():
            self._thread.join()
        return self.result(name)

    def result(self, name: str) -> Invocation:
        """Return its result, once it has ended. Raises GpusnapError if it could not be run."""
        if not self._ended:
            raise RuntimeFailed(f"{name} could not be run", code="GPS-003")
        done = self._ended[0]
        if isinstance(done, GpusnapError):
            raise done
        return done

    def _note_started(self, pid: int) -> None:
        """Remember it before anybody waits for its end, which may come long before a signal for it."""
        process = proc.process(pid)
        pidfd.remember([(pid, process.start if process is not None else 0)])  # 0: it has already ended
        self._pids.append(pid)

    def _check_log(self) -> None:
        with contextlib.suppress(OSError):
            if os.stat(self._log, follow_symlinks=False).st_size > LARGEST_LOG:
                raise RuntimeFailed(
                    f"CRIU was killed, because its log {self._log} exceeded {LARGEST_LOG >> 20} MiB",
                    hint="its last lines show what CRIU was repeating; gpusnap verify looks for damage",
                )

    def _work(self) -> None:
        try:
            self._ended.append(self._run(self._note_started))
        except GpusnapError as error:
            self._ended.append(error)
        except Exception as error:  # of any kind: the waiting thread raises it, not this one
            self._ended.append(make_unforeseen(error))


@contextmanager
def pid_file(call: RestoreCall) -> Iterator[str]:
    """Return where the runtime will report that the container is restored; an old file is removed first."""
    if call.pid_file:
        used = raise_as(GpusnapError, f"the PID file {call.pid_file} cannot be used")
        with used, contextlib.suppress(FileNotFoundError):
            os.unlink(call.pid_file)
        yield call.pid_file
    else:
        with tempfile.TemporaryDirectory(prefix=scratch_files.prefix("pid"), dir=scratch()) as folder:
            yield os.path.join(folder, "pid")


def _is_written(path: str) -> bool:
    try:
        return os.path.getsize(path) > 0
    except OSError:
        return False
