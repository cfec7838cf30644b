"""Questions that a child process asks for us, because whoever asks may have to be left behind.

A file or memory of a container may be of a file system in user space (FUSE). Who looks at it waits for that
file system's server, and once the server has the request, not even SIGKILL ends the wait (linux,
fs/fuse/dev.c, request_wait_answer). A process with a thread in there stays a zombie that nobody can reap, and
Podman would wait for it with the container's lock held. So a worker asks, which is killed when it does not
answer in time, and ends when the server does:

    gpusnap ── asks for workers ──> forker, which never asks anything and ends with gpusnap
        └───── one question at a time ──> worker, forked by the forker

What a library tells that may not answer is asked in a worker of its own, a Companion: what it has loaded for
one question is there for the next, and is imported beside us, by another core.

Our sends and receives have deadlines: a child may be stopped (SIGSTOP). A worker that stands so for some
seconds is killed, and another one asked. The sends and receives of the children have no deadlines: they end
when gpusnap does, which alone has the other ends of their sockets, and which kills them as it ends, in case
that one is stopped. A child is ended by its pidfd.
That of a worker comes from the forker, which never waits for a worker: when the forker has ended, another
process may have the worker's PID.

A worker has a session of its own, no terminal, no file, lock or memory mapped shared of ours: only its end of
a pair of sockets. A question is a function of a module with arguments that pickle can carry. What only waits
for the mm->mmap_lock of a process can be killed, and is asked in a thread: see deadlines.py.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import _bootstrap
from typing import Any, ClassVar, NoReturn, TypeVar

from gpusnap.runtime_shim.deadlines import PATIENCE, wait_for_end
from gpusnap.runtime_shim.errors import GpusnapError, reason

T = TypeVar("T")

_LENGTH = struct.Struct("=Q")
_NUMBER = struct.Struct("=i")
_READY = b"r"
_START = 30.0  # seconds for a child to run at last, as threads.py has it
_ENDING = 10.0  # seconds for a killed forker to end, which waits for nothing
_STOPPED = 5.0  # seconds for which a worker may be stopped by a signal: nobody is to do that
_LOOK = 1.0  # seconds between two looks for that
# Signals that this process may have handlers for.
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)


class Unanswered(GpusnapError):
    """A process has a file or memory of a file system that does not answer."""

    code = "GPS-225"


class _Ended(Exception):
    """The child at the other end is no more, or is stopped and will not answer."""


class _Channel:
    """Messages of any length over a stream socket."""

    def __init__(self, end: socket.socket, look: Callable[[], None] = lambda: None) -> None:
        """`look` is called every second while the other end is waited for, and may raise."""
        self._socket = end
        self._look = look

    def send(self, data: bytes, deadline: float | None = None) -> None:
        """Raises TimeoutError when time.monotonic() is past the deadline, _Ended."""
        left = memoryview(_LENGTH.pack(len(data)) + data)
        while left:
            left = left[self._try(self._socket.send, left, deadline) :]

    def receive(self, deadline: float | None = None) -> bytes:
        """As `send`."""
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        return self._exactly(size, deadline)

    def close(self) -> None:
        """Let go of it."""
        self._socket.close()

    def _exactly(self, size: int, deadline: float | None) -> bytes:
        found = bytearray(size)
        view = memoryview(found)
        while view:
            count = self._try(self._socket.recv_into, view, deadline)
            if not count:
                raise _Ended
            view = view[count:]
        return bytes(found)

    def _try(self, call: Callable[[memoryview], int], part: memoryview, deadline: float | None) -> int:
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 1e-3)
            self._socket.settimeout(None if left is None else min(left, _LOOK))
            try:
                return call(part)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise _Ended from error
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                self._look()


class _Worker:
    """A child that answers one question after another."""

    def __init__(self, pid: int, descriptor: int, end: socket.socket) -> None:
        """`descriptor`: its pidfd, which is the worker's from now on, as `end` is."""
        self.pid = pid
        self._descriptor = descriptor
        self._channel = _Channel(end, self._look)
        self._stopped: float | None = None

    def ask(self, question: bytes, within: float) -> Any:
        """Raises what the question raises; TimeoutError after `within` seconds, _Ended."""
        deadline = time.monotonic() + within
        self._stopped = None
        self._channel.send(question, deadline)
        value, error = pickle.loads(self._channel.receive(deadline))  # by our own child
        if error is not None:
            raise _Raised(error)
        return value

    def leave(self, within: float = 0.0) -> None:
        """Kill it, and wait so many seconds for its end."""
        try:
            _kill(self._descriptor)
            if within:
                wait_for_end(self._descriptor, within)
        finally:
            self.forget()

    def _look(self) -> None:
        """Raise _Ended where it has been stopped by a signal for too long."""
        if not _is_stopped(self.pid):
            self._stopped = None
        elif self._stopped is None:
            self._stopped = time.monotonic()
        elif time.monotonic() - self._stopped >= _STOPPED:
            raise _Ended

    def forget(self) -> None:
        """Let go of it alone: it is another process' child."""
        self._channel.close()
        os.close(self._descriptor)


class _Raised(Exception):
    """What a question raised, apart from what goes wrong on the way."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class _Forker:
    """The child of ours that forks workers. It has one thread, whatever we have."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.pid = _fork()
            if not self.pid:
                _in_child(theirs, _fork_workers)
            self._descriptor = os.pidfd_open(self.pid)
        except OSError:  # without our end it ends itself
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = ours
        ours.settimeout(_START)
        self.in_step = True
        """Whether it has answered all that it was asked: else the next answer would be to an earlier one."""

    def worker(self) -> _Worker:
        """A new one. Raises OSError where the kernel gives none, and where the forker is no more."""
        ours, theirs = socket.socketpair()
        found: list[int] = []
        try:
            self.in_step = False
            socket.send_fds(self._socket, [_READY], [theirs.fileno()])
            data, found, _, _ = socket.recv_fds(self._socket, _NUMBER.size, 1, socket.MSG_CMSG_CLOEXEC)
            if not data:
                raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))
            (pid,) = _NUMBER.unpack(data)
            self.in_step = True
            if pid < 0 or not found:  # where no descriptor is left here, none is received
                number = max(-pid, 0) or errno.EMFILE
                raise OSError(number, os.strerror(number))
        except BaseException:  # without our end the worker ends itself
            ours.close()
            for descriptor in found:
                os.close(descriptor)
            raise
        finally:
            theirs.close()
        return _Worker(pid, found[0], ours)

    def close(self) -> None:
        """End it; it never waits for anybody but us."""
        try:
            _kill(self._descriptor)
            if wait_for_end(self._descriptor, _ENDING):
                with suppress(ChildProcessError):  # where SIGCHLD is ignored
                    os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOHANG)
        finally:
            self.forget()

    def forget(self) -> None:
        """Let go of it alone: it is another process' child."""
        self._socket.close()
        os.close(self._descriptor)


def _kill(descriptor: int) -> None:
    """Kill the process of a pidfd, if it has not ended."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process (proc_pid_stat(5), state); not where nobody can see that."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2][1:2] == b"T"
    except OSError:
        return False


class Companion:
    """A worker for questions of one kind. It is there where `start` was called, and the kernel gives one.

    One that is ended or stopped in the middle of a question is replaced, once: what ended it, such as a
    library that crashes, would end us where we asked ourselves.
    """

    def __init__(self, *, here: bool = True) -> None:
        """`here`: what has no worker is asked in this process."""
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._here = here
        _State.companions.append(self)

    def ask(self, function: Callable[..., T], *arguments: object, within: float) -> T:
        """What `function` gives, asked in the worker; here, without a deadline, where there never was one.

        Raises what the function raises; TimeoutError after `within` seconds; GpusnapError where two workers
        were ended by it, and where there is none and this process is not to be asked.
        """
        question = pickle.dumps((function, arguments))
        ended: _Ended | None = None
        with self._lock:
            for _ in range(2):
                if self._worker is None:
                    self._worker = _started_worker()
                if self._worker is None:
                    break
                try:
                    return self._worker.ask(question, within)  # type: ignore[no-any-return]
                except _Raised as error:
                    raise error.error from None
                except _Ended as error:  # killed for memory, or by somebody
                    self._leave()
                    ended = error
                except BaseException:
                    self._leave()
                    raise
        if ended is not None:
            raise _was_ended(f"asked {function.__name__}") from ended
        if not self._here:
            raise GpusnapError(f"there is no child process for {function.__name__}", code="GPS-003")
        return function(*arguments)

    def end(self, within: float = 0.0) -> None:
        """End the worker, if it does not answer just now, and wait so many seconds for that."""
        if self._lock.acquire(blocking=False):
            try:
                self._leave(within)
            finally:
                self._lock.release()

    def forget(self) -> None:
        """In a child by fork: it is the parent's."""
        self._lock = threading.Lock()
        if self._worker is not None:
            self._worker.forget()
            self._worker = None

    def _leave(self, within: float = 0.0) -> None:
        if self._worker is not None:
            self._worker.leave(within)
            self._worker = None


class _State:
    """What this process has of them."""

    lock = threading.Lock()
    forker: _Forker | None = None
    idle: ClassVar[deque[_Worker]] = deque()
    unanswered: ClassVar[set[bytes]] = set()
    companions: ClassVar[list[Companion]] = []


def _forget() -> None:
    """A child by fork asks by children of its own."""
    _State.lock = threading.Lock()
    while _State.idle:
        _State.idle.pop().forget()
    for each in _State.companions:
        each.forget()
    if _State.forker is not None:
        _State.forker.forget()
        _State.forker = None


os.register_at_fork(after_in_child=_forget)


def ask(
    pid: int, what: str, function: Callable[..., T], *arguments: object, within: float | None = None
) -> T:
    """What `function` gives, asked in a child process; it is about process `pid`.

    Raises what the function raises; Unanswered, which names the process and `what`, after `within` seconds
    (PATIENCE), and at once where the very same was not answered before; GpusnapError where there is no child
    to be had.
    """
    within = PATIENCE if within is None else within
    question = pickle.dumps((function, arguments))
    if question in _State.unanswered:
        raise _unanswered(pid, what, within)
    for first in (True, False):
        worker = _take()
        try:
            answer = worker.ask(question, within)
        except TimeoutError as error:
            worker.leave()
            _State.unanswered.add(question)
            raise _unanswered(pid, what, within) from error
        except _Raised as error:
            _State.idle.append(worker)
            raise error.error from None
        except _Ended as error:  # killed for memory, or by somebody
            worker.leave()
            if not first:
                raise _was_ended(f"inspected {what}") from error
        except BaseException:  # a signal's
            worker.leave()
            raise
        else:
            _State.idle.append(worker)
            return answer  # type: ignore[no-any-return]
    raise AssertionError("unreachable")


def stat_files(pid: int, links: Iterable[str]) -> dict[str, os.stat_result | OSError]:
    """What stat(2) says of files that process `pid` has open or mapped, by links in /proc; as `ask`."""
    asked = tuple(links)
    found = ask(pid, "its files", _stat_each, asked) if asked else []
    return dict(zip(asked, found, strict=True))


def _stat_each(links: Sequence[str]) -> list[os.stat_result | OSError]:
    found: list[os.stat_result | OSError] = []
    for link in links:
        try:
            found.append(os.stat(link))
        except OSError as error:
            found.append(error)
    return found


def start() -> None:
    """Have the forker there, for questions to come: at best before this process has threads.

    What a thread holds just when it is forked, such as a lock, workers would wait for in vain.
    """
    with _State.lock, suppress(OSError):  # else the first question says so
        if _State.forker is None:
            _State.forker = _make_forker()


def end() -> None:
    """End the children that have answered; they would end with this process, too."""
    for each in _State.companions:
        each.end()
    with _State.lock:
        _end_children()


def kill_all() -> None:
    """The same at the end of this process, whoever is asking just then: a stopped one does not see that."""
    for each in _State.companions:
        with suppress(OSError):
            each.end()
    if _State.lock.acquire(blocking=False):
        try:
            with suppress(OSError):
                _end_children()
        finally:
            _State.lock.release()


def _end_children() -> None:
    """The lock is held."""
    while _State.idle:
        _State.idle.pop().leave()
    if _State.forker is not None:
        _State.forker.close()
        _State.forker = None
    _State.unanswered.clear()


def _unanswered(pid: int, what: str, within: float) -> Unanswered:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            name = file.read().rstrip(b"\n").decode("utf-8", "surrogateescape")
    except OSError:
        name = ""
    return Unanswered(
        f"process {pid} ({name}) cannot be inspected: {what}: the kernel did not respond within {within:g} s",
        hint="it uses a file, a mount or memory of a file system that does not respond: end the "
        "process, or fix that file system",
    )


def _was_ended(doing: str) -> GpusnapError:
    return GpusnapError(
        f"a child process of gpusnap that {doing} was killed, or stopped by a signal",
        hint="check the kernel log (dmesg) for what kills processes, then try again",
        code="GPS-003",
    )


def _started_worker() -> _Worker | None:
    """A new worker where there is a forker already."""
    with _State.lock, suppress(OSError):  # TimeoutError is one
        if _State.forker is not None:
            return _forker().worker()
    return None


def _forker() -> _Forker:
    """The one that answers, a new one where there is none. The lock is held. Raises OSError."""
    if _State.forker is not None and not _State.forker.in_step:
        _State.forker.close()
        _State.forker = None
    if _State.forker is None:
        _State.forker = _make_forker()
    return _State.forker


def _make_forker() -> _Forker:
    atexit.unregister(kill_all)
    atexit.register(kill_all)
    return _Forker()


def _take() -> _Worker:
    """A worker that has nothing to do. Raises GpusnapError where the kernel gives none."""
    with suppress(IndexError):
        return _State.idle.pop()
    with _State.lock:
        for first in (True, False):
            try:
                return _forker().worker()
            except OSError as error:
                if first and _State.forker is not None and not _State.forker.in_step:
                    continue  # with another one
                why = "it did not start in time" if isinstance(error, TimeoutError) else reason(error)
                raise GpusnapError(
                    f"a child process could not be started: {why}",
                    hint="raise the limit on processes and threads for gpusnap (ulimit -u, pids.max)",
                    code="GPS-003",
                ) from error
    raise AssertionError("unreachable")


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns where there are threads. The child only forks, and those call the kernel.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = -1
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            # Our handlers are the child's until `_in_child`, and what they raise there it would handle as we
            # do: undo a checkpoint, say, that is ours. A signal waits until it has none of them.
            signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
            pid = os.fork()
        finally:
            if pid:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid


def _in_child(end: socket.socket, work: Callable[[socket.socket], None]) -> NoReturn:
    """Do `work` with nothing of the parent's but its end of a pair of sockets, and exit."""
    try:
        gc.disable()  # what it would free closes descriptors by numbers that are others' by now
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for name in os.listdir("/proc/self/fd"):
            if int(name) != end.fileno():
                with suppress(OSError):  # that of the listing itself
                    os.close(int(name))
        while os.open("/dev/null", os.O_RDWR) < 2:  # else a file of the container would be our stderr
            pass
        with suppress(PermissionError):  # a worker leads a session already: its forker's
            os.setsid()
        os.chdir("/")
        work(end)
    finally:
        os._exit(0)


def _fork_workers(end: socket.socket) -> None:
    _forget_unfinished_imports()
    while True:
        data, descriptors, _, _ = socket.recv_fds(end, 1, 1)
        if not data or not descriptors:
            return
        found: list[int] = []
        try:
            pid = os.fork()
            if not pid:
                _in_child(socket.socket(fileno=descriptors[0]), _answer_questions)
            found.append(os.pidfd_open(pid))
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        socket.send_fds(end, [_NUMBER.pack(pid)], found)
        for descriptor in (*descriptors, *found):
            os.close(descriptor)


def _forget_unfinished_imports() -> None:
    """Have a child by fork import anew what other threads of its parent were importing just then.

    They are not there to finish it, and to let go of its lock, for which an import would wait for ever
    (cpython, Lib/importlib/_bootstrap.py, _ModuleLock and _find_and_load).
    """
    for name, module in list(sys.modules.items()):
        with suppress(Exception):  # anything may be there in place of a module
            if module.__spec__._initializing:  # type: ignore[union-attr]
                del sys.modules[name]
    getattr(_bootstrap, "_module_locks", {}).clear()


def _answer_questions(end: socket.socket) -> None:
    channel = _Channel(end)
    while True:
        try:
            question = channel.receive()
            channel.send(_answer(question))
        except _Ended:
            return


def _answer(question: bytes) -> bytes:
    try:
        function, arguments = pickle.loads(question)  # by our own parent
        return pickle.dumps((function(*arguments), None))
    except BaseException as error:
        try:
            data = pickle.dumps((None, error))
            pickle.loads(data)  # not every exception can be made anew
        except Exception:
            data = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
        return data
