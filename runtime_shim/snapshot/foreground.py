"""Runs the real runtime at a restore, works beside it, and watches it.

It runs in a thread, so a signal can end a restore at any moment, and so can a CRIU log that grows without
end. Without --detach, it stays until the container ends, while the GPU state is restored.

A limit on the size of files (setrlimit(2), RLIMIT_FSIZE) would not do for the log: it would hold as well for
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

from gpusnap.runtime_shim.errors import GpusnapError, RuntimeFailed, make_unforeseen, reason
from gpusnap.runtime_shim.process import pidfd, proc
from gpusnap.runtime_shim.runtime.command_line import RestoreCall
from gpusnap.runtime_shim.runtime.criu import descendants, scratch_files
from gpusnap.runtime_shim.runtime.criu.run import Invocation
from gpusnap.runtime_shim.runtime.criu.scratch_files import scratch
from gpusnap.runtime_shim.transaction import forward_signals, hold_signals, stop_if_asked

LARGEST_LOG = 256 << 20
"""Bytes of CRIU's log; that of a thousand processes takes some MiB."""
_INTERVAL = 0.01  # seconds between two looks at the PID file, the log, and signals


class RuntimeThread:
    """The real runtime, run by a thread of ours. `run` is told a function that takes the runtime's PID."""

    def __init__(self, run: Callable[[Callable[[int], object]], Invocation], log: str) -> None:
        """`log` is the path of CRIU's."""
        self._pids: list[int] = []
        self._ended: list[Invocation | GpusnapError] = []
        self._run, self._log = run, log
        self._thread = threading.Thread(target=self._work)

    def wait_until_restored(self, pid_file: str | None) -> bool:
        """Start it, and wait until it says that the container is there; False where it ended before.

        Without a PID file that is only at its end. A signal is looked for while it is held back, see
        transaction.hold_signals. Raises Interrupted, and RuntimeFailed for a log that is too large; the
        runtime and all that it started are gone then.
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
        """Only stand for it from now on: signals go to it, and it hands them to the container.

        Raises GpusnapError where it could not be run.
        """
        runs = bool(self._pids)
        with forward_signals(partial(pidfd.send, self._pids[0])) if runs else hold_signals():
            self._thread.join()
        return self.result(name)

    def result(self, name: str) -> Invocation:
        """What it said, once it has ended. Raises GpusnapError where it could not be run."""
        if not self._ended:
            raise RuntimeFailed(f"{name} could not be run", code="GPS-003")
        done = self._ended[0]
        if isinstance(done, GpusnapError):
            raise done
        return done

    def _note_started(self, pid: int) -> None:
        """Before anybody waits for its end, which may come long before a signal for it."""
        process = proc.process(pid)
        pidfd.remember([(pid, process.start if process is not None else 0)])  # 0: it has ended already
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
        except Exception as error:  # of whatever kind, it is for who waits, not for the end of this thread
            self._ended.append(make_unforeseen(error))


@contextmanager
def pid_file(call: RestoreCall) -> Iterator[str]:
    """Where the runtime says that the container is restored; an old file there would say so too early."""
    if call.pid_file:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(call.pid_file)
        except OSError as error:
            raise GpusnapError(f"the PID file {call.pid_file} cannot be used: {reason(error)}") from error
        yield call.pid_file
    else:
        with tempfile.TemporaryDirectory(prefix=scratch_files.prefix("pid"), dir=scratch()) as folder:
            yield os.path.join(folder, "pid")


def _is_written(path: str) -> bool:
    try:
        return os.path.getsize(path) > 0
    except OSError:
        return False
