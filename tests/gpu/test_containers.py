"""The main job on a real GPU: Podman exports a container, removes it, imports it, and it goes on."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from realhost import Machine, Program, Workload, cdi_device, reference
from support import Container, good, manifest, podman, run, sentence

TORCH = Workload.python("torch_train.py", "torch", 1024)
JAX = Workload.python("jax_train.py", "jax", 1024)
CUPY = Workload.python("cupy_words.py", "cupy", 1024)
MANAGED = Workload.python("cupy_words.py", "cupy", 64, "--managed")
PINNED = Workload.python("pinned_reader.py", "", 64)
PROGRAMS = Workload.python("torch_train.py", "torch", 256, "--programs")
FED = Workload.python("torch_workers.py", "torch", 256)
FRAMEWORKS = [TORCH, JAX, CUPY]
NAMES = ["torch", "jax", "cupy"]


def needs(load: Workload) -> None:
    if load.needs and not importlib.util.find_spec(load.needs):
        pytest.skip(f"{load.needs} is not installed for this Python")


def exported(container: Container, archive: Path, mib: int) -> None:
    """Export it, see that the GPU's memory is in the manifest, and remove it."""
    good(container.checkpoint(archive, "--compress", "none"))
    assert container.inspect()["State"]["Status"] == "exited"
    assert sum(gpu["memoryUsed"] for gpu in manifest(archive)["gpus"]) >= mib << 20
    assert archive.stat().st_size >= mib << 20
    container.remove()


def same_as_uninterrupted(program: Program, load: Workload) -> None:
    """Every checksum it ever printed is, bit for bit, that of a run which nobody interrupted."""
    found = program.stamps()
    expected = reference(load, max(tick for tick, _, _ in found))
    assert {tick: total for tick, total, _ in found if total != expected[tick]} == {}


@pytest.mark.parametrize("load", FRAMEWORKS, ids=NAMES)
def test_export_and_import(real: str, machine: Machine, archive: Path, load: Workload) -> None:
    """Every word of device memory is right after it, and what is computed is as if nothing had happened."""
    needs(load)
    program = Program.begin("w", load, machine.options())
    exported(program, archive, load.mib)
    good(podman("container", "restore", "--import", archive))
    program.goes_on(more=5)
    same_as_uninterrupted(program, load)
    assert program.stamps()[0][0] == 1, "the log does not reach back to the first tick"


@pytest.mark.parametrize("load", FRAMEWORKS, ids=NAMES)
def test_leave_running(real: str, machine: Machine, archive: Path, load: Workload) -> None:
    """It runs on beside its checkpoint, right to the bit, and so does what the checkpoint brings back."""
    needs(load)
    program = Program.begin("w", load, machine.options())
    good(program.checkpoint(archive, "--leave-running", "--compress", "none"))
    program.goes_on(more=5)
    same_as_uninterrupted(program, load)
    seen = program.stamps()[-1][0]
    program.remove()
    good(podman("container", "restore", "--import", archive))
    assert program.ticks()[1][-1] < seen
    program.goes_on(more=5)
    same_as_uninterrupted(program, load)


def test_twice_in_a_row(real: str, machine: Machine, archive: Path) -> None:
    """What was restored is checkpointed and restored again."""
    load = Workload.gpuwork(256)
    program = Program.begin("w", load, machine.options())
    for _ in range(2):
        exported(program, archive, load.mib)
        good(podman("container", "restore", "--import", archive))
        program.goes_on()


def test_several_processes(real: str, machine: Machine, archive: Path) -> None:
    """Three processes of one container share the GPU; all of them come back."""
    load = Workload.gpuwork(256, "--procs", "3")
    program = Program.begin("w", load, machine.options(), workers=3)
    exported(program, archive, 3 * load.mib)
    good(podman("container", "restore", "--import", archive))
    assert len(program.ticks()) == 3
    program.goes_on()


def test_driver_memory_that_a_thread_reads(real: str, machine: Machine, archive: Path) -> None:
    """No thread may run while the driver has taken away the host memory that it mapped."""
    program = Program.begin("w", PINNED, machine.options())
    good(program.checkpoint(archive, "--leave-running", "--compress", "none"))
    program.goes_on()
    program.remove()
    good(podman("container", "restore", "--import", archive))
    program.goes_on()


def neutralised(archive: Path) -> list[str]:
    """The files of each process that had inherited some, and has /dev/null instead."""
    found = manifest(archive).get("neutralised", [])
    return [" ".join(sorted({path for _, path in process["descriptors"]})) for process in found]


def test_workers_of_a_dataloader(real: str, machine: Machine, archive: Path) -> None:
    """Children by fork that hold all of the GPU's files and use none: the same two feed the training on."""
    needs(FED)
    program = Program.begin("w", FED, machine.options())
    exported(program, archive, FED.mib)
    assert len(neutralised(archive)) == 2
    assert all("/dev/nvidia0" in files or "/dev/nvidiactl" in files for files in neutralised(archive))
    good(podman("container", "restore", "--import", archive))
    program.goes_on(more=20)
    same_as_uninterrupted(program, FED)


def test_workers_of_a_dataloader_that_run_on(real: str, machine: Machine, archive: Path) -> None:
    """Beside their checkpoint, and beside a second one that finds nothing left to replace."""
    needs(FED)
    program = Program.begin("w", FED, machine.options())
    good(program.checkpoint(archive, "--leave-running", "--compress", "none"))
    assert len(neutralised(archive)) == 2
    program.goes_on(more=20)
    exported(program, archive, FED.mib)
    assert neutralised(archive) == []
    good(podman("container", "restore", "--import", archive))
    program.goes_on(more=20)
    same_as_uninterrupted(program, FED)


@pytest.mark.parametrize("load", [MANAGED, Workload.gpuwork(64, "--managed")], ids=["cupy", "gpuwork"])
def test_managed_memory_is_refused(real: str, machine: Machine, archive: Path, load: Workload) -> None:
    """The driver cannot suspend managed memory: a sentence says so, and the program runs on, memory right."""
    needs(load)
    program = Program.begin("w", load, machine.options())
    text = sentence(program.checkpoint(archive))
    assert "cudaMallocManaged" in text
    assert not archive.exists()
    program.unharmed()


def test_cdi(real: str, machine: Machine, archive: Path) -> None:
    """A GPU that came by CDI, with the driver's libraries as mounts that have no type."""
    load = Workload.gpuwork(256)
    with cdi_device(machine.nodes) as device:
        program = Program.begin("w", load, [*machine.options(gpu=False), "--device", device])
        exported(program, archive, load.mib)
        good(podman("container", "restore", "--import", archive))
        program.goes_on()


def test_paused(real: str, machine: Machine, tmp_path: Path) -> None:
    """As containerd has it: frozen before the checkpoint and after it, and not a tick in between."""
    needs(TORCH)
    program = Program.begin("w", TORCH, machine.options())
    good(podman("pause", "w"))
    before = program.log()
    good(run(*program.line(tmp_path, "--leave-running")))
    assert (tmp_path / "image/gpusnap/manifest.json").exists()
    assert program.inspect()["State"]["Status"] == "paused"
    assert program.log() == before
    good(podman("unpause", "w"))
    program.goes_on(more=5)
    same_as_uninterrupted(program, TORCH)
    shutil.rmtree(tmp_path / "image")


def test_programs_are_started(real: str, machine: Machine, archive: Path, tmp_path: Path) -> None:
    """A CUDA process that runs programs all the time, and so waits within vfork, running and paused."""
    needs(PROGRAMS)
    program = Program.begin("w", PROGRAMS, machine.options())
    for paused in (False, True, False, True):
        if paused:
            good(podman("pause", "w"))
        good(run(*program.line(tmp_path, "--leave-running")))
        if paused:
            good(podman("unpause", "w"))
        program.goes_on(more=5)
    shutil.rmtree(tmp_path / "image")
    exported(program, archive, PROGRAMS.mib)
    good(podman("container", "restore", "--import", archive))
    program.goes_on(more=5)
    same_as_uninterrupted(program, PROGRAMS)
