"""Containers of several processes: with CUDA, without, and late ones."""

from __future__ import annotations

import fnmatch
import os
import signal
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import waiting
from holding import held
from support import (
    DEADLINE,
    RUNTIME,
    Container,
    faults,
    good,
    hangs_in_checkpoint,
    manifest,
    members,
    members_of,
    podman,
    run,
    sentence,
    until,
)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.tar.zst"


# busybox' sleep itself ends when it is interrupted, as by a restore.
LOOP = ("sh", "-c", "while :; do sleep 1; done")


def test_several_gpu_processes_and_children_without_cuda(real: str, archive: Path) -> None:
    """Three GPU workers below a launcher, each with children of its own, twice in a row."""
    container = Container.start("w", "--mib", "4", "--procs", "3", "--children", "2", workers=3)
    for _ in range(2):
        good(container.checkpoint(archive))
        record = manifest(archive)
        assert len(record["processes"]) == 3
        container.remove()
        container = Container.restore("w", archive)
        container.goes_on()
    assert len(container.ticks()) == 3


def test_all_at_once(crun: None, archive: Path) -> None:
    """Four processes whose driver takes 4 s each are suspended at once, not one after another."""
    container = Container.start("w", "--mib", "4", "--procs", "4", workers=4)
    faults("checkpoint hang=4000")
    good(container.checkpoint(archive))
    (step,) = [step for step in manifest(archive)["timing"] if step["step"] == "driver checkpoint"]
    assert 4 <= step["seconds"] < 4 * 4
    faults("")
    container.remove()
    Container.restore("w", archive).goes_on()


@pytest.fixture
def late(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A file that lets a second process start CUDA, and what `Container.start` takes for that."""
    place = tmp_path / "late"
    place.mkdir()
    worker = "/gpuwork --mib 4 --tick 30"
    waits = "while [ ! -e /late/go ]; do sleep 0.05; done"
    script = f"({waits}; exec {worker} --seed 2) & exec {worker}"
    return place / "go", {"script": script, "options": ["-v", f"{place}:/late"]}


def test_process_that_starts_cuda_after_the_lock(
    real: str, archive: Path, late: tuple[Path, dict[str, Any]]
) -> None:
    """It is found before the dump and suspended too: the image holds both."""
    go, words = late
    container = Container.start("w", **words)
    init = container.pid
    # The first process' checkpoint takes until the late one is up.
    faults("checkpoint hang=600000")
    with ThreadPoolExecutor(1) as pool:
        checkpoint = pool.submit(container.checkpoint, archive)
        try:
            until(lambda: hangs_in_checkpoint(init), "the driver's checkpoint begins")
            go.touch()
            until(lambda: len(container.ticks()) == 2, "the ticks of the late process")
        finally:
            faults("")  # which ends what hangs
        good(checkpoint.result())
    record = manifest(archive)
    assert len(record["processes"]) == 2
    assert [step["step"] for step in record["timing"]].count("lock") == 2
    container.remove()
    again = Container.restore("w", archive)
    until(lambda: len(again.ticks()) == 2, "both workers tick")
    again.goes_on()


def test_process_that_starts_cuda_during_the_dump(
    crun: None, archive: Path, tmp_path: Path, late: tuple[Path, dict[str, Any]]
) -> None:
    """CRIU refuses its device file, and the dump is made again with it; the image holds both."""
    go, words = late
    container = Container.start("w", **words)
    init = container.pid
    # Before the container is paused for the first dump, a second process starts CUDA.
    with held(tmp_path, "crun", "pause", "") as runtime, ThreadPoolExecutor(1) as pool:
        checkpoint = pool.submit(container.checkpoint, archive)
        try:
            until(runtime.met, "the pause")
            go.touch()
            # The driver has closed those of the first.
            until(lambda: any(map(_holds_a_gpu, members_of(init))), "the late process starts CUDA")
        finally:
            runtime.let_go()
        good(checkpoint.result())
    record = manifest(archive)
    assert len(record["processes"]) == 2
    assert [step["step"] for step in record["timing"]].count("dump") == 2
    container.remove()
    again = Container.restore("w", archive)
    until(lambda: len(again.ticks()) == 2, "both workers tick")
    again.goes_on()


def _holds_a_gpu(pid: int) -> bool:
    try:
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(link.startswith("/dev/nvidia") for link in links)


def test_container_without_a_gpu(real: str, archive: Path) -> None:
    """Exactly as with the bare runtime: same exit codes, same output, no trace of gpusnap in the archive."""
    for runtime in ("gpusnap-runtime", real):
        good(podman("run", "-d", "--name", "c", "localhost/base", *LOOP, runtime=runtime))
        done = podman(
            "container", "checkpoint", "--compress", "none", "--export", archive, "c", runtime=runtime
        )
        assert (done.code, done.out, done.err) == (0, "c\n", "")
        assert "gpusnap" not in good(run("tar", "tf", archive))
        good(podman("rm", "c", runtime=runtime))
        done = podman("container", "restore", "--import", archive, runtime=runtime)
        assert (done.code, done.err) == (0, "")
        assert good(podman("inspect", "--format", "{{.State.Status}}", "c")) == "running"
        good(podman("rm", "--force", "--time", "0", "c", runtime=runtime))


def test_gpu_given_but_not_used(real: str, archive: Path) -> None:
    """A container with a GPU that no process uses now: the driver's mounts must not break its checkpoint."""
    good(podman("run", "-d", "--name", "c", "--device", "nvidia.com/gpu=0", "localhost/base", *LOOP))
    good(podman("container", "checkpoint", "--export", archive, "c"))
    assert manifest(archive)["processes"] == []
    good(podman("rm", "c"))
    good(podman("container", "restore", "--import", archive))
    assert good(podman("exec", "c", "cat", "/proc/1/comm")) == "sh"


def test_gpu_process_killed_while_it_is_suspended(real: str, archive: Path) -> None:
    """One of two GPU processes dies in the driver's hands: refused, and the other runs on."""
    worker = "/gpuwork --mib 4 --tick 30"
    script = f"{worker} & {worker} --seed 2 & while :; do sleep 1; done"
    container = Container.start("w", script=script, workers=2)
    faults("checkpoint die count=1")
    text = sentence(container.checkpoint(archive))
    assert "exited" in text
    faults("")
    assert container.inspect()["State"]["Status"] == "running"
    alive = {pid for pid in container.ticks() if _inner_alive(container, pid)}
    assert len(alive) == 1
    container.goes_on(without=[pid for pid in container.ticks() if pid not in alive])


def _inner_alive(container: Container, inner: int) -> bool:
    for pid in members(container):
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if int(fields["NSpid"].split()[-1]) == inner:
            return "Z" not in fields["State"]
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stopped_by_a_signal(crun: None, archive: Path, number: signal.Signals) -> None:
    """The shim, told to stop while a process is being suspended, undoes everything and says so."""
    container = Container.start("w", "--mib", "4")
    faults("checkpoint hang=600000")
    shim = _shim(container)
    init = container.pid
    until(lambda: hangs_in_checkpoint(init), "the driver's checkpoint begins")
    os.kill(shim.pid, number)
    faults("")  # which ends what hangs
    _, err = waiting.communicate(shim, DEADLINE)
    assert shim.returncode == 1, err
    assert f"stopped by {number.name}" in err
    container.unharmed()


def _shim(container: Container) -> subprocess.Popen[str]:
    image = container.image_path
    argv = [RUNTIME, "checkpoint", "--image-path", str(image), "--work-path", str(image.parent), container.id]
    # As a terminal would start it: under nohup or in a shell's background some signals are ignored.
    heard = ["env", "--default-signal=HUP,INT,TERM", *argv]
    return subprocess.Popen(heard, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_process_that_has_ended_since(real: str, tmp_path: Path) -> None:
    """Podman dumps to the same directory each time; what only the earlier checkpoint had goes."""
    container = Container.start("w", script="tail -f /dev/null & exec /gpuwork --tick 30 --mib 4")
    archive = tmp_path / "c.tar"
    good(container.checkpoint(archive, "--leave-running", "--compress", "none"))
    assert len(tasks(archive)) == 2
    (child,) = [pid for pid in members(container) if pid != container.pid]
    os.kill(child, signal.SIGKILL)
    until(lambda: Path(f"/proc/{child}/cmdline").read_bytes() == b"", "the end of the child")
    good(container.checkpoint(archive, "--compress", "none"))
    assert len(tasks(archive)) == 1
    container.remove()
    Container.restore("w", archive).goes_on()


def tasks(archive: Path) -> list[str]:
    """The images of the memory of processes in an archive."""
    with tarfile.open(archive) as tar:
        return [name for name in tar.getnames() if fnmatch.fnmatch(name, "checkpoint/mm-*.img")]
