"""The NVIDIA driver's judgement of what libcuda answers, with a libcuda written in Python."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gpusnap.doctor.base import free_space
from gpusnap.runtime_shim import gpu
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.gpu.api import device_files
from gpusnap.runtime_shim.gpu.api.driver import Driver, Gpu, Host, Node, ProcessState
from gpusnap.runtime_shim.gpu.api.errors import (
    DriverFailed,
    DriverMissing,
    DriverNotReady,
    DriverTooOld,
    GpuError,
    GpuOutOfMemory,
    IllegalState,
    InvalidRequest,
    LockTimeout,
    NoDevice,
    NotInitialized,
    NotSupported,
    ProcessGone,
)
from gpusnap.runtime_shim.gpu.nvidia import cuda, nvml
from gpusnap.runtime_shim.gpu.nvidia import driver as nvidia
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia, ask_nvml

ME = os.getpid()
UUIDS = [f"GPU-{i:08x}-0000-0000-0000-000000000000" for i in range(4)]


class Fake:
    """A `cuda.Library` that answers what `results` says for a call, or success."""

    def __init__(self) -> None:
        self.results: dict[str, int] = {}
        self.process_state = 0
        self.absent: tuple[str, ...] = ()
        self.calls: list[tuple[Any, ...]] = []
        self.inits = 0
        self.before: Callable[[], object] = lambda: None
        self.environment: str | None = None

    def _answer(self, call: str, *args: Any) -> int:
        self.calls.append((call, *args))
        self.before()
        return self.results.get(call, 0)

    def list_missing(self) -> tuple[str, ...]:
        return self.absent

    def init(self) -> int:
        self.inits += 1
        self.environment = os.environ.get("CUDA_VISIBLE_DEVICES")
        return self.results.get("init", 0)

    def version(self) -> tuple[int, int]:
        return 0, 12040

    def error_name(self, result: int) -> str:
        return "CUDA_ERROR_OF_TOMORROW" if result == 4242 else ""

    def state(self, pid: int) -> tuple[int, int]:
        return self._answer("state", pid), self.process_state

    def restore_thread(self, pid: int) -> tuple[int, int]:
        return self._answer("restore_thread", pid), pid + 1

    def lock(self, pid: int, timeout_ms: int) -> int:
        return self._answer("lock", pid, timeout_ms)

    def checkpoint(self, pid: int) -> int:
        return self._answer("checkpoint", pid)

    def restore(self, pid: int, pairs: Sequence[tuple[bytes, bytes]] = ()) -> int:
        return self._answer("restore", pid, pairs)

    def unlock(self, pid: int) -> int:
        return self._answer("unlock", pid)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    library = Fake()
    monkeypatch.setattr(cuda, "Library", lambda: library)
    return library


@pytest.fixture
def child() -> Any:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and leave it a zombie, as a container's process is until its parent has looked."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_the_driver_is_given_up_before_podman() -> None:
    """Else Podman ends the restore without a word of ours."""
    assert nvidia._PATIENCE <= free_space.PODMANS_LIMIT - 60


def test_it_is_a_driver() -> None:
    checked_by_mypy: Driver = Nvidia()
    assert checked_by_mypy.vendor == "nvidia"


def test_cuinit_does_not_return(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens the driver gets an error in time, and nobody waits a second time."""
    begun, answer = threading.Event(), threading.Event()
    init = fake.init

    def hang() -> int:
        init()
        begun.set()
        answer.wait(30)
        return 0

    monkeypatch.setattr(fake, "init", hang)
    monkeypatch.setattr(nvidia, "_PATIENCE", 0.01)
    it = Nvidia()
    try:
        for call in (it.open, it.open, lambda: it.state(ME), lambda: it.restore_thread(ME)):
            with pytest.raises(DriverNotReady) as raised:
                call()
            assert raised.value.sentence() == (
                "NVIDIA's driver did not start (cuInit) within 0.01 s; check whether nvidia-smi responds, "
                "and look for Xid lines in the kernel log (dmesg) [GPS-304]"
            )
    finally:
        answer.set()
    assert begun.wait(30)  # the thread may not have had a core yet
    assert fake.inits == 1


def test_open_once_from_many_threads(fake: Fake) -> None:
    it = Nvidia()
    threads = [threading.Thread(target=it.open) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    it.state(ME)
    assert fake.inits == 1


def test_the_old_driver(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.absent = tuple(cuda._CHECKPOINT)
    monkeypatch.setattr(nvidia, "ask_nvml", lambda question: question())
    monkeypatch.setattr(nvml, "driver_version", lambda: "550.54.15")
    with pytest.raises(DriverTooOld, match=r"550\.54\.15.*cuCheckpointProcessGetState.*570"):
        Nvidia().open()
    assert fake.inits == 0

    def refuse() -> str:
        raise DriverMissing("no NVML either")

    monkeypatch.setattr(nvml, "driver_version", refuse)
    with pytest.raises(DriverTooOld, match=r"CUDA 12\.4"):
        Nvidia().open()


def test_no_device(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.results["init"] = 100
    monkeypatch.setattr(nvidia, "is_present", lambda: True)
    with pytest.raises(NoDevice, match=r"start \(cuInit\).*CUDA_ERROR_NO_DEVICE"):
        Nvidia().open()
    monkeypatch.setattr(nvidia, "is_present", lambda: False)
    with pytest.raises(DriverMissing, match="kernel driver is not loaded") as caught:
        Nvidia().open()
    assert caught.value.code_name == "CUDA_ERROR_NO_DEVICE"


def test_a_failed_open_is_tried_again(fake: Fake) -> None:
    it = Nvidia()
    fake.results["init"] = 802
    with pytest.raises(Exception, match="CUDA_ERROR_SYSTEM_NOT_READY"):
        it.open()
    fake.results.clear()
    it.open()


@pytest.mark.parametrize("value", ["", "1", None])
def test_the_callers_choice_of_gpus_does_not_count(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    Nvidia().open()
    assert fake.environment is None
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == value


@pytest.mark.parametrize("state", list(ProcessState))
def test_states(fake: Fake, state: ProcessState) -> None:
    fake.process_state = int(state)
    assert Nvidia().state(ME) is state


def test_no_state(fake: Fake, child: subprocess.Popen[bytes]) -> None:
    fake.results["state"] = 3
    assert Nvidia().state(ME) is None
    fake.results["state"] = 1
    with pytest.raises(InvalidRequest):
        Nvidia().state(ME)
    fake.before = lambda: end(child)  # it dies while the driver looks
    assert Nvidia().state(child.pid) is None
    fake.calls.clear()
    assert Nvidia().state(child.pid) is None
    assert fake.calls == []


def test_a_state_of_a_driver_to_come(fake: Fake) -> None:
    fake.process_state = 9
    with pytest.raises(DriverFailed, match="in state 9, which gpusnap does not know"):
        Nvidia().state(ME)


def test_the_steps(fake: Fake) -> None:
    it = Nvidia()
    it.lock(ME, timeout=1.5)
    it.checkpoint(ME)
    it.restore(ME)
    it.restore(ME, [(UUIDS[0], UUIDS[1])])
    it.unlock(ME)
    assert it.restore_thread(ME) == ME + 1
    pair = (cuda.uuid_bytes(UUIDS[0]), cuda.uuid_bytes(UUIDS[1]))
    assert fake.calls == [
        ("lock", ME, 1500),
        ("checkpoint", ME),
        ("restore", ME, []),
        ("restore", ME, [pair]),
        ("unlock", ME),
        ("restore_thread", ME),
    ]


@pytest.mark.parametrize(
    ("seconds", "milliseconds"),
    [(0, 1), (-1, 1), (0.0001, 1), (0.0011, 2), (10, 10000), (1e12, 2**32 - 1), (float("inf"), 2**32 - 1)],
)
def test_timeouts(fake: Fake, seconds: float, milliseconds: int) -> None:
    Nvidia().lock(ME, timeout=seconds)
    assert fake.calls == [("lock", ME, milliseconds)]


STEPS: dict[str, Callable[[Nvidia, int], object]] = {
    "lock": lambda it, pid: it.lock(pid, timeout=2.5),
    "checkpoint": lambda it, pid: it.checkpoint(pid),
    "restore": lambda it, pid: it.restore(pid, [(UUIDS[0], UUIDS[1])]),
    "unlock": lambda it, pid: it.unlock(pid),
    "restore_thread": lambda it, pid: it.restore_thread(pid),
}


@pytest.mark.parametrize(
    ("step", "result", "kind", "words"),
    [
        ("lock", 600, LockTimeout, "did not stop within 2.5 s"),
        ("lock", 401, IllegalState, "could not lock process"),
        (
            "checkpoint",
            801,
            NotSupported,
            "managed memory (cudaMallocManaged) and MPS",
        ),
        ("checkpoint", 2, GpuOutOfMemory, "not enough host memory"),
        ("restore", 2, GpuOutOfMemory, "the driver cannot restore this process any more"),
        ("restore", 304, DriverFailed, "if an earlier attempt lacked GPU memory"),
        ("restore", 1, InvalidRequest, "a pair for every GPU that the process could see"),
        ("restore", 801, NotSupported, "a GPU of another model"),
        ("unlock", 999, DriverFailed, "CUDA_ERROR_UNKNOWN, 999"),
        ("unlock", 4242, DriverFailed, "CUDA_ERROR_OF_TOMORROW, 4242"),
        ("restore_thread", 3, NotInitialized, "could not find the restore thread of process"),
    ],
)
def test_refusals(fake: Fake, step: str, result: int, kind: type[Exception], words: str) -> None:
    fake.results[step] = result
    with pytest.raises(kind) as caught:
        STEPS[step](Nvidia(), ME)
    sentence = caught.value.sentence()  # type: ignore[attr-defined]
    assert type(caught.value) is kind
    assert words in sentence
    assert f"process {ME} ({device_files.comm(ME)})" in sentence


@pytest.mark.parametrize(("step", "result"), [("restore_thread", 3), ("restore_thread", 304), ("unlock", 3)])
def test_who_waits_for_an_end(fake: Fake, monkeypatch: pytest.MonkeyPatch, step: str, result: int) -> None:
    """That a process has no restore thread is the answer for most; any other may come of its end."""
    patience: list[float] = []

    def ends(pid: int, *, within: float) -> bool:
        patience.append(within)
        return False

    monkeypatch.setattr(device_files, "has_ended", ends)
    fake.results[step] = result
    with pytest.raises(GpuError):
        STEPS[step](Nvidia(), ME)
    assert [bool(each) for each in patience] == [(step, result) != ("restore_thread", 3)]


@pytest.mark.parametrize("step", STEPS)
def test_a_process_that_ends(fake: Fake, child: subprocess.Popen[bytes], step: str) -> None:
    fake.before = lambda: end(child)
    fake.results[step] = 999
    with pytest.raises(ProcessGone, match=f"process {child.pid} exited while") as caught:
        STEPS[step](Nvidia(), child.pid)
    assert (caught.value.code_name, caught.value.pid) == ("CUDA_ERROR_UNKNOWN", child.pid)
    assert type(caught.value.__cause__) is DriverFailed
    fake.calls.clear()
    with pytest.raises(ProcessGone, match=f"process {child.pid} has exited"):
        STEPS[step](Nvidia(), child.pid)
    assert fake.calls == []


def host(*minors: int, mig: int = -1) -> Host:
    gpus = [
        Gpu(UUIDS[i], minor, i, "model", "9.0", 80 << 30, 0, False, "default")
        for i, minor in enumerate(minors)
    ]
    gpus.append(Gpu(UUIDS[-1], mig, 3, "model", "9.0", 80 << 30, 0, True, "default"))
    return Host("nvidia", "580.159.04", "13.0", tuple(gpus))


def test_visible_goes_by_minor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "is_open", lambda: True)
    monkeypatch.setattr(nvml, "inventory", lambda: host(4, 2, 0, mig=6))
    held: tuple[int, ...] = (2,)
    in_dev: tuple[int, ...] = (0, 9, 6)
    monkeypatch.setattr(device_files, "gpu_minors", lambda pid: held)
    monkeypatch.setattr(device_files, "dev_minors", lambda pid: in_dev)
    # A node in its /dev that is no GPU of this host, or is split by MIG, means nothing; one that it holds
    # does.
    assert Nvidia().list_visible(ME) == (UUIDS[2], UUIDS[1])
    held, in_dev = (7,), ()
    with pytest.raises(NoDevice, match="minor 7"):
        Nvidia().list_visible(ME)
    held = ()
    assert Nvidia().list_visible(ME) == ()


def test_an_nvml_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has fallen off the bus keeps nobody waiting."""

    def ask(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(nvml, "is_open", lambda: False)
    monkeypatch.setattr(nvidia._COMPANION, "ask", ask)
    with pytest.raises(DriverNotReady, match="NVML did not respond within 180 s"):
        Nvidia().host()


def test_a_command_does_not_wait_for_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks in a process of its own, although nobody has started one before."""
    question_process.end()
    monkeypatch.setattr(nvidia, "_PATIENCE", 0.5)
    monkeypatch.setattr(nvml, "is_open", lambda: False)
    monkeypatch.setattr(nvml, "memory_used", hang)
    with pytest.raises(DriverNotReady, match=r"NVML did not respond within 0\.5 s"):
        Nvidia().memory_used([1])
    question_process.end()
    assert ask_nvml(tell_pid) != os.getpid()
    question_process.end()


def hang(_: object) -> None:
    threading.Event().wait()


def tell_pid() -> int:
    return os.getpid()


def test_handles_are_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (Node("/dev/nvidia0", -1, -1), Node("/dev/nvidia0", 195, 0))
    monkeypatch.setattr(device_files, "nodes", lambda pid: found)
    assert Nvidia().list_handles(ME) == ("/dev/nvidia0",)


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["nvidiactl"], True), (["nvidia11"], True), (["nvidia-uvm"], False), (["null", "nvidiaX"], False)],
)
def test_is_there_a_driver(monkeypatch: pytest.MonkeyPatch, names: list[str], expected: bool) -> None:
    monkeypatch.setattr(nvidia, "exists", lambda path: False)
    monkeypatch.setattr(os, "listdir", lambda path: names)
    assert nvidia.is_present() is expected
    assert (gpu.find_driver() is not None) is expected


def test_the_kernel_driver_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "exists", lambda path: path == "/proc/driver/nvidia/version")
    assert nvidia.is_present()


def test_looking_for_holders_loads_no_library() -> None:
    script = (
        "import sys, os; from gpusnap.runtime_shim.gpu import holders; "
        "from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia\n"
        "assert holders(Nvidia(), [os.getpid()]) == ()\n"
        "assert not {'ctypes', 'pynvml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
