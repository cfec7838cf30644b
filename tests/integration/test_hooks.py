"""gpusnap's OCI hooks under Podman, and NVIDIA's that run again after a restore onto another driver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gpuhost
import pytest
from conftest import SRC
from support import GPUS_CONF, GPUWORK, Container, Done, good, podman, run, until

RECORDS = Path("/run/gpusnap/containers")


@pytest.fixture
def hooks(tmp_path: Path, real: str) -> str:
    """A hooks directory, as `gpusnap install-hooks` makes it."""
    folder = str(tmp_path / "hooks.d")
    good(run("/usr/local/bin/gpusnap", "install-hooks", folder))
    return folder


def start(hooks: str, *options: str) -> Done:
    words = ("run", "-d", "--name", "w", "-v", f"{GPUWORK}:/gpuwork:ro", *options)
    return run(
        "podman", "--runtime", "gpusnap-runtime", "--hooks-dir", hooks, *words, "localhost/base", "/gpuwork"
    )


def test_a_gpu_container_is_prepared_and_recorded(hooks: str, tmp_path: Path) -> None:
    """CDI's mounts get their type, the GPUs are written down, and the record goes with the container."""
    good(start(hooks, "--device", "nvidia.com/gpu=1"))
    container = Container("w")
    until(lambda: len(container.ticks()) == 1, "its first tick")
    record = json.loads((RECORDS / container.id / "gpus.json").read_text())
    assert "/dev/nvidia1" in json.dumps(record)
    assert "560.35.03" in json.dumps(record)
    config = json.loads((container.image_path.parent / "config.json").read_text())
    of_driver = [mount for mount in config["mounts"] if "libcuda" in mount["destination"]]
    assert of_driver
    assert {mount["type"] for mount in of_driver} == {"bind"}
    folder = RECORDS / container.id
    good(podman("container", "checkpoint", "--export", tmp_path / "a.tar", "w"))
    until(lambda: not folder.exists(), "the record is gone")
    container.remove()
    Container.restore("w", tmp_path / "a.tar").goes_on()


def test_without_a_gpu(hooks: str) -> None:
    """Nothing is written down, and the container starts as it would."""
    good(start(hooks, "--entrypoint", '["sleep", "600"]'))
    assert not (RECORDS / Container("w").id).exists()


def test_a_hook_that_is_gone_at_the_restore(hooks: str, tmp_path: Path) -> None:
    """On a host without gpusnap-hook at that path the restore leaves it out; runc would have run it."""
    good(start(hooks, "--device", "nvidia.com/gpu=0"))
    container = Container("w")
    until(lambda: len(container.ticks()) == 1, "its first tick")
    good(container.checkpoint(tmp_path / "a.tar"))
    container.remove()
    program = Path("/usr/local/bin/gpusnap-hook")
    text = program.read_bytes()
    program.unlink()
    try:
        Container.restore("w", tmp_path / "a.tar").goes_on()
    finally:
        program.write_bytes(text)
        program.chmod(0o755)


@pytest.fixture
def newer_driver(host: None) -> Iterator[str]:
    """The version of a driver that the test may install; the usual one comes back."""
    yield "560.94.11"
    gpuhost.install(SRC / "softgpu" / "build", GPUS_CONF)


def test_nvidias_hooks_run_again(real: str, newer_driver: str, tmp_path: Path) -> None:
    """After a restore onto another driver the loader's cache in the container is made anew."""
    container = Container.start("w", "--mib", "4", gpus=("0",))
    good(container.checkpoint(tmp_path / "a.tar"))
    container.remove()
    gpuhost.install(SRC / "softgpu" / "build", GPUS_CONF.replace("560.35.03", newer_driver))
    again = Container.restore("w", tmp_path / "a.tar")
    again.goes_on()
    marked = good(podman("exec", "w", "cat", "/etc/ld.so.conf.d/00-nvcr-softgpu.conf"))
    assert gpuhost.LIBRARY_DIR in marked
    changed = good(podman("exec", "w", "stat", "-c", "%Y", "/etc/ld.so.cache"))
    born = good(podman("inspect", "w", "--format", "{{.State.StartedAt.Unix}}"))
    assert int(changed) >= int(born) - 1, "the loader's cache is the old one"
