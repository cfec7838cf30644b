"""Files of a GPU that children inherited: told from those that they opened, and replaced where they are."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from fakes import DEADLINE, ID, FakeDriver, Scene, wait_for
from leftover_tree import CLONE_FILES, CLONE_VM, MAPPED, OPENED, Tree

from gpusnap.runtime_shim.base.errors import GpusnapError, Refused
from gpusnap.runtime_shim.gpu.api.driver import ProcessState
from gpusnap.runtime_shim.gpu.api.errors import DriverFailed
from gpusnap.runtime_shim.process import kcmp, proc
from gpusnap.runtime_shim.process.memory.maps import Mapping
from gpusnap.runtime_shim.process.ptrace.neutralise import NeutraliseResult
from gpusnap.runtime_shim.process.ptrace.tracee import Tracee
from gpusnap.runtime_shim.records.manifest_file import read
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.gpu_processes import inherited_handles
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.recovery.checkpoint import recover
from gpusnap.runtime_shim.stopping.stop import go_on, stop

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="of x86-64 alone")


def waits(pid: int) -> bool:
    """Whether a child waits for its signal: the only time that it blocks none."""
    return "\nSigBlk:\t0000000000000000\n" in Path(f"/proc/{pid}/status").read_text()


@pytest.fixture
def tree() -> Iterator[Tree]:
    with Tree() as found:
        yield found


@pytest.fixture
def driver(tree: Tree) -> FakeDriver:
    """With GPU state in the tree's first process."""
    found = FakeDriver(files=(OPENED, MAPPED))
    found.use(tree.pid)
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The journal's."""
    monkeypatch.setattr(journal, "FOLDER", str(tmp_path / "gpusnap" / "journal"))
    return Path(journal.FOLDER)


def files(pid: int) -> list[str]:
    """What a process holds of the GPU, as `FakeDriver.held`."""
    held = FakeDriver(files=(OPENED, MAPPED)).list_held(pid)
    return [path for _, path in held.descriptors] + [path for *_, path in held.mappings]


def clear(tree: Tree, driver: FakeDriver) -> tuple[inherited_handles.ClearedProcess, ...]:
    """As a checkpoint has it done: the GPU process stands, and is let go on afterwards."""
    stop([tree.pid], timeout=DEADLINE)
    try:
        return inherited_handles.clear(driver, ID, {tree.pid}, tree.processes, timeout=DEADLINE)
    finally:
        go_on([tree.pid])


ALL = [OPENED, OPENED, MAPPED]


def test_clear(tree: Tree, driver: FakeDriver, folder: Path) -> None:
    """Children and grandchildren lose what they inherited, and nothing else; the parent keeps it."""
    pids = [tree.child(), *tree.grandchild()]
    assert inherited_handles.find_strangers(driver, tree.processes()) == {}
    numbers = [number for number, _ in driver.list_held(pids[0]).descriptors]
    done = clear(tree, driver)
    assert [each.process.pid for each in done] == sorted(pids)
    for each in done:
        assert each.done.descriptors == tuple((number, OPENED) for number in numbers)
        assert [(mapping.name, mapping.size) for mapping in each.done.mappings] == [(MAPPED, 8192)]
    for pid in pids:
        assert files(pid) == []
        assert [os.readlink(f"/proc/{pid}/fd/{number}") for number in numbers] == ["/dev/null"] * 2
        assert tree.well(pid)
    assert files(tree.pid) == ALL
    assert list(folder.iterdir()) == []


def test_nothing_to_clear(tree: Tree, driver: FakeDriver, folder: Path) -> None:
    """A child that closed everything is no concern of ours, and is not even stopped."""
    pid = tree.child("libc.munmap(keep[0], 8192); [os.close(number) for number in numbers]")
    assert inherited_handles.find_strangers(driver, tree.processes()) == {}
    assert clear(tree, driver) == ()
    assert not folder.exists()
    assert tree.well(pid)


def test_nobody_holds_anything(driver: FakeDriver, tree: Tree) -> None:
    """The GPU processes are not asked for their states when there is nobody to compare with them."""
    driver.calls.clear()
    assert inherited_handles.find_strangers(driver, tree.processes()) == {}
    assert driver.of("state") == [tree.pid]


@pytest.mark.parametrize(
    ("deed", "named"),
    [
        (f"os.open('{OPENED}', os.O_RDWR)", OPENED),
        (f"os.close(numbers[1]); os.open('{OPENED}', os.O_RDWR)", OPENED),
        ("keep.append(mapped())", MAPPED),
    ],
    ids=["opened", "opened again under an inherited number", "mapped"],
)
def test_what_it_opened_by_itself(tree: Tree, driver: FakeDriver, deed: str, named: str) -> None:
    """A child with a file or a mapping of its own is told apart, with that file, and left alone."""
    heir, stranger = tree.child(), tree.child(deed)
    before = files(stranger)
    found = inherited_handles.find_strangers(driver, tree.processes())
    assert {process.pid: own for process, own in found.items()} == {stranger: (named,)}
    assert [each.process.pid for each in clear(tree, driver)] == [heir]
    assert files(stranger) == before
    assert tree.well(stranger)


@pytest.mark.parametrize("flags", [CLONE_VM, CLONE_FILES, CLONE_VM | CLONE_FILES])
def test_what_it_shares_with_the_parent(tree: Tree, driver: FakeDriver, flags: int) -> None:
    """A child with the GPU process' own memory or descriptors is no heir, and the GPU process keeps both."""
    heir, sharer = tree.child(), tree.sharing(flags)
    found = inherited_handles.find_strangers(driver, tree.processes())
    assert {process.pid: own for process, own in found.items()} == {sharer: (OPENED, MAPPED)}
    assert [each.process.pid for each in clear(tree, driver)] == [heir]
    assert files(tree.pid) == files(sharer) == ALL


def test_one_in_the_middle_of_vfork(tree: Tree, driver: FakeDriver) -> None:
    """Heirs that share their memory are left alone, both; once it is over, one that is left is an heir."""
    heir, borrower = tree.in_vfork()
    found = inherited_handles.find_strangers(driver, tree.processes())
    assert {process.pid for process in found} == {heir, borrower}
    assert clear(tree, driver) == ()
    assert files(heir) == files(borrower) == ALL
    os.kill(borrower, signal.SIGKILL)
    wait_for(lambda: waits(heir), "the child waits")
    assert inherited_handles.find_strangers(driver, tree.processes()) == {}
    assert [each.process.pid for each in clear(tree, driver)] == [heir]


def test_one_that_shares_before_it_stands(
    tree: Tree, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An heir that gets a child with its own descriptors after it was looked at is left alone with it."""
    pid, share = tree.sharing_later(CLONE_FILES)

    def late(pids: Iterable[int], *, timeout: float) -> None:
        share()
        stop(pids, timeout=timeout)

    monkeypatch.setattr(inherited_handles, "stop", late)
    assert clear(tree, driver) == ()
    assert len(tree.children) == 2
    assert files(pid) == ALL
    assert tree.well(pid)


@pytest.mark.parametrize(("number", "shared"), [(errno.EPERM, True), (errno.ESRCH, False)])
def test_what_the_kernel_does_not_tell(
    tree: Tree, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, number: int, shared: bool
) -> None:
    """Where it cannot be known, tables count as shared; those of a process that has ended do not."""
    compared = kcmp.compare

    def silent(pid: int, other: int, kind: int, *numbers: int) -> int:
        return compared(pid, other, kind, *numbers) if numbers else -number

    pid = tree.child()
    monkeypatch.setattr(inherited_handles, "compare", silent)
    assert [each.pid for each in inherited_handles.find_strangers(driver, tree.processes())] == (
        [pid] if shared else []
    )


def test_what_the_parent_has_no_longer(tree: Tree, driver: FakeDriver) -> None:
    """What cannot be compared any more is not taken for inherited."""
    pid = tree.child()
    tree.tell("os.close(numbers[0])")
    wait_for(lambda: len(files(tree.pid)) == 2, "the parent closes a descriptor")
    found = inherited_handles.find_strangers(driver, tree.processes())
    assert {process.pid: own for process, own in found.items()} == {pid: (OPENED,)}


def test_a_parent_of_gpu_processes(tree: Tree) -> None:
    """Who opened the files, and only its child uses the GPU, is no heir of that child."""
    pid = tree.child()
    driver = FakeDriver(files=(OPENED, MAPPED))
    driver.use(pid)
    found = inherited_handles.find_strangers(driver, tree.processes())
    assert {process.pid: own for process, own in found.items()} == {tree.pid: (OPENED, MAPPED)}


def test_a_child_that_is_born_meanwhile(tree: Tree, driver: FakeDriver) -> None:
    """The container is looked at until nobody new is there."""
    heirs = tree.grandchild()
    seen: list[tuple[proc.Process, ...]] = []

    def processes() -> tuple[proc.Process, ...]:
        seen.append(tree.processes()[: 2 + len(seen)])
        return seen[-1]

    stop([tree.pid], timeout=DEADLINE)
    done = inherited_handles.clear(driver, ID, {tree.pid}, processes, timeout=DEADLINE)
    assert [each.process.pid for each in done] == sorted(heirs)
    assert [len(each) for each in seen] == [2, 3, 3]


def test_one_that_is_stopped(tree: Tree, driver: FakeDriver) -> None:
    """A child that somebody stopped is refused: the driver would wait for it without end."""
    pid = tree.child()
    stop([pid], timeout=DEADLINE)
    with pytest.raises(Refused, match=f"process {pid} .* is stopped"):
        clear(tree, driver)
    assert proc.is_stopped(pid)


def test_one_that_cannot_be_traced(tree: Tree, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence; nothing is replaced, all go on, and the journal is empty."""
    pid = tree.child()

    def traced(*_: object, **__: object) -> NeutraliseResult:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(inherited_handles, "neutralise", traced)
    with pytest.raises(GpusnapError, match=f"process {pid} .* cannot be replaced") as caught:
        clear(tree, driver)
    assert "debugger" in caught.value.hint
    assert files(pid) == ALL
    assert tree.well(pid)
    assert list(Path(journal.FOLDER).iterdir()) == []


def test_one_that_ends(tree: Tree, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is killed while its files are being replaced is no failure, and not reported."""
    pid = tree.child()

    def ended(pid: int, *_: object, **__: object) -> NeutraliseResult:
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not proc.is_running(pid), "its end")
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    monkeypatch.setattr(inherited_handles, "neutralise", ended)
    assert clear(tree, driver) == ()
    assert not proc.is_running(pid)


def test_a_machine_without_kcmp(tree: Tree, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody can tell, nothing counts as inherited."""

    def unknown() -> None:
        raise GpusnapError("another architecture")

    pid = tree.child()
    monkeypatch.setattr(kcmp, "this_machine", unknown)
    assert [each.pid for each in inherited_handles.find_strangers(driver, tree.processes())] == [pid]


# What is said of it.


def cleared(pid: int, *sizes: int) -> inherited_handles.ClearedProcess:
    found = proc.process(pid)
    assert found is not None
    mapped = tuple(Mapping(0, size, "rw-s", 0, "00:06", 7, "/dev/nvidiactl") for size in sizes)
    return inherited_handles.ClearedProcess(found, NeutraliseResult(((4, "/dev/nvidia0"),), mapped))


def test_records(tree: Tree) -> None:
    """For the manifest: PID inside, name, descriptors, mappings; whoever has ended since is left out."""
    here, gone = tree.child(), tree.child()
    both = [cleared(here, 4096, 8192), cleared(gone)]
    os.kill(gone, signal.SIGKILL)
    wait_for(lambda: not proc.is_running(gone), "its end")
    (record,) = inherited_handles.records(both, tree.pid)
    assert (record.pid, record.name) == (here, proc.comm(here))
    assert (record.descriptors, record.mappings, record.mapped) == (((4, "/dev/nvidia0"),), 2, 12288)


@pytest.mark.parametrize(
    ("count", "begin"),
    [(1, "1 process has GPU files open that it "), (2, "2 processes have GPU files open that they ")],
)
def test_say(tree: Tree, capsys: pytest.CaptureFixture[str], count: int, begin: str) -> None:
    """One line, with the PIDs."""
    pids = [tree.child() for _ in range(count)]
    inherited_handles.say([cleared(pid) for pid in pids])
    said = f"{begin}inherited and never used; replaced by /dev/null: {' '.join(map(str, pids))} [GPS-213]"
    assert capsys.readouterr().err == f"gpusnap: note: {said}\n"


def test_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing was replaced."""
    inherited_handles.say([])
    assert capsys.readouterr().err == ""


# gpusnap is killed in the middle of it.


def killed(tree: Tree, driver: FakeDriver, image: Path, calls: int) -> journal.Entry:
    """What is left of a gpusnap that was killed when the children were in that many calls for it, halfway."""
    driver.states[tree.pid] = ProcessState.LOCKED
    gpusnap = os.fork()
    if not gpusnap:
        done = [0]
        to_call = Tracee.to_call

        def counted(self: Tracee) -> None:
            done[0] += 1
            if done[0] == 2 * calls:  # between the entry and the exit of a call
                os.kill(os.getpid(), signal.SIGKILL)
            to_call(self)

        Tracee.to_call = counted  # type: ignore[method-assign]
        journal.write(ID, str(image), {tree.pid: ()})
        stop([tree.pid], timeout=DEADLINE)
        inherited_handles.clear(driver, ID, {tree.pid}, tree.processes, timeout=DEADLINE)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(gpusnap, 0)[1]) == -signal.SIGKILL
    entry = journal.read(ID)
    assert entry is not None
    return entry


@pytest.mark.parametrize("calls", [1, 2, 3, 4, 5, 6])
def test_killed(tree: Tree, driver: FakeDriver, tmp_path: Path, calls: int) -> None:
    """At whichever of the system calls: the child stands, and recover lets it go on, well."""
    pid = tree.child()
    wait_for(lambda: waits(pid), "the child waits")
    entry = killed(tree, driver, tmp_path / "image", calls)
    (idle,) = [process for process in entry.processes if process.idle]
    assert (idle.pid, idle.regions) == (pid, ())
    assert idle.thread is not None
    assert idle.thread.tid == pid
    wait_for(lambda: proc.is_still(pid), "the child stands")
    recover(entry, driver, Memory())
    assert tree.well(pid)
    wait_for(lambda: waits(pid), "the child waits with its own signal mask")
    assert journal.read(ID) is None
    assert list(Path(journal.FOLDER).iterdir()) == []
    # What was not replaced is still the parent's, so the next checkpoint can take it.
    driver.states[tree.pid] = ProcessState.RUNNING
    assert inherited_handles.find_strangers(driver, tree.processes()) == {}
    clear(tree, driver)
    assert files(pid) == []
    assert tree.well(pid)


def test_killed_before_the_first_call(tree: Tree, driver: FakeDriver, tmp_path: Path) -> None:
    """A child that stands, and of which no thread was lent, goes on; one with another's PID is left alone."""
    pid, other = tree.child(), tree.child()
    driver.states[tree.pid] = ProcessState.LOCKED
    gpusnap = os.fork()
    if not gpusnap:
        journal.write(ID, str(tmp_path / "image"), {tree.pid: ()})
        os._exit(0)
    os.waitpid(gpusnap, 0)
    for each, start in ((pid, 0), (other, -1)):
        found = proc.process(each)
        assert found is not None
        (Path(journal.FOLDER) / f"{ID}.{each}.idle").write_text(f'{{"start": {found.start + start}}}')
    stop([tree.pid, pid, other], timeout=DEADLINE)
    entry = journal.read(ID)
    assert entry is not None
    recover(entry, driver, Memory())
    assert tree.well(pid)
    assert proc.is_stopped(other)
    assert journal.read(ID) is None


# In a checkpoint. Its container's processes have a descriptor that the first of them opened.

OPEN = ("sh", "-c", f'"$@" 7<{OPENED}; true', "sh")


@pytest.fixture
def scene(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Scene]:
    with Scene(tmp_path / "scene", monkeypatch, capfd, *OPEN) as found:
        found.driver.files = (OPENED,)
        found.driver.use(found.family.init)
        yield found


def seven(pids: Sequence[int]) -> set[str]:
    """What descriptor 7 of processes leads to."""
    return {os.readlink(f"/proc/{pid}/fd/7") for pid in pids}


def test_a_checkpoint(scene: Scene) -> None:
    """Said once, in the manifest and on stderr; the driver has the parent's state after it."""
    pids = [scene.family.spawn() for _ in range(2)]
    scene.driver.when("lock", lambda _: pids.append(scene.family.spawn()))  # after pre-flight
    outcome = scene.checkpoint("--leave-running")
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr.splitlines() == [
        (
            "gpusnap: note: 3 processes have GPU files open that they inherited and never used; replaced by "
            f"/dev/null: {' '.join(map(str, sorted(pids)))} [GPS-213]"
        )
    ]
    found = read(str(scene.image)).neutralised
    assert [(each.pid, each.descriptors, each.mappings) for each in found] == [
        (pid, ((7, OPENED),), 0) for pid in sorted(pids)
    ]
    assert seven(pids) == {"/dev/null"}
    assert seven([scene.family.init]) == {OPENED}
    assert scene.all_running()
    assert not [pid for pid in pids if proc.is_stopped(pid)]
    again = scene.checkpoint("--leave-running")
    assert (again.code, again.stderr) == (0, "")
    assert read(str(scene.image)).neutralised == ()


def test_a_checkpoint_that_fails_after_it(scene: Scene) -> None:
    """One sentence, as ever; the children go on without the files, and the next attempt succeeds."""
    pid = scene.family.spawn()
    scene.driver.fail("checkpoint", scene.family.init, DriverFailed("the driver failed"), times=1)
    assert "the driver failed" in scene.checkpoint().sentence()
    assert scene.all_running()
    assert seven([pid]) == {"/dev/null"}
    assert not proc.is_stopped(pid)
    assert scene.checkpoint("--leave-running").code == 0


def test_a_lock_that_fails(scene: Scene) -> None:
    """Before anything else, nothing has been replaced."""
    pid = scene.family.spawn()
    scene.driver.fail("lock", scene.family.init, DriverFailed("the driver failed"))
    scene.checkpoint().sentence()
    assert seven([pid]) == {OPENED}
