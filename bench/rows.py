"""The rows of bench/checkpoint.py: what each of them does, and how it is measured."""

from __future__ import annotations

import glob
import json
import os
import shutil
import signal
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shimhost
from bare import SIDES, Bare
from figures import PLAIN, Case, Line, Run, Steady, scaled_stock
from hosts import NAME, BenchError, Place, Work, command
from support import STORAGE, podman

from gpusnap.runtime_shim.base.errors import SettingsError
from gpusnap.runtime_shim.gpu import estimate_used
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.settings import Settings, load
from gpusnap.runtime_shim.snapshot.restore import TIMING

__all__ = ["ROWS", "Bench", "LeftOut", "Plan", "check_settings", "steady"]

SHIM = "gpusnap-runtime"
# Chunks are kept on the file system of the images, in a folder of our own: this host's are none of ours.
KEEPING = STORAGE.parent / f"{NAME}-kept"
# Lines of gpusnap.toml. With the last ones a checkpoint writes only what the container's last one has not.
IN_CRIU = ('memory.pages = "criu"', "memory.keep = false")
IN_CHUNKS = ('memory.pages = "chunks"', "memory.keep = false")
KEPT = ('memory.pages = "chunks"', "memory.keep = true")
_PLUGIN = ("/usr/lib/criu", "/usr/lib/*/criu", "/usr/libexec/criu", "/usr/local/lib/criu")
_LEAD = 0.5  # seconds before a command in which the ticks are the usual ones


class LeftOut(Exception):
    """A row makes no sense here; the message says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of the whole run."""

    runtime: str
    """The real runtime: crun, runc."""
    settings: tuple[str, ...]
    """Lines of gpusnap.toml for every row."""
    folder: Path
    """The folder for archives; its content is removed at the end of the run."""
    pair_seconds: float
    """Seconds for which each half of a steady-state pair is watched."""
    pairs: int = 3


def check_settings(lines: Sequence[str]) -> Settings:
    """The settings that gpusnap reads from these lines. Raises SettingsError, of "the settings"."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        try:
            return load(file.name)
        except SettingsError as error:
            words = str(error).replace(f"the settings file {file.name}", "the settings")
            raise SettingsError(words.replace(file.name, "the settings"), hint=error.hint) from None


@dataclass
class Bench:
    """One case in progress: its container is started once, by the first row that needs it."""

    place: Place
    plan: Plan
    driver: Driver
    run: Run
    work: Work | None = None
    _runtime: str = field(default=SHIM, init=False)

    @property
    def case(self) -> Case:
        return self.run.case

    @property
    def archive(self) -> Path:
        return self.plan.folder / "checkpoint.tar"

    def settings(self, *lines: str) -> None:
        """Write these settings. Raises SettingsError if gpusnap would refuse them."""
        own = [f'runtime = "{self.plan.runtime}"', f'memory.keep-folder = "{KEEPING}"']
        if self.case.procs > 1 and not self.place.software:
            own.append("nvidia.allow-nccl = true")  # PyTorch loads it, and these processes never use it
        text = [*own, *lines, *self.plan.settings]
        check_settings(text)
        shimhost.write_settings("\n".join(text) + "\n")

    def container(self, runtime: str = SHIM) -> Work:
        """Return the workload's container, running under that runtime."""
        if self.work is not None and self._runtime != runtime:
            self.drop()
        if self.work is None:
            self._runtime = runtime
            words = self.place.block(self.case)
            self.work = self.place.start(words, runtime=runtime, workers=self.case.procs)
        return self.work

    def drop(self) -> None:
        """Remove the container, its archive and its kept chunks, half-made ones too."""
        podman("rm", "--force", "--ignore", "--time", "0", NAME)
        self.archive.unlink(missing_ok=True)
        shutil.rmtree(KEEPING, ignore_errors=True)
        self.work = None


def driver(bench: Bench) -> list[Line]:
    """Suspend and resume by the driver's calls, in no container: plainly, populated, staged; medians of 3."""
    bench.driver.open()
    with bench.place.bare(bench.case, bench.plan.folder) as log:
        pids = list(log.stamps())
        # PIDs as the programs say them are ours: there is no container.
        used = estimate_used(bench.driver.memory_used(pids), bench.driver.host())
        bare = Bare(
            driver=bench.driver,
            pids=pids,
            gpu_bytes=sum(sum(of.values()) for of in used.values()) or bench.case.size,
            name=NAME,
            folder=bench.plan.folder,
            memory=check_settings(bench.plan.settings).memory,
        )
        return bare.rows(lambda: log.wait(bench.case.procs, since=time.time()))


def export_and_import(bench: Bench, row: str, runtime: str = SHIM) -> list[Line]:
    """Export, remove and import the container; the import reads an archive that was just written."""
    work = bench.container(runtime)
    try:
        checkpoint = _checkpoint(bench, work, row, runtime, "--export", bench.archive, "--compress", "none")
        _read_archive(checkpoint, bench.archive)
        work.remove()
        return [checkpoint, _restore(bench, work, row, runtime, checkpoint.gpu_bytes)]
    finally:
        bench.archive.unlink(missing_ok=True)


def _checkpoint(
    bench: Bench, work: Work, row: str, runtime: str, *words: str | os.PathLike[str], what: str = "checkpoint"
) -> Line:
    options = ["--runtime", runtime, "container", "checkpoint", "--print-stats"]
    took, said = command("podman", *options, *words, work.name)
    found = Line(row, what, "checkpoint", took, bench.case.size)
    found.runtime = json.loads(said)["container_statistics"][0]["runtime_checkpoint_duration"] / 1e6
    return found


def _restore(bench: Bench, work: Work, row: str, runtime: str, gpu_bytes: int) -> Line:
    options = ["--runtime", runtime, "container", "restore", "--print-stats"]
    begun = time.time()
    took, said = command("podman", *options, "--import", bench.archive)
    one = json.loads(said)["container_statistics"][0]
    found = Line(row, "restore", "restore", took, gpu_bytes)
    found.runtime = one["runtime_restore_duration"] / 1e6
    if runtime == SHIM:
        found.stages |= restore_steps(work.static / TIMING)
    found.stages["CRIU"] = one["criu_statistics"]["restore_time"] / 1e6
    work.log_file.wait(work.workers, since=begun + took)
    # Since it was removed, there has been no other tick.
    first = min(stamps[0].at for stamps in work.log_file.stamps(begun).values())
    found.stages["until the next tick"] = first - begun
    return found


def restore_steps(path: Path) -> dict[str, float]:
    """Seconds of each step of a restore, from the file that the runtime leaves. Raises BenchError."""
    try:
        steps = json.loads(path.read_text())["timing"]
    except (OSError, ValueError) as error:
        raise BenchError(f"the steps of the restore are not in {path}: {error}") from error
    return _steps(steps)


def _steps(timing: Sequence[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for step in timing:
        found[step["step"]] = found.get(step["step"], 0.0) + step["seconds"]
    return found


def _read_archive(line: Line, archive: Path) -> None:
    """Return the archive's figures about the checkpoint: its manifest, and the sizes of its parts."""
    line.image = archive.stat().st_size
    blobs = pages = 0
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if name == "checkpoint/gpusnap/manifest.json":
                file = tar.extractfile(member)
                assert file is not None
                _of_manifest(line, json.load(file))
            elif name.startswith("checkpoint/gpusnap/"):
                blobs += member.size
            elif name.startswith("checkpoint/pages-"):
                pages += member.size
    line.written = blobs if line.note == "chunks" else pages
    line.note = ""


def _of_manifest(line: Line, record: dict[str, Any]) -> None:
    line.stages |= _steps(record["timing"])
    line.gpu_bytes = sum(gpu["memoryUsed"] for gpu in record["gpus"]) or line.gpu_bytes
    line.peak = record.get("peakMemory")
    line.note = record["pages"]


def with_criu(bench: Bench) -> list[Line]:
    """The GPU's memory in CRIU's own images."""
    bench.settings(*IN_CRIU)
    return export_and_import(bench, "export-criu")


def with_chunks(bench: Bench) -> list[Line]:
    """The GPU's memory beside them, in chunks."""
    bench.settings(*IN_CHUNKS)
    return export_and_import(bench, "export-chunks")


def stock(bench: Bench) -> list[Line]:
    """CRIU's CUDA plugin and cuda-checkpoint where they are installed; else what they would take, scaled."""
    if bench.place.software:
        raise LeftOut("the stock tools need NVIDIA's driver, and softgpu's time says nothing of theirs")
    if shutil.which("cuda-checkpoint") and any(glob.glob(f"{place}/cuda_plugin.so") for place in _PLUGIN):
        try:
            return export_and_import(bench, "stock", bench.plan.runtime)
        finally:
            bench.drop()
    plain = {side: bench.run.find(PLAIN, side) for side in SIDES}
    if any(line is None for line in plain.values()):
        raise LeftOut(
            "cuda-checkpoint or CRIU's cuda_plugin.so is not installed, and without the row driver there is "
            "nothing to scale by"
        )
    return [scaled_stock(side, line) for side, line in plain.items() if line is not None]


def pause(bench: Bench) -> list[Line]:
    """A checkpoint with --leave-running, in chunks: for how long the workload was stopped."""
    bench.settings(*IN_CHUNKS)
    return [_checkpoint_running(bench, "pause", "checkpoint")]


def again(bench: Bench) -> list[Line]:
    """Three with --leave-running, chunks kept: the first, one of the same bytes, one with 5 % others."""
    bench.settings(*KEPT)
    found = [_checkpoint_running(bench, "again", "first"), _checkpoint_running(bench, "again", "unchanged")]
    work = bench.container()
    begun = time.time()
    for process in containers.processes(work.pid, work.id):
        if bench.driver.state(process.pid) is not None:
            os.kill(process.pid, signal.SIGUSR1)
    work.log_file.wait(work.workers, since=begun, changes=1)
    return [*found, _checkpoint_running(bench, "again", "5 % changed")]


def _checkpoint_running(bench: Bench, row: str, what: str) -> Line:
    """One checkpoint that leaves the container running, without an archive."""
    work = bench.container()
    image = work.image_path
    # As Podman does once it has packed an image; the next checkpoint would find these blobs.
    shutil.rmtree(image, ignore_errors=True)
    begun = time.time()
    work.log_file.wait(work.workers, since=begun - _LEAD, ticks=5)
    line = _checkpoint(bench, work, row, SHIM, "--leave-running", what=what)
    work.log_file.wait(work.workers, since=time.time())
    line.pause = work.log_file.pause(begun - _LEAD)
    _of_manifest(line, json.loads((image / "gpusnap/manifest.json").read_text()))
    line.note = ""
    files = [path.stat() for path in image.rglob("*") if path.is_file()]
    line.image = sum(file.st_size for file in files)
    blobs = [path.stat() for path in (image / "gpusnap").rglob("*") if path.name != "manifest.json"]
    # Those that an earlier checkpoint wrote keep their time.
    line.written = sum(blob.st_size for blob in blobs if blob.st_mtime >= begun)
    return line


def steady(bench: Bench) -> Steady:
    """Ticks per second of a workload that nobody checkpoints, under the plain runtime and ours in turn."""
    bench.drop()
    pairs = []
    for number in range(bench.plan.pairs):
        order = (bench.plan.runtime, SHIM)
        rates = {name: _rate(bench, name) for name in (order if number % 2 else order[::-1])}
        pairs.append((rates[bench.plan.runtime], rates[SHIM]))
    return Steady(tuple(pairs))


def _rate(bench: Bench, runtime: str) -> float:
    try:
        work = bench.place.start(bench.place.training(), runtime=runtime)
        since = time.time()
        end = time.monotonic() + bench.plan.pair_seconds
        while time.monotonic() < end and proc.is_running(work.pid):
            time.sleep(min(0.2, bench.plan.pair_seconds))
        (stamps,) = work.log_file.stamps(since).values()
        return (stamps[-1].tick - stamps[0].tick) / (stamps[-1].at - stamps[0].at)
    except ValueError as error:
        raise BenchError(f"under {runtime} the workload did not tick: {error}") from error
    finally:
        bench.drop()


ROWS: dict[str, Callable[[Bench], list[Line]]] = {
    "driver": driver,
    "stock": stock,
    "export-criu": with_criu,
    "export-chunks": with_chunks,
    "pause": pause,
    "again": again,
}
"""The rows that are measured for each case, in this order; names for --only, beside floor and steady."""
