"""A child asks what may never be answered; a condition that nobody sets stands in for the kernel."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import wait_for

from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused
from gpusnap.runtime_shim.base.question_process import Companion, Unanswered, ask
from gpusnap.runtime_shim.gpu.amd import device_files as amd_files
from gpusnap.runtime_shim.gpu.api import device_files, device_nodes
from gpusnap.runtime_shim.process import environ, proc
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.runtime.criu import external_mounts
from gpusnap.runtime_shim.snapshot.devices import bind_mounted_nodes, remap
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_watch
from gpusnap.runtime_shim.snapshot.preflight import nccl
from gpusnap.runtime_shim.snapshot.records import volumes

ME = os.getpid()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """What the kernel does that never answers, and little patience for it."""
    monkeypatch.setattr(question_process, "PATIENCE", 0.3)
    over = threading.Event()  # that of the child is another one
    return lambda *_, **__: over.wait()


def refuse() -> None:
    raise Refused("why", hint="what to do", code="GPS-201")


def test_answers() -> None:
    """What a question gives or raises, from one and the same child as long as it answers."""
    first = ask(ME, "x", os.getpid)
    assert ask(ME, "x", os.getpid) == first != os.getpid()
    with pytest.raises(FileNotFoundError) as found:
        ask(ME, "x", os.stat, "/none")
    assert (found.value.errno, found.value.filename) == (errno.ENOENT, "/none")
    with pytest.raises(Refused, match="why") as refused:
        ask(ME, "x", refuse)
    assert (refused.value.hint, refused.value.code) == ("what to do", "GPS-201")
    assert len(ask(ME, "x", bytes, 5 << 20)) == 5 << 20
    assert ask(ME, "x", os.getpid) == first


def test_nothing_of_ours(tmp_path: Path) -> None:
    """A child that is left behind keeps no file, lock, terminal or working directory of ours."""
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        child = ask(ME, "x", os.getpid)
        links = [os.readlink(f"/proc/{child}/fd/{name}") for name in os.listdir(f"/proc/{child}/fd")]
        assert sorted(link.partition(":")[0] for link in links) == ["/dev/null"] * 3 + ["socket"]
        assert os.readlink(f"/proc/{child}/cwd") == "/"
        assert os.getsid(child) not in (os.getsid(0), 0)
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_no_answer(silent: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is named; the next question is another child's, and the same one is not asked again."""
    monkeypatch.setattr(environ, "_read_strings", silent)
    monkeypatch.setattr(environ, "_find_pointer", lambda pid: 1)
    first = ask(ME, "x", os.getpid)
    with pytest.raises(
        Unanswered, match=rf"process {ME} \(.*\) .*variables: .*not respond within 0.3 s"
    ) as found:
        environ.live_environment(ME)
    assert found.value.code == "GPS-225"
    assert ask(ME, "x", os.getpid) != first
    monkeypatch.setattr(question_process, "PATIENCE", 60)
    before = time.monotonic()
    with pytest.raises(Unanswered):
        environ.live_environment(ME)
    assert time.monotonic() - before < 30


def test_a_child_that_is_left_is_killed() -> None:
    """At the deadline, and where it waits for something else than such a file system it ends."""
    child = ask(ME, "x", os.getpid)
    before = time.monotonic()
    with pytest.raises(Unanswered):
        ask(ME, "x", time.sleep, 600, within=0.5)
    assert time.monotonic() - before < 4
    wait_for(lambda: not proc.is_running(child), "its end")


def test_a_child_that_not_even_sigkill_ends(tmp_path: Path) -> None:
    """Neither the answer nor the end of this process waits for it."""
    program = f"""
import os, signal, time
from gpusnap.runtime_shim.base import question_process
signal.pidfd_send_signal = lambda *_: None
try:
    question_process.ask(os.getpid(), "x", os.open, {str(tmp_path / "fifo")!r}, os.O_RDONLY, within=0.3)
except question_process.Unanswered:
    print("unanswered")
"""
    os.mkfifo(tmp_path / "fifo")
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    # Its ends of our pipes are closed, or run() would have waited.
    assert (ended.stdout, ended.returncode) == ("unanswered\n", 0), ended.stderr
    os.close(os.open(tmp_path / "fifo", os.O_WRONLY))  # it is still there, and ends with this


def test_a_child_that_is_killed() -> None:
    """Another one is asked, once."""
    child = ask(ME, "x", os.getpid)
    os.kill(child, signal.SIGKILL)
    assert ask(ME, "x", os.getpid) != child
    forker = question_process._State.forker
    assert forker is not None
    os.kill(forker.pid, signal.SIGKILL)
    os.kill(ask(ME, "x", os.getpid), signal.SIGKILL)
    assert ask(ME, "x", os.getpid)


def test_a_pid_that_was_used_again() -> None:
    """Where the forker has ended, so may a worker's PID be another process': that is not killed."""
    child = ask(ME, "x", os.getpid)
    worker = question_process._State.idle[-1]
    assert worker.pid == child
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        worker.pid = other.pid
        with pytest.raises(Unanswered):
            ask(ME, "x", time.sleep, 600, within=0.2)
        wait_for(lambda: not proc.is_running(child), "its end")
        assert other.communicate(b"there", timeout=60)[0] == b"there"
    assert ask(ME, "x", os.getpid) != child


def test_a_forker_s_pid_that_was_used_again() -> None:
    """It has ended, and nobody has kept its PID where SIGCHLD is ignored."""
    question_process.end()
    ask(ME, "x", os.getpid)
    forker = question_process._State.forker
    assert forker is not None
    ours = forker.pid
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        forker.pid = other.pid
        question_process.end()
        assert not proc.is_running(ours)
        assert other.communicate(b"there", timeout=60)[0] == b"there"


def test_a_child_that_is_stopped() -> None:
    """It takes no question, however long that is: the deadline holds for the sending, too."""
    child = ask(ME, "x", os.getpid)
    os.kill(child, signal.SIGSTOP)
    wait_for(lambda: proc.is_still(child), "the stop")
    late = threading.Timer(20, os.kill, (child, signal.SIGKILL))  # a failure is not to hang
    late.start()
    before = time.monotonic()
    try:
        with pytest.raises(Unanswered):
            ask(ME, "x", len, bytes(8 << 20), within=0.5)
    finally:
        late.cancel()
    assert time.monotonic() - before < 10
    wait_for(lambda: not proc.is_running(child), "its end")
    assert ask(ME, "x", os.getpid) != child


def test_a_forker_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one takes its place."""
    question_process.end()
    monkeypatch.setattr(question_process, "_START", 0.5)
    child = ask(ME, "x", os.getpid)
    forker = question_process._State.forker
    assert forker is not None
    os.kill(forker.pid, signal.SIGSTOP)
    wait_for(lambda: proc.is_still(forker.pid), "the stop")
    os.kill(child, signal.SIGKILL)
    assert ask(ME, "x", os.getpid) != child
    assert not proc.is_running(forker.pid)


@pytest.mark.parametrize("starts", [False, True])
def test_a_companion_without_a_forker(starts: bool) -> None:
    """It asks here, or starts one; one that was killed is replaced."""
    question_process.end()
    companion = Companion(starts=starts)
    assert (companion.ask(os.getpid, within=9) == ME) != starts
    if starts:
        forker = question_process._State.forker
        assert forker is not None
        os.kill(forker.pid, signal.SIGKILL)
        companion.end()
        assert companion.ask(os.getpid, within=9) != ME
    question_process.end()


def test_another_process_has_the_end_of_a_killed_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the worker itself says that it does not answer: here the forker keeps its end."""
    question_process.end()
    close = os.close
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "close", lambda number: None if stat.S_ISSOCK(os.fstat(number).st_mode) else close(number)
        )
        question_process.start()  # only the forker has it for good
    child = ask(ME, "x", os.getpid)
    os.kill(child, signal.SIGKILL)
    assert ask(ME, "x", os.getpid) != child
    question_process.end()


def test_a_signal_at_the_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the child. Our handler would have it undo what we do."""
    question_process.end()
    ran = tmp_path / "ran"
    fork = os.fork

    def fork_and_interrupt() -> int:
        pid = fork()
        if not pid:
            os.kill(os.getpid(), signal.SIGINT)
        return pid

    def handle(*_: object) -> None:
        ran.write_text("by the child")
        os._exit(1)

    monkeypatch.setattr(os, "fork", fork_and_interrupt)
    before, mask = signal.signal(signal.SIGINT, handle), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        question_process.start()
        forker = question_process._State.forker
        assert forker is not None
        wait_for(lambda: not proc.is_running(forker.pid), "its end")
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    finally:
        signal.signal(signal.SIGINT, before)
    assert not ran.exists()
    monkeypatch.undo()
    assert ask(ME, "x", os.getpid) != ME


def test_a_fork_during_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import what another thread was importing: none waits for its lock."""
    question_process.end()
    turn = SimpleNamespace(begun=threading.Event(), over=threading.Event())
    monkeypatch.setitem(sys.modules, "turn_of_imports", turn)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "long_import.py").write_text(
        "import os, turn_of_imports as turn\n"
        f"if os.getpid() == {ME}:\n"
        "    turn.begun.set()\n"
        "    turn.over.wait(60)\n"
        "value = 7\n"
    )
    thread = threading.Thread(target=__import__, args=("long_import",))
    thread.start()
    try:
        assert turn.begun.wait(60)
        assert ask(ME, "x", read_value, "long_import", within=5) == 7
    finally:
        turn.over.set()
        thread.join()
        question_process.end()
        del sys.modules["long_import"]


def read_value(module: str) -> int:
    return int(__import__(module).value)


def test_no_descriptor_is_left() -> None:
    """Of workers and forkers that were ended."""
    question_process.end()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        ask(ME, "x", os.getpid)
        with pytest.raises(Unanswered):
            ask(ME, "x", time.sleep, 600, within=0.1)
        question_process.end()
    assert len(os.listdir("/proc/self/fd")) == before


def test_after_a_fork() -> None:
    """A child by fork asks by children of its own."""
    ask(ME, "x", os.getpid)
    pid = os.fork()
    if pid == 0:
        os._exit(7 if ask(ME, "x", os.getppid) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert ask(ME, "x", os.getpid)


@pytest.fixture
def companion() -> Iterator[Companion]:
    question_process.start()
    made = Companion()
    yield made
    made.end()
    question_process._State.companions.remove(made)


def test_a_companion(companion: Companion) -> None:
    """It keeps what one question has loaded for the next; what is asked of others goes to others."""
    pid = companion.ask(os.getpid, within=9)
    assert pid not in (ME, ask(ME, "x", os.getpid))
    assert companion.ask(load, "wave", within=9)
    assert companion.ask(load, "wave", within=9) is False
    with pytest.raises(Refused, match="why"):
        companion.ask(refuse, within=9)
    assert companion.ask(os.getpid, within=9) == pid
    companion.end()
    wait_for(lambda: not proc.is_running(pid), "its end")


def load(name: str) -> bool:
    new = name not in sys.modules
    __import__(name)
    return new


def test_a_companion_that_does_not_answer(companion: Companion) -> None:
    """It is killed at the deadline, and the next question is another one's."""
    pid = companion.ask(os.getpid, within=9)
    with pytest.raises(TimeoutError):
        companion.ask(time.sleep, 600, within=0.2)
    wait_for(lambda: not proc.is_running(pid), "its end")
    assert companion.ask(os.getpid, within=9) not in (ME, pid)


def test_a_companion_that_is_killed(companion: Companion, tmp_path: Path) -> None:
    """Another one is asked, once; never are we, who would be killed next by what has killed them."""
    pid = companion.ask(os.getpid, within=9)
    os.kill(pid, signal.SIGKILL)
    assert companion.ask(os.getpid, within=9) not in (ME, pid)
    asked = tmp_path / "asked"
    with pytest.raises(GpusnapError, match="a child process of gpusnap that ran crash was killed"):
        companion.ask(crash, str(asked), within=9)
    assert asked.read_text() == "xx"


def stop_this() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_children_that_are_stopped(companion: Companion, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are replaced long before the deadline, once; then it is said."""
    monkeypatch.setattr(question_process, "_STOPPED", 0.2)
    monkeypatch.setattr(question_process, "_LOOK", 0.05)
    pid = companion.ask(os.getpid, within=9)
    child = ask(ME, "x", os.getpid)
    for each in (pid, child):
        os.kill(each, signal.SIGSTOP)
        wait_for(lambda each=each: proc.is_still(each), "the stop")  # type: ignore[misc]
    assert companion.ask(os.getpid, within=60) not in (ME, pid)
    assert ask(ME, "x", os.getpid, within=60) not in (ME, child)
    wait_for(lambda: not proc.is_running(pid) and not proc.is_running(child), "their end")
    before = time.monotonic()
    for question in (companion.ask, partial(ask, ME, "it")):
        with pytest.raises(GpusnapError, match=r"child process of gpusnap that .* was killed, or stopped"):
            question(stop_this, within=60)
    assert time.monotonic() - before < 30


def test_a_child_that_goes_on(companion: Companion, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was stopped for a moment only is waited for, and so is one that takes long."""
    monkeypatch.setattr(question_process, "_STOPPED", 30.0)
    monkeypatch.setattr(question_process, "_LOOK", 0.02)
    pid = companion.ask(os.getpid, within=9)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: proc.is_still(pid), "the stop")
    looks: list[bool] = []
    is_stopped = question_process._is_stopped

    def look(of: int) -> bool:
        looks.append(is_stopped(of))
        if len(looks) == 3:
            os.kill(of, signal.SIGCONT)
        return looks[-1]

    monkeypatch.setattr(question_process, "_is_stopped", look)
    assert companion.ask(os.getpid, within=60) == pid
    assert looks[:3] == [True] * 3


@pytest.mark.parametrize("how", ["", "runtime"])
def test_stopped_children_end_with_us(how: str) -> None:
    """One that is stopped does not see our end."""
    program = f"""
import os, signal, sys, time
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.shim import dispatch

worker = question_process.ask(os.getpid(), "x", os.getpid)
companion = question_process.Companion()
pids = worker, companion.ask(os.getpid, within=9), question_process._State.forker.pid
for pid in pids:
    os.kill(pid, signal.SIGSTOP)
    while not question_process._is_stopped(pid):
        time.sleep(0.01)
print(*pids, flush=True)
if {how!r}:
    def fail(argv):
        raise GpusnapError("no command line")
    dispatch.parse = fail
    try:
        dispatch.main([])
    except GpusnapError:
        os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 3, done.stderr
    try:
        wait_for(lambda: not any(proc.is_running(pid) for pid in pids), "their end")
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def crash(asked: str) -> None:
    with open(asked, "a") as file:
        file.write("x")
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError()])
def test_an_answer_that_nobody_has_waited_for(
    companion: Companion, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Is taken for no later one: each worker is left by its own PID."""
    found = question_process._State.forker
    assert found is not None
    forker = found

    class Interrupting:
        """Breaks in between the request and its answer, once."""

        def __init__(self, whole: socket.socket) -> None:
            self.whole = whole

        def recvmsg(self, *_: int) -> bytes:
            forker._socket = self.whole
            raise error

        def __getattr__(self, name: str) -> object:
            return getattr(self.whole, name)

    monkeypatch.setattr(forker, "_socket", Interrupting(forker._socket))
    with suppress(KeyboardInterrupt):
        companion.ask(os.getpid, within=9)
    worker = question_process._take_worker()
    assert worker.ask(pickle.dumps((os.getpid, ())), 9).get() == worker.pid
    worker.leave()


def test_without_a_companion(companion: Companion) -> None:
    """We answer ourselves: where nobody has called `start`, and in a child by fork."""
    other = companion.ask(os.getpid, within=9)
    assert other != ME
    pid = os.fork()
    if pid == 0:
        os._exit(7 if companion.ask(os.getpid, within=9) == os.getpid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert companion.ask(os.getpid, within=9) == other
    question_process.end()
    assert companion.ask(os.getpid, within=9) == ME


def test_memory() -> None:
    """Up to where it ends."""
    data = bytes(range(256)) * 64
    kept = bytearray(data)
    with copies._memory(kept, 0) as (address, _):
        assert copies.peek(ME, address, len(data)) == data
    assert copies.peek(ME, 0, 8) == copies.peek(ME, -8, 8) == copies.peek(ME, 1 << 63, 8) == b""


PLACES: dict[str, tuple[object, str, Callable[[], object]]] = {
    "nodes": (os, "stat", lambda: device_files.gpu_minors(ME)),
    "dev": (device_files, "_as_node", lambda: device_files.dev_minors(ME)),
    "amd": (os, "stat", lambda: amd_files.list_held_numbers(ME)),
    "amd-dev": (os.path, "islink", lambda: amd_files.numbers_in_dev(ME)),
    "gpu-nodes": (device_nodes, "_devices", lambda: device_nodes.in_container(ME, ())),
    "mounts": (bind_mounted_nodes, "_open", lambda: bind_mounted_nodes.device_nodes(ME)),
    "host-dev": (os, "stat", lambda: remap._has_hosts_dev(ME)),
    "driver-mounts": (os.path, "samefile", lambda: external_mounts.list_undeclared(ME, {})),
    "libnccl": (nccl, "_mentions", lambda: nccl._is_old_rank(ME)),
    "volumes": (os, "stat", lambda: volumes.list_open([this()], [volumes.Volume("/", "/")])),
    "lock": (copies, "_memory", lambda: driver_watch._owner(ME, 4096)),
}


def this() -> proc.Process:
    found = proc.process(ME)
    assert found is not None
    return found


@pytest.mark.parametrize("place", PLACES)
def test_places(silent: Callable[..., object], monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Whatever looks at what a container has open, mapped or mounted."""
    module, name, look = PLACES[place]
    mount = proc.Mount("0:1", "/", "/", (), (), "fuse")
    driver = proc.Mount("0:1", "/", "/dev/nvidia0", (), (), "fuse")
    monkeypatch.setattr(proc, "mounts", lambda pid: (mount, driver))
    monkeypatch.setattr(proc, "host_path", lambda mount: "/dev/nvidia0")
    monkeypatch.setattr(nccl, "_size", lambda pid: 2)
    fields = next(each for each in proc.named_mappings(ME) if each[5].startswith("/"))
    monkeypatch.setattr(proc, "named_mappings", lambda pid: [(*fields[:5], "/libnccl.so.2")])
    monkeypatch.setattr(device_files, "nvidia_majors", lambda: (frozenset(), frozenset()))
    real: Callable[..., object] = getattr(module, name)

    def only_in_child(*arguments: object, **more: object) -> object:
        return (silent if os.getpid() != ME else real)(*arguments, **more)

    monkeypatch.setattr(module, name, only_in_child)
    with pytest.raises(Unanswered, match=rf"process {ME} \(.*\) cannot be inspected: .* within 0.3 s"):
        look()
