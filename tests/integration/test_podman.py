"""The main job: Podman exports a GPU container, removes it, imports it, and it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import shimhost
from support import Container, good, manifest, podman, run, sentence

# Of two GPUs: one mapping that is large enough to be populated for the driver (populate.LARGE).
WORK = ("--mib", "16")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.tar.zst"


def test_export_and_import_twice_in_a_row(real: str, archive: Path) -> None:
    """Counter and every byte of device memory go on from where they were, and once more after that."""
    container = Container.start("w", *WORK)
    for _ in range(2):
        good(container.checkpoint(archive))
        assert container.inspect()["State"]["Status"] == "exited"
        container.remove()
        container = Container.restore("w", archive)
        container.goes_on()
    ticks = container.ticks()[1]
    assert ticks[0] == 1, "the log does not reach back to the first tick"


def test_leave_running(real: str, archive: Path) -> None:
    """The container runs on beside its checkpoint, and the checkpoint can still be restored."""
    container = Container.start("w", *WORK)
    good(container.checkpoint(archive, "--leave-running"))
    container.goes_on()
    good(container.checkpoint(archive, "--leave-running"))
    container.goes_on()
    seen = container.ticks()[1][-1]
    container.remove()
    again = Container.restore("w", archive)
    assert again.ticks()[1][-1] < seen
    again.goes_on()


@pytest.mark.parametrize("options", [(), ("--leave-running",)], ids=["stop", "leave running"])
def test_in_criu(real: str, settings: shimhost.Writer, archive: Path, options: tuple[str, ...]) -> None:
    """The GPUs' bytes in CRIU's images: it goes on, and its checkpoint comes back whatever the setting is."""
    settings('[memory]\npages = "criu"\n')
    container = Container.start("w", *WORK)
    good(container.checkpoint(archive, *options))
    assert manifest(archive)["pages"] == "criu"
    if options:
        container.goes_on()
    container.remove()
    settings('[memory]\npages = "chunks"\n')
    Container.restore("w", archive).goes_on()


@pytest.mark.parametrize("compress", ["none", "gzip", "zstd"])
def test_compressions(crun: None, archive: Path, compress: str) -> None:
    """Every compression that Podman offers; `gpusnap inspect` reads each."""
    container = Container.start("w", *WORK)
    good(container.checkpoint(archive, "--compress", compress))
    assert manifest(archive)["container"]["id"] == container.id
    container.remove()
    Container.restore("w", archive).goes_on()


def test_restore_under_another_name(real: str, archive: Path) -> None:
    """--name makes a second container of the same checkpoint."""
    container = Container.start("w", *WORK)
    good(container.checkpoint(archive))
    container.remove()
    again = Container.restore("other", archive, "--name", "other")
    again.goes_on()


def test_restore_in_place(real: str) -> None:
    """Without --export the images stay with the stopped container, and it is restored from there, twice."""
    container = Container.start("w", *WORK)
    for _ in range(2):
        good(podman("container", "checkpoint", "w"))
        good(podman("container", "restore", "w"))
        container.goes_on()


def test_keep_and_restore_again(crun: None) -> None:
    """--keep leaves the images; a later checkpoint in the same directory replaces them."""
    container = Container.start("w", *WORK)
    good(podman("container", "checkpoint", "--keep", "w"))
    good(podman("container", "restore", "--keep", "w"))
    container.goes_on()
    assert (container.image_path / "gpusnap" / "manifest.json").exists()
    good(podman("container", "checkpoint", "--keep", "w"))
    good(podman("container", "restore", "w"))
    container.goes_on()


def test_newer_runtimes_and_criu(newer: str, archive: Path) -> None:
    """The next releases of crun, runc and CRIU, which reach CRIU's configuration by other ways."""
    container = Container.start("w", *WORK)
    good(container.checkpoint(archive, "--leave-running"))
    container.goes_on()
    good(container.checkpoint(archive))
    container.remove()
    Container.restore("w", archive).goes_on()


@pytest.mark.parametrize("network", ["bridge", "none"])
def test_tcp_established(newer: str, archive: Path, network: str) -> None:
    """A container with connected TCP sockets, in a network that Podman makes, or the runtime.

    With CRIU 4.2: 4.1 cannot dump any TCP socket on Linux 6.16 and later, where SO_PASSCRED is for Unix
    sockets only.
    """
    off = ["--annotation", "io.gpusnap.criu.tcp-close=false"]
    container = Container.start("w", *WORK, "--tcp", options=["--network", network, *off])
    assert "has a TCP connection to 127.0.0.1:" in sentence(container.checkpoint(archive))
    container.unharmed()
    good(container.checkpoint(archive, "--tcp-established"))
    container.remove()
    Container.restore("w", archive, "--tcp-established").goes_on()


def test_loopback(real: str, archive: Path) -> None:
    """In a network of its own the container reaches 127.0.0.1, as before; runc alone leaves lo down."""
    container = Container.start("w", *WORK, options=["--network", "none"])
    config = container.image_path.parent / "config.json"
    before = json.loads(config.read_text())
    connects = (
        "import socket; a = socket.create_server(('127.0.0.1', 0)); socket.create_connection(a.getsockname())"
    )
    good(run("nsenter", "--net", "--target", str(container.pid), "python3", "-c", connects))
    good(container.checkpoint(archive))
    container.remove()
    restored = Container.restore("w", archive)
    restored.goes_on()
    good(run("nsenter", "--net", "--target", str(restored.pid), "python3", "-c", connects))
    after = json.loads((restored.image_path.parent / "config.json").read_text())
    assert after.get("hooks") == before.get("hooks")  # ours was for the restore alone


@pytest.mark.parametrize("pages", ["criu", "chunks"])
def test_print_stats(real: str, settings: shimhost.Writer, archive: Path, pages: str) -> None:
    """--print-stats gives what it gives for any container: Podman's, the runtime's and CRIU's times."""
    settings(f'[memory]\npages = "{pages}"\n')
    container = Container.start("w", *WORK)
    stats = json.loads(good(container.checkpoint(archive, "--print-stats")))
    one = stats["container_statistics"][0]
    assert one["runtime_checkpoint_duration"] > 0
    assert (one["criu_statistics"]["pages_written"] > 2 * 16 * 256) == (pages == "criu")
    container.remove()
    stats = json.loads(good(podman("container", "restore", "--import", archive, "--print-stats")))
    assert stats["container_statistics"][0]["criu_statistics"]["pages_restored"] > 0


def test_manifest_and_timeline(real: str, archive: Path) -> None:
    """The manifest says which GPUs, processes, versions and times; `gpusnap inspect` shows it to people."""
    container = Container.start("w", *WORK, gpus=["1"])
    good(container.checkpoint(archive))
    record = manifest(archive)
    assert record["version"] == "1.0"
    assert [gpu["minor"] for gpu in record["gpus"]] == [1]
    assert record["gpus"][0]["memoryUsed"] >= 16 << 20
    (process,) = record["processes"]
    assert (process["pid"], process["name"]) == (1, "gpuwork")
    assert process["command"][0] == "/gpuwork"
    assert record["host"]["driver"] == {"vendor": "nvidia", "version": "560.35.03", "cuda": "12.6"}
    assert record["host"]["criu"].startswith("4.")
    assert record["host"]["runtime"]["name"] == real
    steps = [step["step"] for step in record["timing"]]
    assert steps == [
        "inspect",
        "prepare",
        "lock",
        "driver checkpoint",
        "pages",
        "write manifest",
        "write",  # while CRIU dumps, which then waits for it
        "files",  # and holds all processes
        "dump",
        "sync",
    ]
    shown = good(run("/usr/local/bin/gpusnap", "inspect", archive))
    assert "driver checkpoint" in shown
    assert record["gpus"][0]["uuid"] in shown


def test_gpu_not_given_is_not_in_the_manifest(crun: None, archive: Path) -> None:
    """A container that sees two GPUs and uses one: both are recorded, the unused one with no bytes."""
    container = Container.start("w", *WORK, "--gpus", "0")
    good(container.checkpoint(archive))
    (process,) = manifest(archive)["processes"]
    used = [gpu["memoryUsed"] for gpu in process["gpus"]]
    assert len(used) == 2
    assert used[0] >= 16 << 20
    assert used[1] == 0
    container.remove()
    Container.restore("w", archive).goes_on()
