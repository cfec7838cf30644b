"""The stages of a dump and of a restore at which CRIU waits for gpusnap.

CRIU runs a program at each of its stages (criu(8), --action-script). If that program fails at one of these,
CRIU ends the restore and kills what it has restored (criu/cr-restore.c, restore_root_task), or lets what it
has dumped go on (criu/cr-dump.c, cr_dump_finish):

    post-dump       all images are written, and the processes have neither ended nor gone on
    pre-restore     no process exists yet
    post-restore    all of them exist, with their memory, and each waits in CRIU's own code

The program is the launcher (runtime_shim/launcher/gate.h). It asks gpusnap over a socket and waits for the
answer, so that CRIU continues only if gpusnap says so. If gpusnap is killed, the connection ends, the program
fails, and so does the dump or the restore. So it does if the program is killed: for CRIU, that is a failure
like any other (criu/util.c, cr_system_userns). CRIU waits for the program without a deadline: if a signal has
stopped it, gpusnap kills it. When crun or runc calls CRIU, it reads the option from its configuration file
since 3.19.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base import threads
from gpusnap.runtime_shim.base.errors import GpusnapError, RuntimeFailed, make_unforeseen
from gpusnap.runtime_shim.process import pidfd, proc
from gpusnap.runtime_shim.process.stopped_processes import StoppedProcesses
from gpusnap.runtime_shim.runtime.child_process import Child
from gpusnap.runtime_shim.runtime.criu.version import criu_version

POST_DUMP, PRE_RESTORE, POST_RESTORE = "post-dump", "pre-restore", "post-restore"
"""The names of the stages in CRIU."""
VARIABLE = "GPUSNAP_GATE"
"""The variable in the environment of CRIU, and of the launcher: the path of the socket."""
_STAGE = "CRTOOLS_SCRIPT_ACTION"
_PROBE, _PROBE_DUMP = "probe", "probe-dump"
"""Ask the launcher whether it knows the stages of a restore, or also those of a dump."""
_OLDEST = (3, 19)
_VERSION = compile_later(r"(\d{1,6})\.(\d{1,6})")
_LINE = 128
# Seconds for a program to send its line after it was started, and for the probe, which takes some
# milliseconds.
_PATIENCE = 10.0
# Seconds for which the program may be stopped by a signal, and between two checks of that.
_STOPPED, _LOOK = 10.0, 2.0
# Seconds until a connection that could not be taken is tried again.
_AGAIN = 0.1

Busy = Callable[[], None]
"""Reports to CRIU's side that the work continues. Raises OSError if nobody waits for it any more."""
Stage = Callable[[int, Busy], bool]
"""The work at a stage; returns whether CRIU may go on. It gets the PID of the init, 0 before it is restored.

Raises GpusnapError."""


class Gate:
    """Listens until it is closed."""

    def __init__(self, path: str, launcher: str, stages: Mapping[str, Stage], *, criu: str = "") -> None:
        """`path`: of the socket, in a directory that only root can access. `criu`: as for criu_version.

        Raises OSError, and RuntimeFailed.
        """
        self._criu = criu
        self._path, self._launcher, self._stages = path, launcher, stages
        self._probe = _PROBE_DUMP if POST_DUMP in stages else _PROBE
        self._probed = self._closed = False
        self._watched = StoppedProcesses(_STOPPED)
        """When CRIU's programs were first seen stopped, by PID and start time."""
        self.error: GpusnapError | None = None
        """The reason if CRIU was not allowed to continue."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(path)
            self._socket.listen()
            self._thread = threading.Thread(target=self._serve, name="gpusnap-gate", daemon=True)
            threads.start(self._thread)
        except BaseException:
            self._socket.close()
            raise

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables for CRIU's environment."""
        return {VARIABLE: self._path}

    def works(self) -> bool:
        """Whether this CRIU runs such programs, and the launcher works as one.

        An earlier version's launcher does not: gpusnap may have been updated, and the launcher not yet. And a
        file system may be mounted without the right to execute.
        """
        version = _VERSION.match(criu_version(self._criu) if self._criu else criu_version())
        if version is None or (int(version[1]), int(version[2])) < _OLDEST or " " in self._launcher:
            return False
        try:
            child = Child(
                [self._launcher],
                env={**self.environment, _STAGE: self._probe},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except (OSError, ValueError):
            return False
        try:
            return child.wait(_PATIENCE) == 0 and self._probed
        except subprocess.TimeoutExpired:
            child.end()
            return False

    def close(self) -> None:
        """Stop listening, and wait for a stage in progress. May be called twice."""
        self._closed = True
        with contextlib.suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)
        threads.join(self._thread)
        self._socket.close()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            if not poll.poll(_LOOK * 1000):
                self._end_stopped()
                continue
            try:
                connection = self._socket.accept()[0]
            except OSError:
                if self._closed:
                    return
                time.sleep(_AGAIN)  # there is no descriptor left for it, or no memory: CRIU waits
                continue
            with connection:
                try:
                    self._answer(connection)
                except OSError:
                    continue  # it has ended, and CRIU knows that

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_PATIENCE)
        line = _read_line(connection)
        if line is None:
            return  # the program was killed, with CRIU or alone, and CRIU or its log says so
        stage, _, init = line.partition(" ")
        connection.sendall(b"y" if self._pass(stage, init, lambda: _tell_busy(connection)) else b"n")

    def _end_stopped(self) -> None:
        """Kill our programs that CRIU waits for, if a signal has stopped them for too long."""
        try:
            found = self._watched.find_long(self._list_stopped())
        except GpusnapError:
            return  # the next time, then
        for pid in found:
            self.error = self.error or RuntimeFailed(
                f"the program that CRIU runs at its stages, process {pid}, was stopped by a signal",
                hint="find out what sends SIGSTOP to gpusnap's processes, then try again",
                code="GPS-524",
            )
            with contextlib.suppress(OSError, GpusnapError):  # the next time, then
                pidfd.send(pid, signal.SIGKILL)

    def _list_stopped(self) -> Iterator[proc.Process]:
        for pid in proc.pids():
            # The state first: reading the environment of a process may block.
            if proc.is_thread_stopped(pid, pid) and (found := proc.process(pid)) is not None:
                variables = proc.environment(pid)
                if variables.get(VARIABLE) == self._path and _STAGE in variables:
                    yield found

    def _pass(self, stage: str, init: str, busy: Busy) -> bool:
        if stage == self._probe:
            self._probed = True
            return True
        try:
            if stage not in self._stages or not init.isdigit():
                raise RuntimeFailed(
                    f"CRIU asks at a stage that is none: {stage!r} of process {init!r}",
                    hint="set memory.parallel-restore to false, and report this",
                )
            return self._stages[stage](int(init), busy)
        except Exception as error:
            self.error = error if isinstance(error, GpusnapError) else make_unforeseen(error)
            return False


def _tell_busy(connection: socket.socket) -> None:
    """Report that the work continues, unless the reader has not read earlier reports, and may be stopped.

    By write(2): socket.send would wait for as long as the socket's timeout, which makes the descriptor
    non-blocking.
    """
    with contextlib.suppress(BlockingIOError):
        os.write(connection.fileno(), b".")


def _read_line(connection: socket.socket) -> str | None:
    """Return a line, or what is too long for one; None if the connection ended before."""
    data = b""
    while not data.endswith(b"\n") and len(data) < _LINE:
        piece = connection.recv(_LINE)
        if not piece:
            return None
        data += piece
    return os.fsdecode(data).strip()
