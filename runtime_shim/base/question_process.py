"""Asks questions in a child process, because a process that asks may have to be left behind.

A file or memory of a container may be in a file system in user space (FUSE). A process that reads it waits
for that file system's server, and once the server has the request, not even SIGKILL ends the wait (linux,
fs/fuse/dev.c, request_wait_answer). A process with a thread in there stays a zombie that nobody can reap, and
Podman would wait for it with the container's lock held. So a worker asks. It is killed if it does not answer
in time, and ends when the server answers:

    gpusnap ── asks for workers ──> forker, which never asks anything and ends with gpusnap
        └───── one question at a time ──> worker, forked by the forker

A library that may not answer is asked in a worker of its own, a Companion. What it has loaded for one
question stays for the next, and it imports modules at the same time, on another core.

gpusnap's sends and receives have deadlines, because a child may be stopped (SIGSTOP). A worker that is
stopped for some seconds is killed, and another one is asked. The children's sends and receives have no
deadlines: a child ends when gpusnap does, because only gpusnap has the other ends of their sockets, and
gpusnap kills its children when it ends, in case one is stopped. A child is killed by its pidfd. The pidfd of
a worker comes from the forker, which never waits for a worker: when the forker has ended, another process may
have the worker's PID.

A worker has a session of its own, and no terminal, file, lock or shared memory of gpusnap: only its end of a
pair of sockets. A question is a function of a module, with arguments that can be pickled. A wait only for the
mm->mmap_lock of a process can be killed; such questions are asked in a thread: see deadlines.py.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import _bootstrap
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

from gpusnap.runtime_shim.base import deadlines
from gpusnap.runtime_shim.base.deadlines import PATIENCE, wait_for_end
from gpusnap.runtime_shim.base.errors import GpusnapError, reason

T = TypeVar("T")

_LENGTH = struct.Struct("=Q")
_NUMBER = struct.Struct("=i")
_READY = b"r"
_START = 30.0  # seconds for a child to start running, as in threads.py
_ENDING = 10.0  # seconds for a killed forker to end; it waits for nothing
_STOPPED = 5.0  # seconds for which a worker may be stopped by a signal: nobody is to do that
_LOOK = 1.0  # seconds between two looks for that
# Signals that this process may have handlers for.
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)


class Unanswered(GpusnapError):
    """A process has a file or memory of a file system that does not answer."""

    code = "GPS-225"


class _Ended(Exception):
    """The child at the other end has ended, or is stopped and will not answer."""


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
        """Close it."""
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
        """`descriptor`: its pidfd, which this object owns from now on, as `end` is."""
        self.pid = pid
        self._descriptor = descriptor
        self._channel = _Channel(end, self._look)
        self._stopped: float | None = None

    def ask(self, question: bytes, within: float) -> _Answer:
        """Raises TimeoutError after `within` seconds, _Ended."""
        deadline = time.monotonic() + within
        self._stopped = None
        self._channel.send(question, deadline)
        return _Answer(*pickle.loads(self._channel.receive(deadline)))  # from gpusnap's own child

    def leave(self, within: float = 0.0) -> None:
        """Kill it, and wait for its end for `within` seconds."""
        try:
            _kill(self._descriptor)
            if within:
                wait_for_end(self._descriptor, within)
        finally:
            self.forget()

    def _look(self) -> None:
        """Raise _Ended if it has ended, or has been stopped by a signal for too long.

        Its end of the sockets says that it has ended, unless another process has that end too.
        """
        if wait_for_end(self._descriptor, 0):
            raise _Ended
        if not _is_stopped(self.pid):
            self._stopped = None
        elif self._stopped is None:
            self._stopped = time.monotonic()
        elif time.monotonic() - self._stopped >= _STOPPED:
            raise _Ended

    def forget(self) -> None:
        """Close the descriptors only: it is another process's child."""
        self._channel.close()
        os.close(self._descriptor)


class _Answer(NamedTuple):
    """The answer to a question: its value, or the exception that it raised."""

    value: Any
    error: BaseException | None

    def get(self) -> Any:
        """Raises what the question raised."""
        if self.error is not None:
            raise self.error from None
        return self.value


class _Forker:
    """The child that forks workers. It has one thread, however many gpusnap has."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.pid = _fork()
            if not self.pid:
                _in_child(theirs, _fork_workers)
            self._descriptor = os.pidfd_open(self.pid)
        except OSError:  # without gpusnap's end it ends itself
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = ours
        ours.settimeout(_START)
        self.in_step = True
        """Whether it has answered all requests; otherwise the next answer would belong to an earlier one."""

    def worker(self) -> _Worker:
        """Return a new worker. Raises OSError if the kernel permits none, and if the forker has ended."""
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
            if pid < 0 or not found:  # if this process can open no more descriptors, none is received
                number = max(-pid, 0) or errno.EMFILE
                raise OSError(number, os.strerror(number))
        except BaseException:  # without gpusnap's end the worker ends itself
            ours.close()
            for descriptor in found:
                os.close(descriptor)
            raise
        finally:
            theirs.close()
        return _Worker(pid, found[0], ours)

    def close(self) -> None:
        """End it; it never waits for any process but gpusnap."""
        try:
            _kill(self._descriptor)
            if wait_for_end(self._descriptor, _ENDING):
                with suppress(ChildProcessError):  # if SIGCHLD is ignored
                    os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOHANG)
        finally:
            self.forget()

    def forget(self) -> None:
        """Close the descriptors only: it is another process's child."""
        self._socket.close()
        os.close(self._descriptor)


def _kill(descriptor: int) -> None:
    """Kill the process of a pidfd, if it has not ended."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process (proc_pid_stat(5), state); False if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2][1:2] == b"T"
    except OSError:
        return False


class Companion:
    """A worker for questions of one kind. It exists if the kernel permits it, and the forker was started.

    One that ends or stopped in the middle of a question is replaced, once. What ended it, such as a
    library that crashes, would end gpusnap if gpusnap asked itself.
    """

    def __init__(self, *, here: bool = True, starts: bool = False) -> None:
        """`here`: without a worker, ask in this process. `starts`: start the forker if nobody has."""
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._here, self._starts = here, starts
        _State.companions.append(self)

    def ask(
        self, function: Callable[..., T], *arguments: object, within: float, what: str | None = None
    ) -> T:
        """Return the result of `function`, asked in the worker, or in a thread of this process without one.

        `what` it is about, for messages. Raises what the function raises; TimeoutError after `within`
        seconds, also if another thread is asking; GpusnapError if it ended two workers, and if there is none
        and this process must not ask, or can start no thread for it: it never asks without a deadline.
        """
        question = pickle.dumps((function, arguments))
        deadline = time.monotonic() + within
        ended: _Ended | None = None
        with self._hold_lock(within):
            for _ in range(2):
                if self._worker is None:
                    self._worker = _get_started_worker(starts=self._starts)
                if self._worker is None:
                    break
                try:
                    left = max(deadline - time.monotonic(), 0.0)
                    answer = self._worker.ask(question, left)
                except _Ended as error:  # killed for lack of memory, or by somebody
                    self._leave()
                    ended = error
                except BaseException:
                    self._leave()
                    raise
                else:
                    return answer.get()  # type: ignore[no-any-return]
        if ended is not None:
            raise _make_ended_error(f"was to read {what}" if what else f"ran {function.__name__}") from ended
        if not self._here:
            raise GpusnapError(f"there is no child process for {function.__name__}", code="GPS-003")
        left = max(deadline - time.monotonic(), 0.0)
        return deadlines.ask(partial(function, *arguments), what or "", within=left)

    def end(self, within: float = 0.0) -> None:
        """End the worker, if it does not answer just now, and wait so many seconds for that."""
        if self._lock.acquire(blocking=False):
            try:
                self._leave(within)
            finally:
                self._lock.release()

    def forget(self) -> None:
        """In a child by fork: it belongs to the parent."""
        self._lock = threading.Lock()
        if self._worker is not None:
            self._worker.forget()
            self._worker = None

    @contextmanager
    def _hold_lock(self, within: float) -> Iterator[None]:
        """Raises TimeoutError if another thread asks for longer than `within` seconds."""
        lock = self._lock  # a child by fork gets another one
        if not lock.acquire(timeout=within):
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        try:
            yield
        finally:
            lock.release()

    def _leave(self, within: float = 0.0) -> None:
        if self._worker is not None:
            self._worker.leave(within)
            self._worker = None


class _State:
    """The children of this process."""

    lock = threading.Lock()
    forker: _Forker | None = None
    idle: ClassVar[deque[_Worker]] = deque()
    unanswered: ClassVar[set[bytes]] = set()
    companions: ClassVar[list[Companion]] = []


def _forget() -> None:
    """In a child by fork: it uses children of its own."""
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
    """Return the result of `function`, asked in a child process; it is about process `pid`.

    Raises what the function raises; Unanswered, which names the process and `what`, after `within` seconds
    (PATIENCE), and at once if the same question was not answered before; GpusnapError if no child can be
    started.
    """
    within = PATIENCE if within is None else within
    question = pickle.dumps((function, arguments))
    if question in _State.unanswered:
        raise _make_unanswered_error(pid, what, within)
    for first in (True, False):
        worker = _take_worker()
        try:
            answer = worker.ask(question, within)
        except TimeoutError as error:
            worker.leave()
            _State.unanswered.add(question)
            raise _make_unanswered_error(pid, what, within) from error
        except _Ended as error:  # killed for lack of memory, or by somebody
            worker.leave()
            if not first:
                raise _make_ended_error(f"inspected {what}") from error
        except BaseException:  # from a signal
            worker.leave()
            raise
        else:
            _State.idle.append(worker)
            return answer.get()  # type: ignore[no-any-return]
    raise AssertionError("unreachable")


def stat_files(pid: int, links: Iterable[str]) -> dict[str, os.stat_result | OSError]:
    """Return stat(2) of files that process `pid` has open or mapped, by links in /proc; as `ask`."""
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
    """Start the forker for later questions, preferably before this process has threads.

    If a thread holds a lock at the moment of the fork, workers would wait for it in vain.
    """
    with _State.lock, suppress(OSError):  # otherwise the first question reports it
        if _State.forker is None:
            _State.forker = _make_forker()


def end() -> None:
    """End the children that have answered; they would also end with this process."""
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


def _make_unanswered_error(pid: int, what: str, within: float) -> Unanswered:
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


def _make_ended_error(doing: str) -> GpusnapError:
    return GpusnapError(
        f"a child process of gpusnap that {doing} was killed, or stopped by a signal",
        hint="check the kernel log (dmesg) for what kills processes, then try again",
        code="GPS-003",
    )


def _get_started_worker(*, starts: bool) -> _Worker | None:
    """Return a new worker if there is a forker already, or with `starts`; None if the kernel permits none."""
    with _State.lock:
        for _ in range(2):  # with another forker if the first one was killed
            if starts or _State.forker is not None:
                with suppress(OSError):  # TimeoutError is one
                    return _get_forker().worker()
    return None


def _get_forker() -> _Forker:
    """Return the running forker, or start a new one. The lock is held. Raises OSError."""
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


def _take_worker() -> _Worker:
    """Return an idle worker. Raises GpusnapError if the kernel permits none."""
    with suppress(IndexError):
        return _State.idle.pop()
    with _State.lock:
        for first in (True, False):
            try:
                return _get_forker().worker()
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
        # Python 3.12 warns if there are threads. The child only forks, and its children only call the kernel.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = -1
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            # The child has gpusnap's handlers until `_in_child`, and would handle their exceptions like
            # gpusnap: undo a checkpoint, for example. A signal waits until the child has none of them.
            signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
            pid = os.fork()
        finally:
            if pid:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid


def _in_child(end: socket.socket, work: Callable[[socket.socket], None]) -> NoReturn:
    """Do `work` with nothing of the parent except its end of a pair of sockets, and exit."""
    try:
        gc.disable()  # objects that it would free close descriptors whose numbers are reused by now
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for name in os.listdir("/proc/self/fd"):
            if int(name) != end.fileno():
                with suppress(OSError):  # the descriptor of the listing itself
                    os.close(int(name))
        while os.open("/dev/null", os.O_RDWR) < 2:  # otherwise a file of the container would become stderr
            pass
        with suppress(PermissionError):  # a worker already leads a session: its forker's
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
        # Before the answer: if this process is stopped right after it, gpusnap still sees the worker end.
        for descriptor in descriptors:
            os.close(descriptor)
        socket.send_fds(end, [_NUMBER.pack(pid)], found)
        for descriptor in found:
            os.close(descriptor)


def _forget_unfinished_imports() -> None:
    """Make a child by fork import anew what other threads of its parent were importing at that moment.

    They do not exist in it to finish and to release the module's lock, for which an import would wait forever
    (cpython, Lib/importlib/_bootstrap.py, _ModuleLock and _find_and_load).
    """
    for name, module in list(sys.modules.items()):
        with suppress(Exception):  # a module may have been replaced by any object
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
        function, arguments = pickle.loads(question)  # from gpusnap itself
        return pickle.dumps((function(*arguments), None))
    except BaseException as error:
        try:
            data = pickle.dumps((None, error))
            pickle.loads(data)  # not every exception can be unpickled
        except Exception:
            data = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
        return data
