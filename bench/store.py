"""The store: the cost of its stages, the time of ten checkpoints, and whole commands beside Podman's.

    python3 bench/store.py --json store.json [--only stages,ten,whole] [--gib 12] [--mib 1024] [--folder DIR]

stages   a file of --mib is cut into chunks, hashed, compressed, written and read back, and the same data goes
         through `cp`, `sha256sum` and `zstd -T0`. MiB per second of processor time (one core), and per second
         of the clock.
ten      a container whose workload changes 5 % of its GPU memory between ten checkpoints that leave it
         running: the size of the store after each, and the bytes that each push sends to a registry on this
         machine (docker-registry), if that is installed.
whole    `gpusnap checkpoint --to oci:DIR` and `gpusnap restore`; `podman container checkpoint --export`,
         with its default compression, and `--import`, both with GPU memory in CRIU's images: restores from a
         cold page cache, then from a warm one. All in one run; compare only within it.

`ten` and `whole` need root, Podman, CRIU and a GPU; or the test host, where they run on softgpu. The exit
code is 1 if a part failed; the others are still measured.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "bench"), str(CHECKOUT / "tests" / "host")]
sys.path[:0] = [str(CHECKOUT / "tests" / "gpu"), str(CHECKOUT / "tests" / "integration")]

import shimhost  # noqa: E402
from chunks import KINDS, prose, weights  # noqa: E402
from figures import Case  # noqa: E402
from hosts import NAME, BenchError, Place, Work, command, place  # noqa: E402
from podman_gpu import circumstances  # noqa: E402
from registryhost import running  # noqa: E402
from rows import SHIM  # noqa: E402
from support import STORAGE, podman  # noqa: E402

from gpusnap.oci.chunks.buffers import File, Memory, is_zero  # noqa: E402
from gpusnap.oci.chunks.reader import read  # noqa: E402
from gpusnap.oci.chunks.table import Table  # noqa: E402
from gpusnap.oci.chunks.writer import write  # noqa: E402
from gpusnap.oci.layout.digests import digest_of  # noqa: E402
from gpusnap.oci.layout.layout import Layout  # noqa: E402
from gpusnap.runtime_shim.base.errors import GpusnapError  # noqa: E402
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia  # noqa: E402
from gpusnap.runtime_shim.runtime import container as containers  # noqa: E402

MIB, GIB = 1 << 20, 1 << 30
CHUNK = 16 * MIB
GPUSNAP = "/usr/local/bin/gpusnap"
STORE = STORAGE.parent / f"{NAME}-store"
PARTS = ["stages", "ten", "whole"]
CONTENTS = {"random": os.urandom, "zero": bytes, "bf16": weights, "text": prose}
CHECKPOINTS = 10
# GiB; with less there are smaller chunks, so that 5 % of them are some.
SMALL = 4
_IN_CRIU = 'runtime = "{}"\nmemory.pages = "criu"\nmemory.keep = false\n'


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage, or one tool, on some data."""

    name: str
    data: str
    seconds: float
    cpu: float
    """Seconds of processor time, this process's and its children's."""
    mib_per_core: float
    """MiB for each second of that."""
    mib_per_second: float


def time_stage(name: str, data: str, size: int, action: Callable[[], object]) -> Stage:
    """Do it once, and see what it took."""

    def spent() -> float:
        who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        found = [resource.getrusage(each) for each in who]
        return sum(each.ru_utime + each.ru_stime for each in found)

    cpu, clock = spent(), time.perf_counter()
    action()
    seconds, used = time.perf_counter() - clock, max(spent() - cpu, 1e-6)
    return Stage(name, data, seconds, used, size / MIB / used, size / MIB / seconds)


def stages(kind: str, mib: int, folder: Path, threads: int) -> Iterator[Stage]:
    """Every stage of a checkpoint's way into a store and out of it, and the tools on the same data."""
    size = mib * MIB
    path = folder / "data"
    with open(path, "wb") as file:
        for _ in range(size // CHUNK):
            file.write(CONTENTS[kind](CHUNK))
    piece = Memory(CHUNK)
    with open(path, "rb", buffering=0) as data:
        source = File(data.fileno(), size)

        def each(do: Callable[[memoryview], object]) -> None:
            for offset in range(0, size, CHUNK):
                source.read(offset, piece.view)
                do(piece.view)

        yield time_stage("read", kind, size, lambda: each(lambda view: None))
        yield time_stage("read, look for zeros", kind, size, lambda: each(is_zero))
        yield time_stage("read, sha256", kind, size, lambda: each(digest_of))
        for workers in (1, threads):
            yield from in_chunks(kind, source, folder, workers)
    tools = {
        "cp": ["cp", str(path), str(folder / "copy")],
        "sha256sum": ["sha256sum", str(path)],
        "zstd -1 -T0": ["zstd", "-q", "-f", "-1", "-T0", str(path), "-o", str(folder / "copy")],
        "zstd -3 -T0": ["zstd", "-q", "-f", "-3", "-T0", str(path), "-o", str(folder / "copy")],
    }
    for name, words in tools.items():
        if shutil.which(words[0]):
            yield time_stage(name, kind, size, lambda words=words: command(*words))  # type: ignore[misc]
    for name in ("copy", "back"):
        (folder / name).unlink(missing_ok=True)


def in_chunks(kind: str, source: File, folder: Path, workers: int) -> Iterator[Stage]:
    """The pipelines, written and read back."""
    layout = Layout(folder / "layout").create()
    tables: list[Table] = []
    name = f"{workers} thread{'s' * (workers > 1)}"

    def put() -> None:
        tables.extend(write([source], layout, threads=workers, ceiling=4 * GIB, chunk_size=CHUNK))

    def get() -> None:
        with open(folder / "back", "wb", buffering=0) as back:
            os.ftruncate(back.fileno(), source.size)
            target = File(back.fileno(), source.size)
            read(tables, layout, [target], threads=workers, ceiling=4 * GIB)

    yield time_stage(f"chunks written, {name}", kind, source.size, put)
    yield time_stage(f"chunks read, {name}", kind, source.size, get)
    if (folder / "back").read_bytes() != (folder / "data").read_bytes():
        raise BenchError("what was read is not what was written")
    shutil.rmtree(layout.path)


def start(here: Place, case: Case, runtime: str = SHIM) -> Work:
    """The workload, running."""
    return here.start(here.block(case), runtime=runtime, workers=case.procs)


def change(work: Work) -> None:
    """Have each worker change 5 % of its GPU memory."""
    driver, begun = Nvidia(), time.time()
    driver.open()
    for process in containers.processes(work.pid, work.id):
        if driver.state(process.pid) is not None:
            os.kill(process.pid, signal.SIGUSR1)
    work.log_file.wait(work.workers, since=begun, changes=1)


def measure_store() -> int:
    """Bytes of all blobs of the store."""
    return sum(path.stat().st_size for path in (STORE / "blobs" / "sha256").iterdir())


@contextmanager
def empty_store() -> Iterator[None]:
    """No container and no store of ours, before and after."""
    _remove_all()
    try:
        yield
    finally:
        _remove_all()


def _remove_all() -> None:
    podman("rm", "--force", "--ignore", "--time", "0", NAME)
    shutil.rmtree(STORE, ignore_errors=True)


def write_settings(case: Case, runtime: str, lines: Sequence[str]) -> None:
    """Put the settings in place."""
    small = ['memory.chunk-size = "1M"'] if case.gib < SMALL else []
    shimhost.write_settings("\n".join([f'runtime = "{runtime}"', *small, *lines]) + "\n")


def ten(here: Place, case: Case, runtime: str, lines: Sequence[str]) -> dict[str, Any]:
    """Ten checkpoints of a container that runs on, 5 % changed between them; and a push of each."""
    write_settings(case, runtime, lines)
    rows: list[dict[str, Any]] = []
    with empty_store(), ExitStack() as stack:
        registry = stack.enter_context(running()) if shutil.which("docker-registry") else None
        work = start(here, case)
        for number in range(1, CHECKPOINTS + 1):
            if number > 1:
                change(work)
            name = f"bench:{number}"
            options = ["--leave-running", "--to", f"oci:{STORE}:{name}", "--json"]
            seconds, _ = command(GPUSNAP, "checkpoint", *options, NAME)
            row: dict[str, Any] = {"checkpoint": number, "seconds": seconds, "stored": measure_store()}
            if registry is not None:
                words = [f"oci:{STORE}:{name}", f"{registry.host}/bench:{number}"]
                row["push_seconds"], said = command(GPUSNAP, "push", "--plain-http", "--json", *words)
                row["pushed"] = json.loads(said)["bytes"]
            rows.append(row)
    one = rows[0]["stored"]
    return {"rows": rows, "ratio": rows[-1]["stored"] / one}


def cold(*paths: Path) -> None:
    """Have files out of the page cache; they are on disk by then."""
    for path in paths:
        for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def whole(here: Place, case: Case, runtime: str, folder: Path, lines: Sequence[str]) -> dict[str, Any]:
    """One checkpoint and two restores each way; the workload checks every word in between."""
    rows: list[dict[str, Any]] = []

    def restore_and_wait(way: str, cache: str, work: Work, *words: str) -> None:
        begun = time.time()
        seconds, _ = command(*words)
        work.log_file.wait(work.workers, since=begun + seconds)
        rows.append({"way": way, "what": "restore", "cache": cache, "seconds": seconds})
        work.remove()

    with empty_store():
        archive = folder / "checkpoint.tar.zst"
        shimhost.write_settings(_IN_CRIU.format(runtime))
        work = start(here, case)
        export = ["podman", "--runtime", SHIM, "container", "checkpoint", "--export", str(archive), NAME]
        seconds, _ = command(*export)
        rows.append(
            {"way": "podman", "what": "checkpoint", "seconds": seconds, "bytes": archive.stat().st_size}
        )
        work.remove()
        import_ = ["podman", "--runtime", SHIM, "container", "restore", "--import", str(archive)]
        cold(archive)
        restore_and_wait("podman", "cold", work, *import_)
        restore_and_wait("podman", "warm", work, *import_)
        archive.unlink()
        write_settings(case, runtime, lines)
        work = start(here, case)
        target = f"oci:{STORE}:bench"
        seconds, said = command(GPUSNAP, "checkpoint", "--to", target, "--json", NAME)
        rows.append({"way": "gpusnap", "what": "checkpoint", "seconds": seconds, "bytes": measure_store()})
        rows[-1]["said"] = json.loads(said)
        work.remove()
        cold(STORE)
        restore_and_wait("gpusnap", "cold", work, GPUSNAP, "restore", target)
        restore_and_wait("gpusnap", "warm", work, GPUSNAP, "restore", target)
    return {"rows": rows, "ratios": _against(rows)}


def _against(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Podman's time divided by ours, for each operation."""
    by = {(row["way"], row["what"], row.get("cache", "")): row["seconds"] for row in rows}
    return {
        " ".join(filter(None, key[1:])): by["podman", *key[1:]] / seconds
        for key, seconds in by.items()
        if key[0] == "gpusnap"
    }


def show(found: dict[str, Any]) -> None:
    """The figures as tables for people."""
    if "stages" in found:
        print(f"| {'stage':28} | {'data':7} | MiB/s per core | MiB/s |\n|---|---|---:|---:|")
        for row in found["stages"]:
            rates = f"{row['mib_per_core']:8.0f} | {row['mib_per_second']:8.0f}"
            print(f"| {row['name']:28} | {row['data']:7} | {rates} |")
    if "rows" in found.get("ten", {}):
        print(
            "\n| checkpoint | seconds | store, MiB | of the first | pushed, MiB |\n|---:|---:|---:|---:|---:|"
        )
        first = found["ten"]["rows"][0]["stored"]
        for row in found["ten"]["rows"]:
            pushed = f"{row['pushed'] / MIB:.1f}" if "pushed" in row else ""
            print(
                f"| {row['checkpoint']} | {row['seconds']:.2f} | {row['stored'] / MIB:.1f} | "
                f"{row['stored'] / first:.2f} | {pushed} |"
            )
    if "rows" in found.get("whole", {}):
        print("\n| way | what | seconds | GiB |\n|---|---|---:|---:|")
        for row in found["whole"]["rows"]:
            size = f"{row['bytes'] / GIB:.2f}" if "bytes" in row else ""
            what = " ".join(filter(None, (row["what"], row.get("cache", ""))))
            print(f"| {row['way']} | {what} | {row['seconds']:.2f} | {size} |")
        words = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found["whole"]["ratios"].items())
        print(f"podman ÷ gpusnap: {words}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The store of checkpoints: stages, ten checkpoints, whole commands."
    )
    parser.add_argument("--only", default=",".join(PARTS), help="stages,ten,whole")
    parser.add_argument("--gib", type=float, default=12.0, help="on the GPU, for ten and whole (12)")
    parser.add_argument("--mib", type=int, default=1024, help="of each kind of data, for stages (1024)")
    parser.add_argument("--data", default="random", choices=["random", "bf16"], help="on the GPU (random)")
    parser.add_argument("--runtime", default="crun", choices=["crun", "runc"])
    parser.add_argument("--settings", action="append", default=[], help="a line of gpusnap.toml, for gpusnap")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="for files")
    parser.add_argument("--json", help="write the figures there too")
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := [name for name in options.only if name not in PARTS]:
        parser.error(f"--only: {', '.join(unknown)}: there are {', '.join(PARTS)}")
    if options.mib < 16 or options.mib % 16:
        parser.error("--mib: a multiple of 16")
    return options


def main() -> int:
    options = arguments()
    found: dict[str, Any] = {}
    failed = False
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="gpusnap-") as name:
        folder = Path(name)
        if "stages" in options.only:
            threads = os.cpu_count() or 1
            every = [stage for kind in KINDS for stage in stages(kind, options.mib, folder, threads)]
            found["stages"] = [asdict(stage) for stage in every]
        if {"ten", "whole"} & {*options.only}:
            software = os.environ.get("GPUSNAP_TESTHOST") == "1"
            case = Case(options.gib, options.data, 1)
            with ExitStack() as stack:
                try:
                    minor = None if software else Nvidia().host().gpus[0].minor
                    here = stack.enter_context(place(minor))
                    found["about"] = {**circumstances(Nvidia().host(), options.runtime), "software": software}
                except GpusnapError as error:
                    print(f"store: {error.sentence()}", file=sys.stderr)
                    return 1
                for part in ("ten", "whole"):
                    if part in options.only:
                        try:
                            if part == "ten":
                                found[part] = ten(here, case, options.runtime, options.settings)
                            else:
                                found[part] = whole(here, case, options.runtime, folder, options.settings)
                        except (BenchError, GpusnapError, AssertionError, OSError) as error:
                            failed = True
                            print(f"store: {part}: {error}", file=sys.stderr)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    show(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
