"""gpusnap install and uninstall on a host: Podman and containerd take what is written; nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import gpuhost
import pytest
import shimhost
from support import GPUS_CONF, GPUWORK, Container, containers_left, good, podman, run, sentence

SRC = Path(__file__).resolve().parents[2]
BIN = Path("/opt/installed/bin")
GPUSNAP = BIN / "gpusnap"
MODULES = {
    "gpusnap": "gpusnap.cli.entry",
    "gpusnap-runtime": "gpusnap.runtime_shim.shim.entry",
    "gpusnap-hook": "gpusnap.hooks.main",
}
PODMAN = Path("/etc/containers/containers.conf.d/90-gpusnap.conf")
CONTAINERD = Path("/etc/containerd/config.toml")


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """gpusnap in an environment of its own, as pip leaves it, and nothing of it elsewhere."""
    elsewhere = [shimhost.LAUNCHER, shimhost.COMMAND, shimhost.HOOK, shimhost.PODMAN]
    installed = shimhost.ENTRY.exists()
    for path in elsewhere:
        path.unlink(missing_ok=True)
    BIN.mkdir(parents=True)
    for name, module in MODULES.items():
        text = f"#!{sys.executable}\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
        (BIN / name).write_text(text)
        (BIN / name).chmod(0o755)
    gpuhost.install(SRC / "softgpu" / "build", GPUS_CONF)
    shutil.copy(SRC / "softgpu" / "build" / "bin" / "gpuwork", GPUWORK)
    yield
    shutil.rmtree(BIN.parent)
    if installed:
        shimhost.install(SRC)


@pytest.fixture(autouse=True)
def clean(environment: None) -> Iterator[dict[str, str]]:
    """What the host's folders hold before; after the test there are no containers, and it is uninstalled."""
    before = listing()
    yield before
    for name in containers_left():
        run("podman", "rm", "--force", "--time", "0", name)
    run(GPUSNAP, "uninstall", "--force")


def listing() -> dict[str, str]:
    """Every file and folder where an installation may leave something, with mode, size and target."""
    found = {}
    # Those of Podman and containerd themselves, and caches, come with use.
    passed_over = ("/var/lib/containers", "/var/lib/containerd")
    for top in ("/etc", "/usr/local", "/usr/libexec", "/opt", "/var/lib"):
        for folder, folders, files in os.walk(top):
            paths = {name: os.path.join(folder, name) for name in folders}
            folders[:] = [n for n, p in paths.items() if n != "__pycache__" and p not in passed_over]
            for name in (*folders, *files):
                path = os.path.join(folder, name)
                status = os.lstat(path)
                target = os.readlink(path) if os.path.islink(path) else ""
                size = 0 if os.path.isdir(path) else status.st_size
                found[path] = f"{status.st_mode:o} {size} {target}"
    return found


def test_podman(clean: dict[str, str], tmp_path: Path) -> None:
    """Install, run, checkpoint, restore, uninstall: and the host is as it was."""
    found = json.loads(good(run(GPUSNAP, "install", "--podman", "--json")))
    assert found["program"] == str(BIN / "gpusnap-runtime")
    assert "unchanged" in good(run(GPUSNAP, "install", "--podman"))
    container = Container.start("installed")
    assert container.inspect()["OCIRuntime"] == "gpusnap-runtime"
    good(container.checkpoint(tmp_path / "a.tar.zst"))
    container.remove()
    container = Container.restore("installed", tmp_path / "a.tar.zst")
    container.goes_on()
    # As long as there is a container whose commands go to it, stopped or not, it stays.
    assert "gpusnap-runtime as their runtime: installed" in sentence(run(GPUSNAP, "uninstall"))
    assert PODMAN.exists()
    good(podman("stop", "--time", "0", "installed"))
    assert "runtime: installed" in sentence(run(GPUSNAP, "uninstall"))
    container.remove()
    good(run(GPUSNAP, "uninstall"))
    assert listing() == clean
    assert "not found" in podman("info").err


def test_default_and_hooks(clean: dict[str, str]) -> None:
    """Without --runtime, too, whatever containers.conf has; Podman still knows its own runtimes."""
    good(run(GPUSNAP, "install", "--podman", "--default", "--hooks"))
    assert good(run("podman", "info", "--format", "{{.Host.OCIRuntime.Name}}")) == "gpusnap-runtime"
    good(
        run(
            "podman",
            "run",
            "-d",
            "--name",
            "plain",
            "--device",
            "nvidia.com/gpu=0",
            "localhost/base",
            "sleep",
            "60",
        )
    )
    (found,) = json.loads(good(run("podman", "inspect", "plain")))
    assert found["OCIRuntime"] == "gpusnap-runtime"
    assert Path("/run/gpusnap/containers", found["Id"], "gpus.json").exists()
    good(run("podman", "rm", "--force", "--time", "0", "plain"))
    good(run("podman", "--runtime", "crun", "run", "--rm", "localhost/base", "true"))
    good(run(GPUSNAP, "uninstall"))
    assert listing() == clean
    assert good(run("podman", "info", "--format", "{{.Host.OCIRuntime.Name}}")) == "crun"


def taken() -> str:
    """containerd's configuration as it reads it; 2.x prints it in single quotes."""
    return good(run("containerd", "config", "dump")).replace("'", '"')


def test_containerd(clean: dict[str, str]) -> None:
    """What containerd makes of it: our handler beside its own, and nobody's settings lost."""
    debian = CONTAINERD.read_text()
    found = json.loads(good(run(GPUSNAP, "install", "--containerd", "--json")))
    assert CONTAINERD.read_text() == debian
    (note,) = [each for each in found["notes"] if "cat " in each]
    good(run("sh", "-ec", note.rpartition(": ")[2]))
    dump = taken()
    assert f'BinaryName = "{BIN}/gpusnap-runtime"' in dump
    assert 'bin_dir = "/usr/lib/cni"' in dump or 'bin_dirs = ["/usr/lib/cni"]' in dump
    assert "containerd.runtimes.runc]" in dump
    assert f"{CONTAINERD}:16: BinaryName" in sentence(run(GPUSNAP, "uninstall"))
    CONTAINERD.write_text(debian)
    good(run(GPUSNAP, "uninstall"))
    assert listing() == clean
    # Without a file of the host's there is one of ours, which containerd takes as it is.
    CONTAINERD.unlink()
    try:
        good(run(GPUSNAP, "install", "--containerd"))
        dump = taken()
        assert "containerd.runtimes.gpusnap]" in dump
        assert "containerd.runtimes.runc]" in dump
        good(run(GPUSNAP, "uninstall"))
        assert not CONTAINERD.exists()
    finally:
        CONTAINERD.write_text(debian)
    assert listing() == clean
