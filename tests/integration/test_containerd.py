"""Checkpoint and restore through containerd: ctr, runc and crun, in front of tasks that it pauses."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import shimhost
import waiting
from containerdhost import Containerd, Work, containerd, recorded, restored_from, spare_old_groups
from registryhost import Registry, running
from support import GPUS_CONF, RUNTIME, faults, good, kill_at, run, until

from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records.cri_layout import OF_CRI
from gpusnap.runtime_shim.runtime import container as containers

JOURNAL = Path("/run/gpusnap/journal")


@pytest.fixture(scope="module")
def server(host: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    with containerd(tmp_path_factory.mktemp("containerd")) as found:
        yield found


@pytest.fixture
def registry(host: None) -> Iterator[Registry]:
    with running() as found:
        yield found


@pytest.fixture(autouse=True)
def tidy(server: Containerd, real: str) -> Iterator[None]:
    """Remove the test's containers, by the runtime that made them, and its checkpoint."""
    yield
    faults("")
    server.remove_all()
    for number in (1, 2):
        server.ctr("image", "rm", "--sync", f"localhost/checkpoint:{number}", check=False)


@pytest.fixture
def cgroups(real: str) -> Iterator[str]:
    with spare_old_groups(real) as lines:
        yield lines


@pytest.fixture(params=["criu", "chunks", "store"])
def pages(request: pytest.FixtureRequest, settings: shimhost.Writer, cgroups: str, tmp_path: Path) -> str:
    name: str = request.param
    store = f'[store]\npath = "{tmp_path}/store"\n'
    settings(f'{cgroups}[memory]\npages = "{name}"\nchunk-size = "1M"\n{store}')
    return name


# All ways under one runtime, and the other runtime.
every_way = pytest.mark.parametrize(
    ("real", "pages"),
    [("runc", "criu"), ("runc", "chunks"), ("runc", "store"), ("crun", "chunks")],
    indirect=True,
)
each_runtime = pytest.mark.parametrize(
    ("real", "pages"), [("runc", "chunks"), ("crun", "chunks")], indirect=True
)


@pytest.fixture
def work(server: Containerd, pages: str, tmp_path: Path) -> Work:
    return Work.start(server, "work", tmp_path / "out", GPUS_CONF, "--mib", "8")


def nothing_left() -> None:
    """No note of a checkpoint, and nothing staged."""
    left = [path.name for path in JOURNAL.iterdir() if not path.name.endswith((".lock", ".new"))]
    assert left == []


@every_way
def test_checkpoint_to_a_folder(server: Containerd, work: Work, tmp_path: Path) -> None:
    """ctr task checkpoint --image-path: it runs on, and the folder has what gpusnap makes."""
    image = tmp_path / "image"
    server.ctr("task", "checkpoint", "--image-path", image, "work")
    assert (image / "gpusnap/manifest.json").exists()
    assert work.status == "RUNNING"
    work.goes_on()
    nothing_left()


@every_way
def test_container_checkpoint_and_restore(server: Containerd, work: Work) -> None:
    """ctr container checkpoint and restore --live, through an image."""
    server.ctr("container", "checkpoint", "--task", "--rw", "--image", "work", "localhost/checkpoint:1")
    assert work.status == "RUNNING"
    work.goes_on()
    work.remove()
    work.clear_log()
    server.ctr("container", "restore", "--live", "--rw", "work", "localhost/checkpoint:1")
    work.back()
    nothing_left()


@pytest.mark.parametrize(("real", "pages"), [("crun", "chunks")], indirect=True)
def test_restore_beside_the_first(server: Containerd, work: Work) -> None:
    """ctr gives it the cgroup of the first, which would end with it: it is refused, and the first runs on."""
    server.ctr("container", "checkpoint", "--task", "--image", "work", "localhost/checkpoint:1")
    faults("restore result=CUDA_ERROR_UNKNOWN")
    done = server.ctr("container", "restore", "--live", "second", "localhost/checkpoint:1", check=False)
    assert done.returncode != 0
    assert "the cgroup /default/work, which is also that of container second, is used by" in done.stderr
    assert "GPS-526" in done.stderr
    work.goes_on()
    nothing_left()


@pytest.mark.skipif(
    "freezer" not in Path("/proc/self/cgroup").read_text(), reason="no version 1 of the cgroups is here"
)
@pytest.mark.parametrize("real", ["runc", "crun"], indirect=True)
def test_version_1_beside_version_2(server: Containerd, real: str, tmp_path: Path) -> None:
    """CRIU dumps version 1's freezer as frozen, since version 2's is: what is restored runs all the same."""
    work = Work.start(server, "work", tmp_path / "out", GPUS_CONF)
    server.ctr("task", "checkpoint", "--image-path", tmp_path / "image", "work")
    # Else the restore would wait for ever, and so would whoever kills it.
    assert b"FROZEN" not in (tmp_path / "image/cgroup.img").read_bytes()
    server.ctr("container", "checkpoint", "--task", "--image", "work", "localhost/checkpoint:1")
    work.remove()
    work.clear_log()
    server.ctr("container", "restore", "--live", "work", "localhost/checkpoint:1")
    work.back()


@pytest.mark.parametrize(("real", "pages"), [("runc", "chunks")], indirect=True)
def test_a_container_of_the_kubelet(
    server: Containerd, pages: str, tmp_path: Path, registry: Registry
) -> None:
    """Its images have no folder, for CRI's sake: ctr restores them, also after a registry had them."""
    ref = f"http://{registry.host}/team/w:1"
    of_cri = ["--annotation", f"{OF_CRI}=container"]
    work = Work.start(server, "work", tmp_path / "out", GPUS_CONF, options=of_cri)
    server.ctr("container", "checkpoint", "--task", "--rw", "--image", "work", "localhost/checkpoint:1")
    environment = {**os.environ, "CONTAINERD_ADDRESS": str(server.address)}
    good(run("gpusnap", "push", "containerd:localhost/checkpoint:1", ref, env=environment))
    good(run("gpusnap", "pull", ref, "--to", "containerd:localhost/checkpoint:2", env=environment))
    for image in ("localhost/checkpoint:1", "localhost/checkpoint:2"):
        work.remove()
        work.clear_log()
        server.ctr("container", "restore", "--live", "--rw", "work", image)
        work.back()


@pytest.mark.parametrize(("real", "pages"), [("runc", "chunks")], indirect=True)
def test_checkpoint_and_end(server: Containerd, work: Work, tmp_path: Path) -> None:
    """ctr task checkpoint --exit ends the task; not under crun, whose answer to `delete` then containerd
    takes for a failure. What it wrote is restored by the runtime, since ctr has no command for that.
    """
    shutil.copy(server.bundle("work") / "config.json", tmp_path)
    server.ctr("task", "checkpoint", "--exit", "--image-path", tmp_path / "image", "work")
    until(lambda: work.status in ("STOPPED", ""), "the end of the task")
    assert (tmp_path / "image/gpusnap/manifest.json").exists()
    work.ticks()
    nothing_left()
    server.ctr("task", "rm", "work", check=False)
    work.clear_log()
    with restored_from(server, tmp_path / "image", tmp_path / "config.json", tmp_path / "again", "work"):
        work.back()


@pytest.mark.parametrize(("real", "pages"), [("runc", "chunks")], indirect=True)
def test_python_starts_for_a_checkpoint_alone(server: Containerd, work: Work, tmp_path: Path) -> None:
    """All else that containerd asks of the runtime goes by the launcher."""
    with recorded(tmp_path / "starts") as starts:
        server.ctr("task", "exec", "--exec-id", "e", "work", "true")
        server.ctr("task", "pause", "work")
        server.ctr("task", "resume", "work")
        server.ctr("task", "ps", "work")
        work.remove()
        Work.start(server, "work", tmp_path / "out", GPUS_CONF)
        assert starts() == []
        server.ctr("task", "checkpoint", "--image-path", tmp_path / "image", "work")
        assert [" checkpoint " in line for line in starts()] == [True]


def paused(server: Containerd, work: Work) -> tuple[bytes, int]:
    """Pause it; what it has written by then."""
    server.ctr("task", "pause", "work")
    return work.log_file.read_bytes(), work.count


def runtime(*words: str | os.PathLike[str]) -> list[str | os.PathLike[str]]:
    """A command line as containerd's shim writes it."""
    return [RUNTIME, "--root", "/run/containerd/runc/default", *words]


def checkpoint(folder: Path, *options: str) -> list[str | os.PathLike[str]]:
    paths: list[str | Path] = ["--image-path", folder / "image", "--work-path", folder]
    return runtime("--debug", "checkpoint", *paths, "--leave-running", *options, "work")


def as_it_was(server: Containerd, work: Work, before: tuple[bytes, int]) -> None:
    """It is paused and nothing of it has run since; and it runs when it is resumed."""
    assert work.stands()
    assert (work.log_file.read_bytes(), work.count) == before
    nothing_left()
    server.ctr("task", "resume", "work")
    work.goes_on()


@pytest.mark.parametrize(
    "words", [(), ("--procs", "2"), ("--counters", "2")], ids=["one", "procs", "counters"]
)
@every_way
def test_nothing_runs_in_a_paused_container(
    server: Containerd, pages: str, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """A checkpoint of a paused container leaves it paused, and no process has run an instruction."""
    workers = {"--procs": 2, "--counters": 3}.get(words[0], 1) if words else 1
    work = Work.start(server, "work", tmp_path / "out", GPUS_CONF, *words, workers=workers)
    before = paused(server, work)
    good(run(*checkpoint(tmp_path)))
    as_it_was(server, work, before)


@each_runtime
def test_stopped_by_its_user(server: Containerd, work: Work, tmp_path: Path) -> None:
    """A process that a user had stopped, before the pause or in it, is stopped after the checkpoint."""
    counter = int(Path(f"/proc/{work.pid}/task/{work.pid}/children").read_text().split()[0])
    for when in ("before", "within"):
        if when == "before":
            os.kill(counter, signal.SIGSTOP)
            until(lambda: stopped(counter), "the stop")
        before = paused(server, work)
        if when == "within":
            os.kill(counter, signal.SIGSTOP)
        good(run(*checkpoint(tmp_path)))
        assert (work.log_file.read_bytes(), work.count) == before
        server.ctr("task", "resume", "work")
        until(lambda: stopped(counter), "the stop")
        log, count = before
        until(lambda log=log: work.log_file.read_bytes() != log, "a tick")  # type: ignore[misc]
        assert work.count == count
        os.kill(counter, signal.SIGCONT)
        work.goes_on()


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("pages", ["criu"], indirect=True)
@pytest.mark.parametrize("real", ["runc"], indirect=True)
def test_paused_within_a_call_of_cuda(server: Containerd, pages: str, tmp_path: Path) -> None:
    """The driver locks a process between calls: one that stands within a call ends that first."""
    work = Work.start(server, "work", tmp_path / "out", GPUS_CONF, "--busy", "500")
    before = paused(server, work)
    good(run(*checkpoint(tmp_path)))
    assert work.count == before[1]
    assert work.stands()
    server.ctr("task", "resume", "work")
    work.goes_on()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("checkpoint result=CUDA_ERROR_UNKNOWN", "could not checkpoint process"),
        ("lock result=CUDA_ERROR_NOT_SUPPORTED", "could not lock process"),
    ],
)
@each_runtime
def test_the_driver_fails(server: Containerd, work: Work, tmp_path: Path, fault: str, said: str) -> None:
    """ctr shows gpusnap's sentence, and the task runs on."""
    faults(fault)
    done = server.ctr("task", "checkpoint", "--image-path", tmp_path / "image", "work", check=False)
    assert done.returncode != 0
    assert f"gpusnap: the GPU driver {said}" in done.stderr
    assert work.status == "RUNNING"
    work.goes_on()
    nothing_left()


@each_runtime
def test_the_disk_is_full(server: Containerd, work: Work, tmp_path: Path) -> None:
    """A checkpoint for which there is no room leaves the task running, and the folder empty."""
    place = tmp_path / "small"
    place.mkdir()
    good(run("mount", "-t", "tmpfs", "-o", "size=4m", "none", place))
    try:
        done = server.ctr("task", "checkpoint", "--image-path", place, "work", check=False)
        assert "the checkpoint needs up to" in done.stderr
        assert work.status == "RUNNING"
        work.goes_on()
        nothing_left()
        assert list(place.iterdir()) == []
    finally:
        run("umount", place)


@each_runtime
def test_criu_fails(server: Containerd, work: Work, tmp_path: Path, pages: str) -> None:
    """After a dump that failed it is paused as it was, and runs when it is resumed."""
    for folder in ("image", "work"):
        (tmp_path / folder).mkdir()
    # CRIU makes its log there, and nothing else: what has that name is a folder.
    (tmp_path / "work/dump.log").mkdir()
    before = paused(server, work)
    paths: list[str | Path] = ["--image-path", tmp_path / "image", "--work-path", tmp_path / "work"]
    done = run(*runtime("checkpoint", *paths, "--leave-running", "work"))
    assert done.code != 0
    assert "could not dump container work" in done.err
    as_it_was(server, work, before)


STEPS = ("hold", "prepare", "lock", "driver checkpoint", "pages", "freeze", "dump", "resume", "write", "sync")


@each_runtime
def test_killed(server: Containerd, real: str, work: Work, tmp_path: Path) -> None:
    """gpusnap is killed at each step of a checkpoint of a paused task: recover leaves it paused and right.

    Under crun, which resumes what is thawed without a word, it may run afterwards.
    """
    for step in STEPS:
        before = paused(server, work)
        kill_at(step, checkpoint(tmp_path))
        good(run("/usr/local/bin/gpusnap", "recover"))
        if real == "runc":
            as_it_was(server, work, before)
        else:
            nothing_left()
            server.ctr("task", "resume", "work")
            work.goes_on()


@each_runtime
def test_killed_and_tried_again(server: Containerd, work: Work, tmp_path: Path) -> None:
    """The next checkpoint puts right what a killed one left."""
    before = paused(server, work)
    kill_at("dump", checkpoint(tmp_path))
    good(run(*checkpoint(tmp_path)))
    as_it_was(server, work, before)


@each_runtime
def test_killed_and_resumed(server: Containerd, real: str, work: Work, tmp_path: Path) -> None:
    """Whoever resumes the task before `gpusnap recover` has it run after that; crun one that is thawed."""
    paused(server, work)
    kill_at("lock" if real == "crun" else "dump", checkpoint(tmp_path))
    until(lambda: not criu_runs(), "the end of CRIU")
    server.ctr("task", "resume", "work")
    good(run("/usr/local/bin/gpusnap", "recover"))
    work.goes_on()
    for command in ("pause", "resume"):  # nobody knows whether that resume was before CRIU ended
        server.ctr("task", command, "work")
    nothing_left()


@pytest.mark.parametrize(("real", "pages"), [("runc", "chunks")], indirect=True)
def test_killed_with_criu(server: Containerd, work: Work, tmp_path: Path) -> None:
    """CRIU had thawed the task: it runs after `recover`, and runc, which refuses its resume, is not asked."""
    paused(server, work)
    group = containers.frozen_group(work.pid, "work")
    assert group is not None
    assert any(kill_with_criu(tmp_path / f"{attempt}", Path(group)) for attempt in range(10))
    until(lambda: not criu_runs(), "the end of CRIU")
    good(run("/usr/local/bin/gpusnap", "recover"))
    assert work.status == "PAUSED"
    server.ctr("task", "resume", "work")
    assert work.status == "RUNNING"
    work.goes_on()
    nothing_left()
    server.ctr("task", "checkpoint", "--image-path", tmp_path / "next", "work")
    work.goes_on()
    nothing_left()


def kill_with_criu(folder: Path, group: Path) -> bool:
    """Kill a checkpoint while CRIU holds thawed processes; False if that moment was missed."""
    folder.mkdir()
    log = folder / "dump.log"  # before CRIU's log begins, it is gpusnap that has thawed it
    with waiting.Process(checkpoint(folder), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as shim:
        until(lambda: shim.poll() is not None or holds_criu(log, group), "a CRIU that has thawed the task")
        if shim.poll() is not None:
            return False
        for names, number in (
            (("gpusnap-runtime", "runc", "criu"), signal.SIGKILL),
            (("iptables-restor", "ip6tables-resto", "nft"), signal.SIGCONT),  # stopped when it was still CRIU
        ):
            for pid in pids_of(*names):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
    return True


def holds_criu(log: Path, group: Path) -> bool:
    """Stop CRIU; whether it has thawed the group by then. If not, it works on.

    Nor may it have begun to dump a process: one in which it just runs code of its own ends with it.
    """
    if not log.exists():
        return False
    found = pids_of("criu")
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    thawed = bool(pids_of("criu")) and (group / "cgroup.freeze").read_text().strip() == "0"
    if thawed and "Collecting mappings" not in log.read_text():
        return True
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return False


def pids_of(*names: str) -> list[int]:
    return [pid for pid in proc.pids() if proc.comm(pid) in names]


def criu_runs() -> bool:
    return bool(pids_of("criu", "crun", "runc"))


@pytest.mark.parametrize("by", ["settings", "annotation"])
def test_onto_another_gpu(
    server: Containerd, real: str, settings: shimhost.Writer, cgroups: str, tmp_path: Path, by: str
) -> None:
    """A gpu-map decides, of the settings or the container's: ctr takes nothing to a restore that would."""
    settings(cgroups)
    given = ["--annotation", "io.gpusnap.gpu-map=0=1"] if by == "annotation" else []
    work = Work.start(server, "work", tmp_path / "out", GPUS_CONF, minors=[0], options=given)
    server.ctr("container", "checkpoint", "--task", "--image", "work", "localhost/checkpoint:1")
    work.remove()
    work.clear_log()
    if by == "settings":
        settings(f'gpu-map = "0=1"\n{cgroups}')
    server.ctr("container", "restore", "--live", "work", "localhost/checkpoint:1")
    work.back()
    uuids = {line.split("uuid=")[1].split()[0] for line in GPUS_CONF.splitlines() if "minor=1" in line}
    assert f"gpu={uuids.pop()}".encode() in work.log_file.read_bytes()
