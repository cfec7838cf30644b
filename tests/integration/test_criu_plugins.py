"""GPU state that a plugin of CRIU's carries: NVIDIA's by a setting, AMD's always. By stand-ins of our own,
which real CRIU loads; softgpu's processes really go through the one for CUDA."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import registryhost
import shimhost
from support import Container, good, manifest, podman, run, sentence, until

PLUGINS = Path(__file__).resolve().parents[1] / "plugin" / "build"
JOURNAL = Path("/run/gpusnap-test-plugin.log")
CUDA = Path("/opt/cuda-plugin")
AMD = Path("/opt/amd-plugin")
BIN = Path("/opt/nvidia-tools/bin")
KFD = os.makedev(203, 0)  # cpuid of the first processor: any device that opens, and that CRIU does not know
UNIQUE = (0x5A5A0000B16B00B5, 0x5A5A0000B16B00B6)


def said() -> list[str]:
    """What the stand-ins were asked for, since last asked; without what they saw of the environment."""
    lines = JOURNAL.read_text().splitlines() if JOURNAL.exists() else []
    JOURNAL.unlink(missing_ok=True)
    return lines


def asked(lines: list[str]) -> list[str]:
    return [line for line in lines if " env " not in line]


def environment(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(" env ")[2].partition("=") for line in lines if " env " in line)
    return {name: value for name, _, value in pairs}


@pytest.fixture
def installed(host: None) -> Iterator[None]:
    """The stand-ins, where no package would put them."""
    for folder, source in ((CUDA, "cuda"), (AMD, "amd"), (BIN, "bin")):
        shutil.copytree(PLUGINS / source, folder, dirs_exist_ok=True)
    said()
    yield
    said()


@pytest.fixture
def plugins(settings: shimhost.Writer, installed: None) -> shimhost.Writer:
    """With the settings file of the test, for each runtime."""
    return settings


CRIU_PLUGIN = f"""
[nvidia]
driver = "criu-plugin"
libdir = "{CUDA}"
cuda-checkpoint = "{BIN}/cuda-checkpoint"
"""


def test_cuda_plugin(plugins: shimhost.Writer, tmp_path: Path) -> None:
    """CRIU's plugin locks, checkpoints, restores and unlocks; every byte is right, and nothing is chunked."""
    plugins(CRIU_PLUGIN)
    container = Container.start("one", "--procs", "2", workers=2)
    archive = tmp_path / "one.tar"
    good(container.checkpoint(archive))
    lines = said()
    actions = [line.split()[2] for line in asked(lines) if "--action" in line]
    assert actions.count("lock") == actions.count("checkpoint") == 2
    there = environment(lines)
    assert there["CRIU_LIBS_DIR"] == str(CUDA)
    assert there["PATH"].startswith(f"{BIN}:")
    record = manifest(archive)
    assert record["plugin"] == "cuda_plugin"
    assert record["pages"] == "criu"
    assert len(record["processes"]) == 2
    assert not any(process["regions"] for process in record["processes"])
    container.remove()
    Container.restore("one", archive).goes_on()
    actions = [line.split()[2] for line in asked(said()) if "--action" in line]
    assert sorted(actions) == ["restore", "restore", "unlock", "unlock"]


def test_leave_running(plugins: shimhost.Writer, tmp_path: Path) -> None:
    """The container runs on after its dump, and the checkpoint restores beside it once it is gone."""
    plugins(CRIU_PLUGIN)
    container = Container.start("one")
    archive = tmp_path / "one.tar"
    good(container.checkpoint(archive, "--leave-running"))
    container.goes_on()
    container.remove()
    Container.restore("one", archive).goes_on()


def test_in_the_store(plugins: shimhost.Writer, tmp_path: Path) -> None:
    """CRIU's images, which hold the GPU's memory, go into the store as ever."""
    plugins(CRIU_PLUGIN + f'[memory]\npages = "store"\n[store]\npath = "{tmp_path}/store"\n')
    container = Container.start("one")
    archive = tmp_path / "one.tar"
    good(container.checkpoint(archive))
    assert manifest(archive)["files"]
    container.remove()
    Container.restore("one", archive).goes_on()


def test_as_an_artifact(plugins: shimhost.Writer, tmp_path: Path) -> None:
    """Into a store, to a registry and back: nothing of that depends on who suspended."""
    plugins(CRIU_PLUGIN + f'[store]\npath = "{tmp_path}/store"\n')
    container = Container.start("one")
    gpusnap = "/usr/local/bin/gpusnap"
    good(run(gpusnap, "checkpoint", "one", "--name", "web:v1"))
    assert "by its plugin cuda_plugin" in good(run(gpusnap, "inspect", "web:v1"))
    with registryhost.running() as registry:
        there = f"http://{registry.host}/team/web:v1"
        good(run(gpusnap, "push", "web:v1", there))
        container.remove()
        good(run(gpusnap, "rm", "--gc", "web:v1"))
        pulled = json.loads(good(run(gpusnap, "pull", there, "--json")))
    good(run(gpusnap, "restore", pulled["digest"].partition(":")[2][:12]))
    container.goes_on()


def test_newer_releases(installed: None, newer: str, tmp_path: Path) -> None:
    """CRIU 4.2 with its crun and runc: the same plugin, the same way."""
    with open(shimhost.SETTINGS, "a", encoding="ascii") as file:
        file.write(CRIU_PLUGIN)
    container = Container.start("one", "--procs", "2", workers=2)
    archive = tmp_path / "one.tar"
    good(container.checkpoint(archive))
    assert manifest(archive)["plugin"] == "cuda_plugin"
    container.remove()
    Container.restore("one", archive).goes_on()
    assert [line for line in asked(said()) if "restore" in line]


def test_the_way_back_is_that_of_the_checkpoint(plugins: shimhost.Writer, tmp_path: Path) -> None:
    """Not that of the settings: a checkpoint by the plugin needs it, and one by gpusnap does without."""
    plugins(CRIU_PLUGIN)
    container = Container.start("one")
    archive = tmp_path / "one.tar"
    good(container.checkpoint(archive))
    container.remove()
    said()
    plugins(CRIU_PLUGIN.replace("criu-plugin", "native"))
    container = Container.restore("one", archive)
    container.goes_on()
    assert [line for line in asked(said()) if "restore" in line]
    good(container.checkpoint(archive))
    container.remove()
    plugins(CRIU_PLUGIN)
    assert "plugin" not in manifest(archive)
    Container.restore("one", archive).goes_on()
    assert not said()


def test_a_plugin_that_nobody_asked_for_is_kept_out(plugins: shimhost.Writer, tmp_path: Path) -> None:
    """Where a package has put it into CRIU's own folder, CRIU would load it for every dump."""
    plugins("")
    default = Path("/usr/lib/criu")
    shutil.copytree(CUDA, default)
    try:
        container = Container.start("one")
        archive = tmp_path / "one.tar"
        good(container.checkpoint(archive))
        container.remove()
        Container.restore("one", archive).goes_on()
    finally:
        shutil.rmtree(default)
    assert not said()


def test_another_gpu_is_refused(plugins: shimhost.Writer, tmp_path: Path) -> None:
    """The plugin cannot change GPUs: the plan says so, and nothing is begun."""
    plugins(CRIU_PLUGIN)
    container = Container.start("one", gpus=["0"])
    archive = tmp_path / "one.tar"
    good(container.checkpoint(archive))
    container.remove()
    said()
    words = {"PATH": os.environ["PATH"], "HOME": "/root", "GPUSNAP_GPU_MAP": "0=1"}
    line = ("podman", "--runtime", "gpusnap-runtime", "container", "restore", "--import", archive)
    text = sentence(run(*line, env=words))
    assert "CRIU's CUDA plugin" in text
    assert "the GPU map assigns 1" in text
    assert not said()
    container.remove()  # Podman's own leavings
    Container.restore("one", archive).goes_on()


def test_a_plugin_that_is_not_there(plugins: shimhost.Writer, tmp_path: Path) -> None:
    """Refused before anything is touched, with where it was looked for."""
    plugins('[nvidia]\ndriver = "criu-plugin"\n')
    container = Container.start("one")
    text = sentence(container.checkpoint(tmp_path / "one.tar"))
    assert "cuda_plugin.so" in text
    assert "/usr/lib/criu" in text
    container.unharmed()


# AMD


@pytest.fixture
def amd(plugins: shimhost.Writer, tmp_path: Path) -> Iterator[shimhost.Writer]:
    """A host with two AMD GPUs and none of NVIDIA's: what sysfs says, and device nodes that open."""
    tree = Path("/run/gpusnap-test-sysfs")
    tree.mkdir()
    old = Path("/run/gpusnap-test-class")
    old.mkdir()
    good(run("mount", "--bind", "/sys/class", old))
    for entry in old.iterdir():
        (tree / entry.name).symlink_to(f"{old}/{entry.name}")
    topology(tree / "kfd" / "kfd" / "topology" / "nodes")
    good(run("mount", "--bind", tree, "/sys/class"))
    hidden = [Path("/dev") / name for name in os.listdir("/dev") if name.startswith("nvidia")]
    numbers = {path: path.stat() for path in hidden}
    for path in hidden:
        path.unlink()
    made = {
        "/dev/kfd": KFD,
        "/dev/dri/renderD128": os.makedev(226, 128),
        "/dev/dri/renderD129": os.makedev(226, 129),
    }
    Path("/dev/dri").mkdir(exist_ok=True)
    for name, number in made.items():
        os.mknod(name, stat.S_IFCHR | 0o666, number)
        os.chmod(name, 0o666)
    try:
        yield plugins
    finally:
        for name in made:
            os.unlink(name)
        os.rmdir("/dev/dri")
        for path, info in numbers.items():
            os.mknod(path, info.st_mode, info.st_rdev)
            os.chmod(path, stat.S_IMODE(info.st_mode))
        good(run("umount", "/sys/class"))
        good(run("umount", old))
        shutil.rmtree(tree)
        old.rmdir()


def topology(nodes: Path) -> None:
    """A processor and two MI210."""
    for number, unique in enumerate((None, *UNIQUE)):
        node = nodes / str(number)
        (node / "mem_banks" / "0").mkdir(parents=True)
        gpu = unique is not None
        values = {"cpu_cores_count": 0 if gpu else 64, "simd_count": 416 if gpu else 0}
        if unique is not None:
            values |= {"gfx_target_version": 90010, "unique_id": unique, "drm_render_minor": 127 + number}
            values |= {
                "location_id": 0x4000 + (number << 8),
                "domain": 0,
                "vendor_id": 4098,
                "device_id": 29711,
            }
        (node / "properties").write_text("".join(f"{name} {value}\n" for name, value in values.items()))
        (node / "gpu_id").write_text(f"{50000 + number if gpu else 0}\n")
        (node / "name").write_text("aldebaran\n" if gpu else "\n")
        heap = {"heap_type": 1 if gpu else 0, "size_in_bytes": 64 << 30}
        (node / "mem_banks" / "0" / "properties").write_text("".join(f"{n} {v}\n" for n, v in heap.items()))


AMD_PLUGIN = f"""
[amd]
libdir = "{AMD}"
skip-checks = ["firmware", "numa"]
buffer = "64M"
"""
SCRIPT = "exec 3<>/dev/kfd; n=0; while :; do echo tick $n; n=$((n+1)); sleep 0.05; done"


def ticks(name: str) -> list[int]:
    return [int(line.split()[1]) for line in podman("logs", name).out.splitlines() if line.startswith("tick")]


def goes_on(name: str) -> None:
    before = len(ticks(name))
    until(lambda: len(ticks(name)) > before + 2, f"more ticks of {name}")
    found = ticks(name)
    assert found == list(range(found[0], found[0] + len(found)))


def start(name: str, *gpus: int) -> None:
    devices = [f"--device=/dev/dri/renderD{128 + gpu}" for gpu in gpus]
    command = ("localhost/base", "sh", "-c", SCRIPT)
    good(podman("run", "-d", "--name", name, "--device=/dev/kfd", *devices, *command))
    until(lambda: len(ticks(name)) > 2, "the first ticks")


def test_amd(amd: shimhost.Writer, tmp_path: Path) -> None:
    """CRIU's plugin is given to CRIU with what the settings say, and is asked for /dev/kfd, both ways."""
    amd(AMD_PLUGIN)
    start("amd", 0)
    archive = tmp_path / "amd.tar"
    good(podman("container", "checkpoint", "--export", archive, "amd"))
    lines = said()
    assert "amdgpu_plugin dump-file" in asked(lines)
    there = environment(lines)
    assert there["KFD_FW_VER_CHECK"] == there["KFD_NUMA_CHECK"] == "0"
    assert there["KFD_MAX_BUFFER_SIZE"] == str(64 << 20)
    assert "KFD_VRAM_SIZE_CHECK" not in there
    assert there["CRIU_LIBS_DIR"] == str(AMD)
    record = manifest(archive)
    assert record["plugin"] == "amdgpu_plugin"
    assert record["host"]["driver"]["vendor"] == "amd"
    assert [gpu["uuid"] for gpu in record["gpus"]] == [f"GPU-{UNIQUE[0]:016x}"]
    assert {node["path"] for node in record["nodes"]} == {"/dev/kfd", "/dev/dri/renderD128"}
    good(podman("rm", "amd"))
    good(podman("container", "restore", "--import", archive))
    lines = said()
    assert "amdgpu_plugin resume-late 1" in asked(lines)
    assert environment(lines)["KFD_FW_VER_CHECK"] == "0"
    goes_on("amd")


def test_amd_on_another_gpu(amd: shimhost.Writer, tmp_path: Path) -> None:
    """The render node becomes that of the plan's GPU, and the container has no other."""
    amd(AMD_PLUGIN)
    start("amd", 0)
    archive = tmp_path / "amd.tar"
    good(podman("container", "checkpoint", "--export", archive, "amd"))
    good(podman("rm", "amd"))
    words = {"PATH": os.environ["PATH"], "HOME": "/root", "GPUSNAP_GPU_MAP": f"0=GPU-{UNIQUE[1]:016x}"}
    line = ("podman", "--runtime", "gpusnap-runtime", "container", "restore", "--import", archive)
    good(run(*line, env=words))
    goes_on("amd")
    pid = json.loads(good(podman("inspect", "amd")))[0]["State"]["Pid"]
    names = sorted(os.listdir(f"/proc/{pid}/root/dev/dri"))
    assert names == ["renderD129"]


def test_amd_leave_running(amd: shimhost.Writer, tmp_path: Path) -> None:
    """The container runs on after its dump."""
    amd(AMD_PLUGIN)
    start("amd", 0, 1)
    good(podman("container", "checkpoint", "--export", tmp_path / "amd.tar", "--leave-running", "amd"))
    goes_on("amd")


def test_amd_without_the_plugin(amd: shimhost.Writer, tmp_path: Path) -> None:
    """Refused before anything is touched."""
    amd("")
    start("amd", 0)
    text = sentence(podman("container", "checkpoint", "--export", tmp_path / "amd.tar", "amd"))
    assert "amdgpu_plugin.so" in text
    goes_on("amd")


def test_gpus_of_both(amd: shimhost.Writer, tmp_path: Path) -> None:
    """On a host with NVIDIA's driver as well, the vendor is that of the files that the container holds."""
    amd(AMD_PLUGIN)
    os.mknod("/dev/nvidiactl", stat.S_IFCHR | 0o666, os.makedev(195, 255))
    try:
        start("amd", 0)
        archive = tmp_path / "amd.tar"
        good(podman("container", "checkpoint", "--export", archive, "amd"))
        assert manifest(archive)["host"]["driver"]["vendor"] == "amd"
        good(podman("rm", "amd"))
        good(podman("container", "restore", "--import", archive))
        goes_on("amd")
    finally:
        os.unlink("/dev/nvidiactl")
