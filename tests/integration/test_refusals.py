"""What is refused, with one sentence, and the container unharmed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import gpuhost
import pytest
import shimhost
from conftest import SRC
from support import (
    GPUS_CONF,
    RUNTIME,
    STORAGE,
    Container,
    Done,
    criu_errors,
    faults,
    good,
    podman,
    run,
    sentence,
)

# Every test here starts one workload and has something refused.


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.tar.zst"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", place], check=True)
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def _checkpoint(container: Container, image: Path, *words: str, log: Path | None = None) -> Done:
    """Call the shim as Podman does, with an image directory of the test's own."""
    first = ["--log", str(log), "--log-format", "json"] if log else []
    argv = [RUNTIME, *first, "checkpoint", "--image-path", str(image), "--work-path", "/tmp", *words]
    return run(*argv, container.id, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})


def test_driver_without_the_checkpoint_api(real: str, archive: Path) -> None:
    """A driver before 570 has no checkpoint API."""
    container = Container.start("w", "--mib", "4")
    gpuhost.install(SRC / "softgpu/build/old", GPUS_CONF) if (
        SRC / "softgpu/build/old/lib"
    ).exists() else _old()
    try:
        text = sentence(container.checkpoint(archive))
    finally:
        gpuhost.install(SRC / "softgpu/build", GPUS_CONF)
    assert "570" in text
    assert "560.35.03" in text
    container.unharmed()


def _old() -> None:
    shutil.copy(SRC / "softgpu/build/old/libcuda.so.1", f"{gpuhost.LIBRARY_DIR}/libcuda.so.560.35.03.new")
    os.replace(
        f"{gpuhost.LIBRARY_DIR}/libcuda.so.560.35.03.new", f"{gpuhost.LIBRARY_DIR}/libcuda.so.560.35.03"
    )


def test_managed_memory(real: str, archive: Path) -> None:
    """Managed memory cannot be suspended; the program runs on with it."""
    container = Container.start("w", "--mib", "4", "--managed")
    text = sentence(container.checkpoint(archive))
    assert "managed memory" in text
    assert "CUDA_ERROR_NOT_SUPPORTED" in text
    container.unharmed()


def test_lock_deadline(real: str, archive: Path) -> None:
    """GPU work that does not end within the deadline, which an annotation of the container sets."""
    options = ["--annotation", "io.gpusnap.nvidia.lock-timeout=0.2"]
    container = Container.start("w", "--mib", "4", options=options)
    faults("lock hang=60000 count=1")
    text = sentence(container.checkpoint(archive))
    assert "0.2 s" in text
    container.unharmed()


def test_lock_fails_for_one_of_several(real: str, archive: Path) -> None:
    """Those that were locked are unlocked again."""
    container = Container.start("w", "--mib", "4", "--procs", "3", workers=3)
    faults("lock result=CUDA_ERROR_OPERATING_SYSTEM count=1")
    sentence(container.checkpoint(archive))
    container.unharmed()


def test_checkpoint_fails_for_one_of_several(real: str, archive: Path) -> None:
    """Those that were suspended get their memory back."""
    container = Container.start("w", "--mib", "4", "--procs", "3", workers=3)
    faults("checkpoint result=CUDA_ERROR_UNKNOWN count=1")
    text = sentence(container.checkpoint(archive))
    assert "CUDA_ERROR_UNKNOWN" in text
    container.unharmed()


def test_resume_fails_at_first(real: str, archive: Path) -> None:
    """A driver that refuses twice to take the memory back is asked again, and the container runs on."""
    container = Container.start("w", "--mib", "4")
    faults("restore result=CUDA_ERROR_NOT_READY count=2")
    good(container.checkpoint(archive, "--leave-running"))
    container.goes_on()


def test_no_memory_to_resume(real: str, archive: Path) -> None:
    """NVIDIA's driver can never restore the process then. The message tells how to restore its checkpoint."""
    container = Container.start("w", "--mib", "4")
    faults("restore result=CUDA_ERROR_OUT_OF_MEMORY")
    done = container.checkpoint(archive, "--leave-running")
    assert done.code
    assert "the driver cannot restore this process any more" in done.err
    (again,) = re.findall(r"\(Podman: (podman container restore \w+)\)", done.err)
    good(podman("kill", "w"))
    faults("")
    assert "is complete" in good(run("/usr/local/bin/gpusnap", "recover"))
    good(run(*again.split()))
    container.goes_on()


def test_image_path_cannot_be_made(real: str, tmp_path: Path) -> None:
    """The image directory lies below a file."""
    container = Container.start("w", "--mib", "4")
    (tmp_path / "file").touch()
    log = tmp_path / "log.json"
    text = sentence(_checkpoint(container, tmp_path / "file" / "image", log=log))
    assert str(tmp_path / "file" / "image") in text
    (entry,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert entry["level"] == "error"
    assert text in entry["msg"]
    container.goes_on()


def test_image_path_read_only(real: str, small: Path) -> None:
    """The image directory is on a read-only file system."""
    container = Container.start("w", "--mib", "4")
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    text = sentence(_checkpoint(container, small / "image"))
    assert str(small) in text
    container.goes_on()


def test_disk_too_small(real: str, small: Path) -> None:
    """Pre-flight sees that the image will not fit."""
    container = Container.start("w", "--mib", "24")
    text = sentence(_checkpoint(container, small))
    assert "is free" in text
    assert os.listdir(small) == []
    container.goes_on()


def test_disk_full_on_the_way(crun: None, small: Path, tmp_path: Path) -> None:
    """The disk fills up after pre-flight: the dump fails, what it wrote is removed, the container runs on."""
    subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
    container = Container.start("w", "--mib", "1")
    wrapper = tmp_path / "crun"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" checkpoint "*) head -c 62M /dev/zero > {small}/other 2>/dev/null;; esac\n'
        'exec /usr/bin/crun "$@"\n'
    )
    wrapper.chmod(0o755)
    shimhost.write_settings(f'runtime = "{wrapper}"\n')
    text = sentence(_checkpoint(container, small))
    # Whose write is the first to fail: CRIU's, or the one of the GPU memory, which goes on beside it.
    assert "CRIU says: " in text or "No space left on device" in text or " is full: " in text
    assert os.listdir(small) == ["other"]
    container.goes_on()


def test_disk_full_behind_a_container_that_runs_on(crun: None, small: Path, tmp_path: Path) -> None:
    """The disk fills up while its memory is written: it has been running for long, and nothing is left."""
    subprocess.run(["mount", "-o", "remount,size=128m", small], check=True)
    container = Container.start("w", "--mib", "30")
    wrapper = tmp_path / "crun"
    wrapper.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" checkpoint "*) /usr/bin/crun "$@" || exit;'
        f" head -c 4G /dev/zero > {small}/other 2>/dev/null; exit 0;; esac\n"
        'exec /usr/bin/crun "$@"\n'
    )
    wrapper.chmod(0o755)
    shimhost.write_settings(f'runtime = "{wrapper}"\n')
    text = sentence(_checkpoint(container, small, "--leave-running"))
    assert " is full: " in text
    assert "the container continues to run" in text
    assert os.listdir(small) == ["other"]
    assert os.listdir("/run/gpusnap/journal") == []
    assert not os.path.ismount("/run/gpusnap/stage")
    container.goes_on()


def test_memory_limit_of_the_container(crun: None, archive: Path) -> None:
    """The GPU's bytes would break the container's memory limit, and the kernel would kill it: refused."""
    controllers = Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()
    if "memory" not in controllers:
        pytest.skip("the memory controller is not in cgroup v2 here")
    container = Container.start("w", "--mib", "64", options=["--memory", "100m"])
    text = sentence(container.checkpoint(archive))
    assert "memory limit" in text
    container.unharmed()


def test_stopped_process(real: str, archive: Path) -> None:
    """A stopped process would keep the driver waiting for ever."""
    container = Container.start("w", "--mib", "4")
    init = container.pid
    os.kill(init, signal.SIGSTOP)
    text = sentence(container.checkpoint(archive))
    assert f"process {init} (gpuwork) is stopped" in text
    os.kill(init, signal.SIGCONT)
    container.unharmed()


def test_bad_setting(crun: None, archive: Path) -> None:
    """An unknown key is named, before anything is touched."""
    container = Container.start("w", "--mib", "4")
    shimhost.write_settings('runtime = "crun"\n[criu]\nlinkremap = true\n')
    text = sentence(container.checkpoint(archive))
    assert "criu.linkremap" in text
    shimhost.write_settings('runtime = "crun"\n')
    container.unharmed()


def test_annotation_that_a_container_may_not_set(crun: None, archive: Path) -> None:
    """A container cannot name a program for this host to run."""
    container = Container.start(
        "w", "--mib", "4", options=["--annotation", "io.gpusnap.criu.action-script=/tmp/x"]
    )
    assert "io.gpusnap.criu.action-script" in sentence(container.checkpoint(archive))
    container.unharmed()


class TestRestore:
    """A restore that is refused starts nothing."""

    @pytest.fixture
    def exported(self, real: str, archive: Path) -> Path:
        container = Container.start("w", "--mib", "8")
        good(container.checkpoint(archive, "--compress", "none"))
        container.remove()
        return archive

    def refused(self, archive: Path) -> str:
        done = podman("container", "restore", "--import", archive)
        text = sentence(done)
        left = good(podman("ps", "--all", "--format", "{{.Names}} {{.State}}"))
        assert "running" not in left
        assert not [p for p in STORAGE.glob("*/userdata/restore.log") if p.stat().st_size], criu_errors()
        return text

    def change(self, archive: Path, tmp_path: Path, data: bytes | None) -> Path:
        """The archive with another manifest, or with none."""
        tree = tmp_path / "tree"
        tree.mkdir()
        good(run("tar", "-C", tree, "-xpf", archive))
        path = tree / "checkpoint" / "gpusnap" / "manifest.json"
        path.unlink()
        if data is not None:
            path.write_bytes(data)
            index = json.loads(path.with_name("index.json").read_text())
            index["annotations"] = {"io.gpusnap.manifest.digest": f"sha256:{sha256(data).hexdigest()}"}
            path.with_name("index.json").write_text(json.dumps(index))
        changed = tmp_path / "changed.tar"
        good(run("tar", "-C", tree, "-cpf", changed, "."))
        return changed

    def original(self, archive: Path) -> bytes:
        text = good(run("tar", "-xOf", archive, "checkpoint/gpusnap/manifest.json"))
        return text.encode()

    def test_no_manifest(self, exported: Path, tmp_path: Path) -> None:
        """A checkpoint that was cut off before its manifest."""
        assert "is incomplete" in self.refused(self.change(exported, tmp_path, None))

    def test_manifest_cut_short(self, exported: Path, tmp_path: Path) -> None:
        """Half a manifest."""
        half = self.original(exported)[:-100]
        assert "cut short" in self.refused(self.change(exported, tmp_path, half))

    def test_manifest_of_another_version(self, exported: Path, tmp_path: Path) -> None:
        """A major version that this gpusnap does not know is refused by name."""
        data = self.original(exported).replace(b'"version": "1.0"', b'"version": "2.7"', 1)
        assert "'2.7'" in self.refused(self.change(exported, tmp_path, data))

    def test_manifest_that_wants_a_host_path(self, exported: Path, tmp_path: Path) -> None:
        """A manifest cannot mount a path of this host that is not the driver's."""
        document = json.loads(self.original(exported))
        document["mounts"] = [
            {"key": "gpusnap-0", "destination": "/usr/bin/nvidia-smi", "source": "/etc/shadow"}
        ]
        text = self.refused(self.change(exported, tmp_path, json.dumps(document).encode()))
        assert "/etc/shadow" in text

    def test_no_gpu_on_this_host(self, exported: Path) -> None:
        """Another host, without a GPU."""
        nodes = [Path("/dev") / name for name in os.listdir("/dev") if name.startswith("nvidia")]
        numbers = {node: node.stat() for node in nodes}
        for node in nodes:
            node.unlink()
        try:
            # Podman itself would look for the nodes, so the shim is asked directly.
            text = sentence(self.direct(exported))
        finally:
            for node, was in numbers.items():
                os.mknod(node, was.st_mode, was.st_rdev)
        assert "no NVIDIA driver" in text

    def test_another_gpu(self, exported: Path) -> None:
        """A host with other GPUs than those of the checkpoint."""
        others = GPUS_CONF.replace("GPU-11111111", "GPU-99999999").replace("Soft H100", "Soft A100")
        gpuhost.install(SRC / "softgpu/build", others)
        try:
            text = sentence(self.direct(exported))
        finally:
            gpuhost.install(SRC / "softgpu/build", GPUS_CONF)
        assert "another model: Soft A100" in text

    def test_older_driver(self, exported: Path) -> None:
        """A host with an older driver."""
        gpuhost.install(SRC / "softgpu/build", GPUS_CONF.replace("560.35.03", "555.42.02"))
        try:
            text = sentence(self.direct(exported))
        finally:
            gpuhost.install(SRC / "softgpu/build", GPUS_CONF)
        assert "560.35.03" in text
        assert "555.42.02" in text

    def direct(self, archive: Path) -> Done:
        """Restore from an unpacked archive with the shim alone."""
        bundle = archive.parent / "bundle"
        bundle.mkdir()
        good(run("tar", "-C", bundle, "-xpf", archive))
        shutil.copy(bundle / "spec.dump", bundle / "config.json")
        image = str(bundle / "checkpoint")
        words = ["restore", "--detach", "--bundle", str(bundle), "--image-path", image, "direct"]
        return run(RUNTIME, *words, env={"PATH": "/usr/sbin:/usr/bin"})

    def test_driver_restore_fails(self, exported: Path) -> None:
        """The driver cannot put the memory back: the restored container is killed, never half of one."""
        faults("restore result=CUDA_ERROR_UNKNOWN")
        done = podman("container", "restore", "--import", exported)
        assert "CUDA_ERROR_UNKNOWN" in sentence(done)
        assert "running" not in good(podman("ps", "--all", "--format", "{{.State}}"))
        assert good(run("crun", "list", "-q")) == ""
        assert run("pgrep", "-x", "gpuwork").out == ""
        faults("")
        good(podman("rm", "--force", "--all"))
        Container.restore("w", exported).goes_on()

    def test_process_dies_in_the_driver(self, real: str, archive: Path) -> None:
        """A process that the driver's restore kills: no container is left."""
        # Below a shell, because the init of a PID namespace cannot be killed from inside.
        container = Container.start("w", script="/gpuwork --mib 4 --tick 30 & while :; do sleep 1; done")
        good(container.checkpoint(archive))
        container.remove()
        faults("restore die")
        sentence(podman("container", "restore", "--import", archive))
        assert "running" not in good(podman("ps", "--all", "--format", "{{.State}}"))
        assert run("pgrep", "-x", "gpuwork").out == ""
