"""The driver restores while memory still comes from a registry that answers when it is told to."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import registryhost
import shimhost
import waiting
from gated_proxy import GatedProxy
from support import DEADLINE, Container, faults, good, manifest, podman, run, sentence, until

from gpusnap.oci.chunks.table import Table, from_json
from gpusnap.oci.layout.reference import Reference
from gpusnap.oci.registry.client import Client
from gpusnap.oci.registry.copy import push
from gpusnap.oci.registry.repository import Repository
from gpusnap.oci.store.store import Store

COMMAND = "/usr/local/bin/gpusnap"
STORE = Path("/var/lib/gpusnap-test")
JOURNAL = Path("/run/gpusnap/journal")
# A worker of `gpuwork --procs` is a program by the name of /proc/self/exe.
WORK = ("gpuwork", "exe")
MEMORY = '[memory]\npages = "store"\nchunk-size = "1M"\n'


@dataclass
class Checkpoint:
    """A checkpoint whose chunks are in a registry alone."""

    archive: Path
    proxy: GatedProxy
    registry: registryhost.Registry
    tables: list[Table]
    """Of its regions."""

    def waits(self, engine: subprocess.Popen[str], count: int = 1) -> list[int]:
        """Wait until the driver's threads of so many processes wait for what is held back; their PIDs."""

        def stuck() -> bool:
            return len(in_fault()) >= count and self.proxy.idle

        until(lambda: stuck() or engine.poll() is not None, "a wait for a page")
        assert engine.poll() is None, failed(engine)
        return in_fault()

    def middle(self, at: int = 0) -> str:
        """A blob from the middle of a region, and of no other place."""
        chunks = self.tables[at].chunks
        everywhere = [chunk.blob for table in self.tables for chunk in table.chunks]
        single = [chunk.blob for chunk in chunks if everywhere.count(chunk.blob) == 1]
        return single[len(single) // 2]

    def spoil(self, digest: str) -> None:
        """Have the registry hold something else by that digest."""
        (path,) = self.registry.data.rglob(f"sha256/*/{digest.removeprefix('sha256:')}/data")
        path.write_bytes(bytes(path.stat().st_size))


@contextmanager
def far_away(write: shimhost.Writer, folder: Path, *words: str, workers: int = 1) -> Iterator[Checkpoint]:
    """A checkpoint of a container, pushed to a registry; the store is empty by then."""
    store = f'[store]\npath = "{STORE}"\n'
    shutil.rmtree(STORE, ignore_errors=True)
    archive = folder / "w.tar"
    with registryhost.running() as registry, GatedProxy(registry.host) as proxy:
        write(f"{MEMORY}{store}")
        container = Container.start("w", *words, workers=workers)
        good(container.checkpoint(archive, "--compress", "none"))
        container.remove()
        found = Store(STORE)
        with Repository(
            Reference(registry.host, "team/app"), Client(registry.host, plain_http=True)
        ) as there:
            push(found.entries()[0].descriptor, found.layout, there, tag="v1")
        shutil.rmtree(STORE)
        write(f'{MEMORY}{store}pull-from = ["http://{proxy.host}/team/app"]\n[registry]\ntimeout = 10\n')
        processes = manifest(archive)["processes"]
        tables = [from_json(region) for process in processes for region in process["regions"]]
        try:
            yield Checkpoint(archive, proxy, registry, tables)
        finally:
            proxy.open()
            shutil.rmtree(STORE, ignore_errors=True)


@contextmanager
def restoring(checkpoint: Checkpoint) -> Iterator[subprocess.Popen[str]]:
    """Podman restores; it is not waited for."""
    words = ["podman", "--runtime", "gpusnap-runtime", "container", "restore", "--import"]
    with waiting.Process(
        [*words, checkpoint.archive],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as engine:
        try:
            yield engine
        finally:
            checkpoint.proxy.open()
            engine.kill()


def processes(*names: str) -> list[int]:
    """The processes of these names that are no zombies; by default the workload's, with its workers."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            named = entry.name.isdigit() and (entry / "comm").read_text().strip() in (names or WORK)
            if named and (entry / "stat").read_text().rpartition(") ")[2][0] not in "ZX":
                found.append(int(entry.name))
    return sorted(found)


def in_fault() -> list[int]:
    """The workers of which a thread waits in a page fault."""
    found = []
    for pid in processes():
        with contextlib.suppress(OSError):
            waits = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/wchan")]
            if "handle_userfault" in waits:
                found.append(pid)
    return found


def nothing_left() -> None:
    """No process, nothing staged, nothing on file."""
    until(lambda: not processes(), "the end of every process of the container")
    assert not Path("/run/gpusnap/stage").is_mount()
    until(lambda: not list(JOURNAL.glob("*.restore")), "an empty journal")
    staging = STORE / "staging"
    assert not staging.exists() or not list(staging.iterdir())


def failed(engine: subprocess.Popen[str]) -> str:
    """What Podman said of a restore that failed."""
    _, said = waiting.communicate(engine, DEADLINE)
    assert engine.returncode not in (0, None), said
    return said


def test_the_driver_waits(real: str, settings: shimhost.Writer, tmp_path: Path) -> None:
    """It reads the region while a chunk in the middle is missing, and goes on when that comes."""
    with far_away(settings, tmp_path, "--mib", "16") as checkpoint:
        checkpoint.proxy.close({checkpoint.middle()})
        with restoring(checkpoint) as engine:
            (worker,) = checkpoint.waits(engine)
            (path,) = JOURNAL.glob("*.restore")
            assert '"arriving": true' in path.read_text()
            assert '"stage": "gpus"' in path.read_text()
            # Others are refused meanwhile, and change nothing.
            assert "is still working on container" in run(COMMAND, "recover").err
            assert in_fault() == [worker]
            checkpoint.proxy.open()
            assert waiting.end(engine, DEADLINE) == 0
        Container("w").goes_on()
        assert processes() == [worker]
        assert not Path("/run/gpusnap/stage").is_mount()


def test_several_processes(crun: None, tmp_path: Path) -> None:
    """Each has its regions and waits by itself; who has all of it does not wait for the other's."""
    write = shimhost.Writer('runtime = "crun"\n')
    with far_away(write, tmp_path, "--mib", "12", "--procs", "3", workers=3) as checkpoint:
        checkpoint.proxy.close({checkpoint.middle(at) for at in range(len(checkpoint.tables))})
        with restoring(checkpoint) as engine:
            assert len(checkpoint.waits(engine, 3)) == 3
            checkpoint.proxy.open()
            assert waiting.end(engine, DEADLINE) == 0
        Container("w").goes_on()


def test_a_chunk_that_is_wrong(real: str, settings: shimhost.Writer, tmp_path: Path) -> None:
    """The process ends in its wait, the restore says which chunk it was, and nothing is left."""
    with far_away(settings, tmp_path, "--mib", "16") as checkpoint:
        blob = checkpoint.middle()
        checkpoint.proxy.close({blob})
        with restoring(checkpoint) as engine:
            checkpoint.waits(engine)
            checkpoint.spoil(blob)
            checkpoint.proxy.open()
            said = failed(engine)
        assert blob in said
        assert "GPU memory" in said
        nothing_left()


def test_no_ram_in_the_middle(crun: None, tmp_path: Path) -> None:
    """Somebody else has taken it: the process ends in its wait, and the message names RAM."""
    write = shimhost.Writer('runtime = "crun"\n')
    with far_away(write, tmp_path, "--mib", "16") as checkpoint:
        source = f'[store]\npath = "{STORE}"\npull-from = ["http://{checkpoint.proxy.host}/team/app"]\n'
        write(f"{MEMORY}threads = 1\n{source}")
        checkpoint.proxy.close({checkpoint.middle()})
        with restoring(checkpoint) as engine:
            checkpoint.waits(engine)
            room = os.statvfs("/run/gpusnap/stage")
            used = (room.f_blocks - room.f_bfree) * room.f_frsize
            good(run("mount", "-o", f"remount,size={used}", "/run/gpusnap/stage"))
            checkpoint.proxy.open()
            said = failed(engine)
        assert "there is no RAM left for the GPU memory" in said
        assert "GPS-216" in said
        nothing_left()
        podman("rm", "--force", "--all", "--time", "0")
        good(podman("container", "restore", "--import", checkpoint.archive))
        Container("w").goes_on()


def test_a_registry_that_goes_away(crun: None, tmp_path: Path) -> None:
    """It is tried again for a while, then the restore fails as any other."""
    write = shimhost.Writer('runtime = "crun"\n')
    with far_away(write, tmp_path, "--mib", "16") as checkpoint:
        checkpoint.proxy.close({checkpoint.middle()})
        with restoring(checkpoint) as engine:
            checkpoint.waits(engine)
            checkpoint.proxy.leave()
            said = failed(engine)
        assert "GPU memory" in said
        assert checkpoint.proxy.host in said
        nothing_left()
        checkpoint.proxy.open()
        podman("rm", "--force", "--all", "--time", "0")
        good(podman("container", "restore", "--import", checkpoint.archive))
        Container("w").goes_on()


def test_gpusnap_is_killed(real: str, settings: shimhost.Writer, tmp_path: Path) -> None:
    """The kernel ends the process that waits; `recover` removes the rest, and the next restore works."""
    with far_away(settings, tmp_path, "--mib", "16") as checkpoint:
        checkpoint.proxy.close({checkpoint.middle()})
        with restoring(checkpoint) as engine:
            checkpoint.waits(engine)
            for pid in processes("gpusnap-runtime"):
                os.kill(pid, signal.SIGKILL)
            until(lambda: not processes(), "the end of the process that waited")
            assert waiting.end(engine, DEADLINE) != 0
        run(COMMAND, "recover")
        nothing_left()
        podman("rm", "--force", "--all", "--time", "0")
        good(podman("container", "restore", "--import", checkpoint.archive))
        Container("w").goes_on()


def test_the_other_processes_are_removed(crun: None, tmp_path: Path) -> None:
    """The container's init has no GPU, and runs on when gpusnap is killed: `recover` ends it, too."""
    write = shimhost.Writer('runtime = "crun"\n')
    with far_away(write, tmp_path, "--mib", "12", "--procs", "2", workers=2) as checkpoint:
        checkpoint.proxy.close({checkpoint.middle(0)})
        with restoring(checkpoint) as engine:
            checkpoint.waits(engine)
            for pid in processes("gpusnap-runtime"):
                os.kill(pid, signal.SIGKILL)
            until(lambda: not in_fault(), "the end of the process that waited")
            said = run(COMMAND, "recover")
            assert "running: " not in said.out
            nothing_left()
            waiting.end(engine, DEADLINE)
        podman("rm", "--force", "--all", "--time", "0")


def test_asked_to_stop(crun: None, tmp_path: Path) -> None:
    """SIGTERM does not wait for the registry."""
    write = shimhost.Writer('runtime = "crun"\n')
    with far_away(write, tmp_path, "--mib", "16") as checkpoint:
        checkpoint.proxy.close({checkpoint.middle()})
        with restoring(checkpoint) as engine:
            checkpoint.waits(engine)
            for pid in run("pgrep", "-f", "^/opt/gpusnap/bin/python .*/gpusnap-runtime ").out.split():
                os.kill(int(pid), signal.SIGTERM)
            until(lambda: not processes(), "the end of the process that waited")
            checkpoint.proxy.open()
            said = failed(engine)
        assert "stopped by SIGTERM" in said
        nothing_left()


def test_a_driver_that_fails_in_the_middle(crun: None, tmp_path: Path) -> None:
    """It is asked again, and has all of the memory then."""
    write = shimhost.Writer('runtime = "crun"\n')
    with far_away(write, tmp_path, "--mib", "16") as checkpoint:
        checkpoint.proxy.close({checkpoint.middle()})
        faults("restore result=CUDA_ERROR_INVALID_VALUE count=1")
        with restoring(checkpoint) as engine:
            until(lambda: checkpoint.proxy.waiting and not Path("/run/softgpu/faults").read_text(), "it")
            checkpoint.proxy.open()
            assert waiting.end(engine, DEADLINE) == 0
        Container("w").goes_on()


def test_a_driver_that_waits_for_other_threads(crun: None, tmp_path: Path) -> None:
    """They are let run for it, as without demand paging, and not for the memory that it waits for."""
    write = shimhost.Writer('runtime = "crun"\n')
    with far_away(write, tmp_path, "--mib", "16") as checkpoint:
        checkpoint.proxy.close({checkpoint.middle()})
        faults("restore spin=others count=1")
        with restoring(checkpoint) as engine:
            checkpoint.waits(engine)
            checkpoint.proxy.open()
            assert waiting.end(engine, DEADLINE) == 0
        Container("w").goes_on()


@pytest.mark.parametrize("how", ["no device", "setting"])
def test_without_it(crun: None, tmp_path: Path, how: str) -> None:
    """All of the memory is there before the driver begins, and doctor says why."""
    write = shimhost.Writer('runtime = "crun"\n')
    with far_away(write, tmp_path, "--mib", "16") as checkpoint:
        checkpoint.proxy.close({checkpoint.middle()})
        if how == "no device":
            good(run("mount", "--bind", "/dev/null", "/dev/userfaultfd"))
        else:
            path = Path("/etc/gpusnap/gpusnap.toml")
            path.write_text(path.read_text().replace("[memory]", "[memory]\ndemand-paging = false"))
        try:
            if how == "no device":
                said = run(COMMAND, "doctor").out
                assert "a restore fills all GPU memory before the driver begins" in " ".join(said.split())
            faults("restore result=CUDA_ERROR_INVALID_VALUE")  # it would fail at once
            with restoring(checkpoint) as engine:
                until(lambda: checkpoint.proxy.waiting and processes(), "the restored process")
                (path,) = until(lambda: list(JOURNAL.glob("*.restore")), "the journal")
                until(lambda: '"stage": "gpus"' in path.read_text(), "the last stage")
                assert '"arriving": false' in path.read_text()
                faults("")
                checkpoint.proxy.open()
                assert waiting.end(engine, DEADLINE) == 0
            Container("w").goes_on()
        finally:
            run("umount", "/dev/userfaultfd")


def test_sentence_of_a_missing_chunk(crun: None, tmp_path: Path) -> None:
    """What no registry has is refused before anything is started, as ever."""
    write = shimhost.Writer('runtime = "crun"\n')
    with far_away(write, tmp_path, "--mib", "4") as checkpoint:
        checkpoint.proxy.leave()
        said = sentence(podman("container", "restore", "--import", checkpoint.archive))
        assert "chunks (" in said
        assert "are not in the store" in said
        nothing_left()
