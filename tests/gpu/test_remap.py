"""On two real GPUs of a kind: a container comes back on the other one, and sees what the plan says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from realhost import Machine, Program, Workload
from support import good, manifest, podman, run
from test_containers import needs, same_as_uninterrupted

from gpusnap.runtime_shim.gpu.api.driver import Gpu
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia

TORCH = Workload.python("torch_train.py", "torch", 1024)


def moved(program: Program, archive: Path, pairs: Sequence[tuple[Gpu, Gpu]]) -> None:
    """Export, remove, and import with a GPU map; then it must go on."""
    good(program.checkpoint(archive, "--compress", "none"))
    program.remove()
    gpu_map = ",".join(f"{old.uuid}={new.uuid}" for old, new in pairs)
    env = {"PATH": os.environ["PATH"], "HOME": "/root", "GPUSNAP_GPU_MAP": gpu_map}
    words = ("podman", "--runtime", "gpusnap-runtime", "container", "restore", "--import", archive)
    good(run(*words, env=env))
    program.goes_on(more=5)


def busy(driver: Nvidia, program: Program) -> set[str]:
    """UUIDs of the GPUs that hold the program's memory, as nvidia-smi has them: an idle one has far less.

    NVML counts by process where it knows this PID namespace; elsewhere nobody else may use the GPUs.
    """
    if used := driver.memory_used([program.pid]):
        return {uuid for uuid, size in used[program.pid].items() if (size or 0) >= TORCH.mib << 20}
    return {gpu.uuid for gpu in driver.host().gpus if gpu.memory_used >= TORCH.mib << 20}


def in_dev(program: Program) -> list[str]:
    names = good(podman("exec", program.name, "ls", "/dev")).split()
    return sorted(name for name in names if name.removeprefix("nvidia").isdigit())


def test_there_and_back(
    real: str, machine: Machine, driver: Nvidia, two: tuple[Gpu, Gpu], archive: Path
) -> None:
    """GPU 0 to GPU 1 and back again: every checksum is that of a run which nobody interrupted."""
    needs(TORCH)
    first, second = two
    program = Program.begin("w", TORCH, machine.options(minors=[first.minor]))
    for old, new in ((first, second), (second, first)):
        assert busy(driver, program) == {old.uuid}
        moved(program, archive, [(old, new)])
        assert busy(driver, program) == {new.uuid}
        assert in_dev(program) == [f"nvidia{new.minor}"]
        assert [gpu["uuid"] for gpu in manifest(archive)["gpus"]] == [old.uuid]
    same_as_uninterrupted(program, TORCH)


def test_both_swapped(
    real: str, machine: Machine, driver: Nvidia, two: tuple[Gpu, Gpu], archive: Path
) -> None:
    """A container that sees both GPUs and uses one: they trade places."""
    needs(TORCH)
    first, second = two
    program = Program.begin("w", TORCH, machine.options(minors=[first.minor, second.minor]))
    used = busy(driver, program)
    assert len(used) == 1
    moved(program, archive, [(first, second), (second, first)])
    assert busy(driver, program) == {first.uuid, second.uuid} - used
    assert len(manifest(archive)["gpus"]) == 2
    same_as_uninterrupted(program, TORCH)


def test_keep_names(real: str, machine: Machine, driver: Nvidia, two: tuple[Gpu, Gpu], archive: Path) -> None:
    """The old name stays beside the driver's own, unless libcuda takes a misnumbered node away.

    It does so for root where /proc/driver/nvidia/params allows it (ModifyDeviceFiles), as by default.
    """
    needs(TORCH)
    first, second = two
    options = [*machine.options(minors=[first.minor]), "--annotation", "io.gpusnap.keep-names=true"]
    program = Program.begin("w", TORCH, options)
    moved(program, archive, [(first, second)])
    assert busy(driver, program) == {second.uuid}
    params = Path("/proc/driver/nvidia/params").read_text().splitlines()
    kept = [first.minor] if "ModifyDeviceFiles: 0" in params else []
    assert in_dev(program) == sorted(f"nvidia{minor}" for minor in [*kept, second.minor])


def test_from_a_store(
    real: str, machine: Machine, driver: Nvidia, two: tuple[Gpu, Gpu], tmp_path: Path
) -> None:
    """`gpusnap checkpoint` on one GPU, `gpusnap restore --gpu-map` on the other."""
    needs(TORCH)
    first, second = two
    program = Program.begin("w", TORCH, machine.options(minors=[first.minor]))
    target = f"oci:{tmp_path / 'store'}:one"
    good(run("/usr/local/bin/gpusnap", "checkpoint", "--to", target, "w"))
    program.remove()
    gpu_map = f"{first.uuid}={second.uuid}"
    good(run("/usr/local/bin/gpusnap", "restore", "--gpu-map", gpu_map, target))
    program.goes_on(more=5)
    assert busy(driver, program) == {second.uuid}
    same_as_uninterrupted(program, TORCH)
