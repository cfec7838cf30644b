"""GPU state suspended and resumed: by what the driver says, never by what we believe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from fakes import FakeDriver, Family, gpu, uuid, wait_for

from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, Refused
from gpusnap.runtime_shim.gpu.api.driver import Host, ProcessState
from gpusnap.runtime_shim.gpu.api.errors import (
    DriverFailed,
    GpuBusy,
    GpuError,
    GpuOutOfMemory,
    NotInitialized,
    PermissionRefused,
)
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container
from gpusnap.runtime_shim.snapshot.gpu_processes import gpu_state
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import (
    find_idle_holders,
    find_users,
    record,
    resume,
    suspend,
)
from gpusnap.runtime_shim.snapshot.gpu_processes.job import _limit_estimate
from gpusnap.runtime_shim.snapshot.memory import pages
from gpusnap.runtime_shim.snapshot.memory.pages import Pages
from gpusnap.runtime_shim.stopping.stop import stop

RUNNING, LOCKED, CHECKPOINTED = ProcessState.RUNNING, ProcessState.LOCKED, ProcessState.CHECKPOINTED


@pytest.fixture
def family() -> Iterator[Family]:
    with Family() as found:
        yield found


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setattr(gpu_state, "_PAUSE", 0.0)
    monkeypatch.setattr(gpu_state, "_BETWEEN", 0.0)
    return FakeDriver()


def test_users(family: Family, driver: FakeDriver) -> None:
    """Those with GPU state, with it; not those that only hold a device file, nor those that are gone."""
    used = driver.use(family.spawn())
    locked = driver.use(family.spawn(), state=LOCKED)
    gone = driver.use(family.spawn())
    driver.idle[family.spawn()] = ("/dev/nvidia0",)
    members = container.processes(family.init, "none")
    family.end(gone)
    assert {process.pid: state for process, state in find_users(driver, members).items()} == {
        used: RUNNING,
        locked: LOCKED,
    }


def test_idle_holders(family: Family, driver: FakeDriver) -> None:
    """Those that hold a device file without GPU state, with the files."""
    driver.use(family.spawn())
    idle, gone = family.spawn(), family.spawn()
    driver.idle = {idle: ("/dev/nvidia0", "/dev/nvidiactl"), gone: ("/dev/nvidia0",)}
    members = container.processes(family.init, "none")
    family.end(gone)
    assert {process.pid: files for process, files in find_idle_holders(driver, members).items()} == {
        idle: ("/dev/nvidia0", "/dev/nvidiactl")
    }


def test_record(family: Family) -> None:
    """Every GPU that a process could see, with its bytes; the whole GPU's where NVML does not tell."""
    driver = FakeDriver(gpus=(gpu(0, used=500), gpu(1, used=70)))
    told = driver.use(family.spawn(), memory=100)
    untold = driver.use(family.spawn())
    del driver.used[untold]
    members = [found for pid in (told, untold) if (found := proc.process(pid))]
    first, second = record(driver, driver.host(), members, {told: 7, untold: 8})
    assert (first.process.pid, first.inner_pid, second.inner_pid) == (told, 7, 8)
    assert first.gpus == ((uuid(0), 100), (uuid(1), 0))
    assert first.used == 100
    assert second.gpus == ((uuid(0), 500), (uuid(1), 70))
    assert second.used == 570


def test_record_of_unknown_shares(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in use on the GPU and is of none of the others is theirs together; it is not zero."""
    driver = FakeDriver(gpus=(gpu(0, used=500), gpu(1, used=70)))
    pids = [driver.use(family.spawn(), memory=100) for _ in range(3)]
    told: dict[int, dict[str, int | None]] = {pid: {uuid(0): None, uuid(1): 0} for pid in pids}
    told[pids[1]] = {uuid(0): 100}
    monkeypatch.setattr(driver, "memory_used", lambda pids: told)
    members = [found for pid in pids if (found := proc.process(pid))]
    records = record(driver, driver.host(), members, dict.fromkeys(pids, 1))
    first = frozenset({uuid(0)})
    assert [(each.used, each.unknown) for each in records] == [(400, first), (100, frozenset()), (0, first)]
    # A restore needs what the driver took out, not what others used then.
    assert [_limit_estimate(each, 30).used for each in records] == [30, 100, 30]
    assert [_limit_estimate(each, None) for each in records] == records


@pytest.mark.parametrize("state", [RUNNING, LOCKED, CHECKPOINTED], ids=lambda state: state.name)
def test_resume_from_any_state(family: Family, driver: FakeDriver, state: ProcessState) -> None:
    """Whatever was done so far, afterwards it runs; and once more does no harm."""
    pid = driver.use(family.spawn(), state=state)
    for _ in range(2):
        resume(driver, [pid], Pages())
        assert driver.states[pid] is RUNNING
    assert len(driver.of("restore")) == (state is CHECKPOINTED)
    assert len(driver.of("unlock")) == (state is not RUNNING)


def test_resume_of_nothing(driver: FakeDriver) -> None:
    """No process, no call."""
    resume(driver, [], Pages())
    assert driver.calls == []


def test_resume_passes_the_pairs(family: Family, driver: FakeDriver) -> None:
    """The UUID pairs of a restore onto other GPUs reach the driver, each process' own."""
    pids = [driver.use(family.spawn(), state=CHECKPOINTED) for _ in range(3)]
    pairs = {pids[0]: ((uuid(0), uuid(1)),), pids[1]: ((uuid(0), uuid(1)), (uuid(1), uuid(0)))}
    resume(driver, pids, Pages(), pairs=pairs)
    assert driver.pairs == {**pairs, pids[2]: ()}


def crowd(driver: FakeDriver, *free: int) -> None:
    """Have that much memory free on each GPU."""
    driver.gpus = tuple(gpu(at, used=gpu(at).memory_total - bytes_free) for at, bytes_free in enumerate(free))


def test_resume_where_there_is_no_room(
    family: Family, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is not asked: it could not restore the process any more. Others run on."""
    monkeypatch.setattr(gpu_state, "_ROOM", 0.0)
    spare = int(gpu(0).memory_total * gpu_state._SPARE)
    crowd(driver, 2 * spare + (5 << 20), spare + (5 << 20))
    pids = [driver.use(family.spawn(), state=CHECKPOINTED) for _ in range(3)]
    stop(pids, timeout=60)
    needs = {pids[0]: [(uuid(0), 3 << 20)], pids[1]: [(uuid(0), 3 << 20)], pids[2]: [(uuid(1), 3 << 20)]}
    with pytest.raises(
        GpuOutOfMemory, match=r"GPU 0 has not enough free memory .*165\.0 MiB free, 166\.0 MiB needed"
    ):
        resume(driver, pids, Pages(), needs=needs)
    assert driver.of("restore") == [pids[2]]
    assert [driver.states[pid] for pid in pids] == [CHECKPOINTED, CHECKPOINTED, RUNNING]
    assert [proc.is_stopped(pid) for pid in pids] == [True, True, False]
    crowd(driver, 2 * spare + (6 << 20), 0)
    resume(driver, pids, Pages(), needs=needs)
    assert [driver.states[pid] for pid in pids] == [RUNNING] * 3


def test_resume_waits_for_room(family: Family, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process has taken for a moment."""
    monkeypatch.setattr(gpu_state, "_LOOK", 0.0)
    crowd(driver, 1 << 20)
    pid = driver.use(family.spawn(), state=CHECKPOINTED)
    looks: list[int] = []
    ask = driver.host

    def look() -> Host:
        looks.append(len(driver.of("restore")))
        if len(looks) == 3:
            crowd(driver, int(gpu(0).memory_total * gpu_state._SPARE) + (3 << 20))
        return ask()

    monkeypatch.setattr(driver, "host", look)
    resume(driver, [pid], Pages(), needs={pid: [(uuid(0), 3 << 20)]})
    assert looks == [0] * 3
    assert driver.of("restore") == [pid]


def test_resume_that_lacked_memory(family: Family, driver: FakeDriver) -> None:
    """Asked again, NVIDIA's driver would only say that it failed. Others are asked again, and run on."""
    pids = [driver.use(family.spawn(), state=CHECKPOINTED) for _ in range(3)]
    stop(pids, timeout=60)
    driver.fail("restore", pids[0], GpuOutOfMemory("no memory"))
    driver.fail("restore", pids[1], DriverFailed("for a moment"), times=1)
    with pytest.raises(GpuOutOfMemory, match="no memory"):
        resume(driver, pids, Pages())
    assert [driver.of("restore").count(pid) for pid in pids] == [1, 2, 1]
    assert [proc.is_stopped(pid) for pid in pids] == [True, False, False]


@pytest.mark.parametrize("operation", ["host", "state"])
def test_resume_where_room_cannot_be_determined(family: Family, driver: FakeDriver, operation: str) -> None:
    """Then the driver is asked."""
    crowd(driver, 1 << 20)
    pid = driver.use(family.spawn(), state=CHECKPOINTED)
    driver.fail(operation, None, GpuBusy("it does not respond"), times=1)
    resume(driver, [pid], Pages(), needs={pid: [(uuid(0), 3 << 20)]})
    assert driver.of("restore") == [pid]


def test_resume_of_one_that_was_not_suspended(family: Family, driver: FakeDriver) -> None:
    """It has its memory."""
    crowd(driver, 0)
    pid = driver.use(family.spawn(), state=LOCKED)
    resume(driver, [pid], Pages(), needs={pid: [(uuid(0), 3 << 20)]})
    assert driver.states[pid] is RUNNING


def test_resume_leaves_out_the_dead(family: Family, driver: FakeDriver) -> None:
    """A process that has ended, before or in the middle, is no reason to fail."""
    alive = driver.use(family.spawn(), state=CHECKPOINTED)
    dead = driver.use(family.spawn(), state=CHECKPOINTED)
    dying = driver.use(family.spawn(), state=CHECKPOINTED)
    family.end(dead)
    driver.when("restore", family.end, dying)
    resume(driver, [dead, dying, alive], Pages())
    assert driver.states[alive] is RUNNING
    assert dead not in driver.of("restore")


def test_the_dead_have_not_gone_on(
    family: Family, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends after it was seen to stand, and before the driver is asked, is not said to be right."""
    dying = driver.use(family.spawn(), state=CHECKPOINTED)
    ended: list[int] = []
    still = proc.is_still

    def seen(pid: int) -> bool:
        found = still(pid)
        if found and not ended:
            ended.append(pid)
            family.end(pid)
        return found

    monkeypatch.setattr(proc, "is_still", seen)
    told: list[int] = []
    resume(driver, [dying], Pages(), right=told.append)
    assert ended == [dying]
    assert told == []


def test_resume_tries_again(family: Family, driver: FakeDriver) -> None:
    """A restore that fails for a while is repeated, only for those that still need it."""
    first = driver.use(family.spawn(), state=CHECKPOINTED)
    second = driver.use(family.spawn(), state=CHECKPOINTED)
    driver.fail("restore", first, DriverFailed("busy"), times=3)
    resume(driver, [first, second], Pages())
    assert driver.of("restore").count(first) == 4
    assert driver.of("restore").count(second) == 1
    assert {driver.states[pid] for pid in (first, second)} == {RUNNING}


def test_resume_gives_up_on_one_only(family: Family, driver: FakeDriver) -> None:
    """What cannot be resumed is said after everything else has been."""
    first = driver.use(family.spawn(), state=CHECKPOINTED)
    second = driver.use(family.spawn(), state=LOCKED)
    third = driver.use(family.spawn(), state=CHECKPOINTED)
    driver.fail("restore", first, DriverFailed("lost", hint="reset it"))
    with pytest.raises(DriverFailed, match="lost"):
        resume(driver, [first, second, third], Pages())
    assert [driver.states[pid].name for pid in (first, second, third)] == [
        "CHECKPOINTED",
        "RUNNING",
        "RUNNING",
    ]


def test_an_unlock_that_fails(family: Family, driver: FakeDriver) -> None:
    """An unlock that fails is an error, and does not keep the others locked."""
    first, second = (driver.use(family.spawn(), state=LOCKED) for _ in range(2))
    driver.fail("unlock", first, DriverFailed("stuck"))
    with pytest.raises(DriverFailed, match="stuck"):
        resume(driver, [first, second], Pages())
    assert driver.states[second] is RUNNING


def test_a_state_that_cannot_be_read(family: Family, driver: FakeDriver) -> None:
    """A driver that does not answer for one process: the others are resumed, and the error is raised."""
    first = driver.use(family.spawn(), state=CHECKPOINTED)
    second = driver.use(family.spawn(), state=CHECKPOINTED)
    driver.fail("state", first, DriverFailed("no answer"))
    with pytest.raises(GpuError):
        resume(driver, [first, second], Pages())
    assert driver.states[second] is RUNNING


@pytest.mark.parametrize("state", [LOCKED, CHECKPOINTED], ids=lambda state: state.name)
def test_a_driver_that_finds_no_process(
    family: Family, driver: FakeDriver, state: ProcessState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment, it is asked again; for good, that process stays stopped: its GPU memory is away."""
    pid = driver.use(family.spawn(), state=state)
    stop([pid], timeout=60)
    forgotten = [3]
    real = driver.state

    def forgetful(asked: int) -> ProcessState | None:
        forgotten[0] -= 1
        return None if forgotten[0] >= 0 else real(asked)

    monkeypatch.setattr(driver, "state", forgetful)
    resume(driver, [pid], Pages())
    assert driver.states[pid] is RUNNING
    driver.states[pid] = state
    stop([pid], timeout=60)
    forgotten[0] = 10**6
    with pytest.raises(NotInitialized, match=f"does not know process {pid} .* had saved"):
        resume(driver, [pid], Pages())
    assert proc.is_still(pid)
    assert driver.states[pid] is state


class Elsewhere(Pages):
    """GPU memory that is kept outside, and cannot be given back."""

    name = "elsewhere"

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.given: list[list[int]] = []

    def take_out(self, pids: Sequence[int]) -> None:
        """Not asked for here."""

    def give_back(self, pids: Sequence[int]) -> dict[int, GpusnapError]:
        """Fails so many times for the first process."""
        self.given.append(list(pids))
        failed = len(self.given) <= self.failures
        return {pids[0]: ImageError("the chunk is broken")} if failed else {}


def test_pages_come_back_before_the_driver_restores(family: Family, driver: FakeDriver) -> None:
    """The memory is in the process again before the driver is asked for it; a failure is tried again."""
    pid = driver.use(family.spawn(), state=CHECKPOINTED)
    pages = Elsewhere(1)
    resume(driver, [pid], pages)
    assert pages.given == [[pid], [pid]]
    assert driver.of("restore") == [pid]


def test_pages_that_do_not_come_back(family: Family, driver: FakeDriver) -> None:
    """Without its memory a process is not restored; the others are, and those only locked run on."""
    suspended = driver.use(family.spawn(), state=CHECKPOINTED)
    other = driver.use(family.spawn(), state=CHECKPOINTED)
    locked = driver.use(family.spawn(), state=LOCKED)
    with pytest.raises(ImageError, match="the chunk is broken"):
        resume(driver, [suspended, other, locked], Elsewhere(100))
    assert driver.of("restore") == [other]
    assert driver.states[other] is RUNNING
    assert driver.states[locked] is RUNNING


def test_a_process_that_cannot_be_traced(
    family: Family, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A debugger has its driver's thread: it is let go on and unlocked, with nothing taken from it."""
    pid = driver.use(family.spawn(), state=LOCKED)

    def refused(*_: int, **__: object) -> object:
        raise PermissionRefused(f"thread {pid} cannot be traced")

    monkeypatch.setattr(pages, "run_populating", refused)
    with pytest.raises(PermissionRefused, match="cannot be traced"):
        suspend(driver, [pid], Pages(), timeout=60)
    wait_for(lambda: not proc.is_still(pid), "it goes on")
    resume(driver, [pid], Pages())
    assert driver.states[pid] is RUNNING


def test_a_process_that_does_not_stand_still(
    family: Family, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half stopped it would keep the driver waiting, so it is let go on before anything else."""
    pid = driver.use(family.spawn(), state=LOCKED)
    with monkeypatch.context() as patch:
        patch.setattr(proc, "is_still", lambda _: False)
        with pytest.raises(GpusnapError, match="did not stop"):
            suspend(driver, [pid], Pages(), timeout=0.05)
    wait_for(lambda: not proc.is_still(pid), "it goes on")
    assert driver.of("checkpoint") == []


def test_memory_that_is_not_right(family: Family, driver: FakeDriver) -> None:
    """After the driver's restore, and before it goes on: it stays where it is, and nothing is tried again."""
    pid = driver.use(family.spawn(), state=LOCKED)
    suspend(driver, [pid], Pages("/image", "c0ffee"), timeout=60)
    asked: list[bool] = []

    def right(asked_for: int) -> None:
        asked.append(asked_for == pid and driver.states[pid] is LOCKED and proc.is_still(pid))
        raise ImageError("the blob is not what it was")

    with pytest.raises(ImageError, match="not what it was"):
        resume(driver, [pid], Pages(), right=right)
    assert asked == [True]
    assert proc.is_still(pid)
    resume(driver, [pid], Pages())


def test_users_that_we_hold(family: Family, driver: FakeDriver) -> None:
    """A process that we have stopped is asked by its driver's thread; one that another stopped is refused."""
    pid = driver.use(family.spawn())
    stop([pid], timeout=60)
    members = container.processes(family.init, "none")
    assert [process.pid for process in find_users(driver, members, held=[pid])] == [pid]
    assert proc.is_still(pid)
    with pytest.raises(Refused, match="is stopped"):
        find_users(driver, members)


def test_resume_without_going_on(family: Family, driver: FakeDriver) -> None:
    """It is restored and unlocked, and stands until whoever asked lets it go."""
    pid = driver.use(family.spawn(), state=LOCKED)
    suspend(driver, [pid], Pages("/image", "c0ffee"), timeout=60)
    let_go: list[int] = []
    resume(driver, [pid], Pages("/image", "c0ffee"), let_go=let_go.append)
    assert let_go == [pid]
    assert proc.is_still(pid)
    assert driver.states[pid] is RUNNING
