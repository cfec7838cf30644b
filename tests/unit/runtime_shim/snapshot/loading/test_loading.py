"""The memory of a checkpoint that a load process begins to load, and gpusnap-runtime uses."""

from __future__ import annotations

import errno
import gc
import io
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fakes import a_manifest, evict, wait_for

from gpusnap.oci.base.errors import OciError
from gpusnap.oci.chunks.buffers import Buffer
from gpusnap.oci.chunks.reader import Reader
from gpusnap.oci.chunks.table import Chunk, Table
from gpusnap.oci.chunks.writer import write
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, Interrupted, Refused
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.records.manifest import FileRecord, Manifest, RegionRecord
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.loading import board as boards
from gpusnap.runtime_shim.snapshot.loading import join as module
from gpusnap.runtime_shim.snapshot.loading import load_process, start
from gpusnap.runtime_shim.snapshot.loading.board import VARIABLE, Board, Facts, State
from gpusnap.runtime_shim.snapshot.loading.join import JoinedImages, JoinedMemory, JoinedProcess, join
from gpusnap.runtime_shim.snapshot.loading.load_process import Loader
from gpusnap.runtime_shim.snapshot.loading.source import ImageRebuild
from gpusnap.runtime_shim.snapshot.loading.start import LoadProcess
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.preflight import space
from gpusnap.runtime_shim.snapshot.records import reservations

KIB = 1 << 10
KEY = "some-key"
NAME = "pages-1.img"
PID = 7
ADDRESS = (1 << 30) + 4 * KIB

pytestmark = pytest.mark.usefixtures("stage")


class Gate:
    """The blobs of a layout. Those whose digests are in `closed` come when it is opened."""

    def __init__(self, layout: Layout, closed: Sequence[str]) -> None:
        self._layout, self._closed, self._opened = layout, set(closed), threading.Event()
        self.asked: list[str] = []

    def open(self) -> None:
        """Let all of them come."""
        self._opened.set()

    def open_blob(self, digest: str, size: int | None = None) -> io.FileIO:
        """As gpusnap.oci.layout.blobs.Blobs."""
        self.asked.append(digest)
        if digest in self._closed:
            self._opened.wait(60)
        return self._layout.open_blob(digest, size)

    def check_blob(self, wanted: Descriptor) -> None:
        """Likewise."""
        self._layout.check_blob(wanted)


@pytest.fixture
def content() -> bytes:
    """Of the file, and of the region."""
    return os.urandom(64 * KIB)


@pytest.fixture
def memory() -> bytes:
    """Of the region: its second chunk has zeros alone, and is in no blob."""
    found = bytearray(os.urandom(64 * KIB))
    found[4 * KIB : 8 * KIB] = bytes(4 * KIB)
    return bytes(found)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


@pytest.fixture
def record(layout: Layout, content: bytes, memory: bytes) -> Manifest:
    sources = [Buffer(bytearray(each)) for each in (content, memory)]
    file, region = write(sources, layout, threads=2, ceiling=64 << 20, chunk_size=4 * KIB, level=0)
    (process,) = a_manifest().processes
    process = replace(process, pid=PID, regions=(RegionRecord(ADDRESS, region),))
    return replace(a_manifest(), pages="store", processes=(process,), files=(FileRecord(NAME, file),))


def file_blobs(record: Manifest) -> list[str]:
    """The digests of the blobs of the file."""
    return [chunk.blob for chunk in record.files[0].table.chunks]


def memory_blobs(record: Manifest) -> list[str]:
    """The digests of the blobs of the region."""
    return [chunk.blob for chunk in record.processes[0].regions[0].table.chunks]


@contextmanager
def loading(record: Manifest, blobs: Gate | Layout) -> Iterator[dict[str, str]]:
    """A loading in this process; what its runtime's environment has."""
    files, regions = load_process.choose_contents(record, Memory(threads=2))
    with closing(Loader(files, regions, blobs, Memory(threads=2))) as found:
        yield {VARIABLE: found.path}


@contextmanager
def child(record: Manifest, blobs: Gate | Layout) -> Iterator[tuple[dict[str, str], int]]:
    """A load process that can be killed; what its runtime's environment has, and its PID."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            gc.disable()  # what other tests left would close descriptors whose numbers are reused by now
            with loading(record, blobs) as environment:
                os.write(writing, environment[VARIABLE].encode())
                threading.Event().wait(60)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        path = os.read(reading, 4096).decode()
        assert path
        yield {VARIABLE: path}, pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        tmpfs.unmount_if_empty()


class Runtime:
    """What a runtime does with a load process."""

    def __init__(self, record: Manifest, layout: Layout, folder: Path) -> None:
        self.record, self.begun, self.restarted = record, 0, list[Table]()
        self.placed: list[int] = []
        self.layout: Layout | Gate = layout
        self._layout, self._folder = layout, folder

    @contextmanager
    def joined(self, environment: dict[str, str]) -> Iterator[JoinedProcess]:
        """Join what such an environment says."""
        found = join(self.record, KEY, Memory(), environment)
        assert found is not None
        with closing(found):
            yield found
            found.drop_areas()

    @contextmanager
    def images(self, joined: JoinedProcess) -> Iterator[JoinedImages]:
        """CRIU's images of it."""
        with closing(JoinedImages(joined, self._rebuild)) as found:
            yield found

    @contextmanager
    def memory(self, joined: JoinedProcess) -> Iterator[JoinedMemory]:
        """The GPUs' memory of it."""

        def read(tables: Sequence[Table], placed: Callable[[int, Chunk], None]) -> Reader:
            self.restarted = list(tables)
            return Reader(
                tables, self.layout, threads=2, ceiling=64 << 20, targets=joined.areas, on_placed=placed
            )

        def placed(at: int, chunk: Chunk) -> None:
            assert at == 0
            self.placed.append(chunk.offset)

        with closing(JoinedMemory(joined, placed, lambda *_: None, read)) as found:
            yield found

    def content(self, joined: JoinedProcess) -> bytes:
        """What the region holds."""
        (area,) = joined.areas
        return bytes(area.view(0, area.size))

    def _rebuild(self) -> ImageRebuild:
        self.begun += 1
        self._folder.mkdir(exist_ok=True)
        return ImageRebuild(self.record.files, self._layout, str(self._folder), threads=2, ceiling=64 << 20)


@pytest.fixture
def runtime(record: Manifest, layout: Layout, tmp_path: Path) -> Runtime:
    return Runtime(record, layout, tmp_path / "images")


def read_state(environment: dict[str, str]) -> State:
    """How far a load process is."""
    with closing(Board.open(environment[VARIABLE])) as board:
        return board.read_state()


def wait_until_done(environment: dict[str, str]) -> None:
    wait_for(lambda: read_state(environment) is State.DONE, "the end of the loading")


def blob_path(layout: Layout, blob: str) -> Path:
    """The file of a blob."""
    return Path(layout.path, "blobs", "sha256", blob.removeprefix("sha256:"))


def damage(layout: Layout, blob: str) -> None:
    """Make a blob another one."""
    blob_path(layout, blob).write_bytes(os.urandom(4 * KIB))


def test_a_runtime_that_comes_when_all_is_there(
    runtime: Runtime, record: Manifest, layout: Layout, stage: Path, content: bytes, memory: bytes
) -> None:
    """It has the files by name, and loads nothing."""
    with loading(record, layout) as environment:
        wait_until_done(environment)
        assert list(stage.iterdir()) == [], "nothing has a name before"
        with runtime.joined(environment) as joined:
            with runtime.images(joined) as images:
                assert images.has_started_all
                images.wait()
                assert images.paths == {NAME: str(stage / KEY / f"images-{NAME}")}
                assert Path(images.paths[NAME]).read_bytes() == content
                assert images.are_from_load_process
            with runtime.memory(joined) as found:
                found.wait()
                assert runtime.content(joined) == memory
            assert runtime.placed == [chunk.offset for chunk in record.processes[0].regions[0].table.chunks]
        assert list(stage.iterdir()) == []
    assert (runtime.begun, runtime.restarted) == (0, [])


def test_a_runtime_that_comes_before(
    runtime: Runtime, record: Manifest, layout: Layout, content: bytes, memory: bytes
) -> None:
    """It waits for what is left of the images, then of the memory."""
    gate = Gate(layout, [file_blobs(record)[-1]])
    with (
        loading(record, gate) as environment,
        runtime.joined(environment) as joined,
        runtime.images(joined) as images,
        runtime.memory(joined) as found,
    ):
        waiting = threading.Thread(target=images.wait)
        waiting.start()
        assert not images.has_started_all
        assert not images.paths
        gate.open()
        waiting.join(60)
        assert Path(images.paths[NAME]).read_bytes() == content
        found.look_closely()
        found.wait()
        assert runtime.content(joined) == memory
    assert (runtime.begun, runtime.restarted) == (0, [])


def test_memory_that_is_waited_for_comes_first(record: Manifest, layout: Layout, runtime: Runtime) -> None:
    """A thread of the container has touched it."""
    blobs = memory_blobs(record)
    gate = Gate(layout, blobs[:2])
    with (
        loading(record, gate) as environment,
        runtime.joined(environment) as joined,
        runtime.memory(joined) as found,
    ):
        wait_for(lambda: set(blobs[:2]) <= set(gate.asked), "two workers at the first chunks")
        table = record.processes[0].regions[0].table
        found.hurry(0, table.chunks[-1].offset + 5)
        board = joined.board
        wait_for(lambda: not any(board._memory[64 + board.chunks : 64 + 2 * board.chunks]), "the look")
        gate.open()
        found.wait()
    asked = [digest for digest in gate.asked if digest in blobs]
    assert asked.index(blobs[-1]) == 2


def test_processes_are_loaded_side_by_side(record: Manifest, layout: Layout) -> None:
    """Also where CRIU's images are not in chunks: both get on at the same rate."""
    (first,) = record.processes
    (table,) = write(
        [Buffer(bytearray(os.urandom(64 * KIB)))],
        layout,
        threads=1,
        ceiling=64 << 20,
        chunk_size=4 * KIB,
        level=0,
    )
    second = replace(first, pid=PID + 1, regions=(RegionRecord(ADDRESS, table),))
    gate = Gate(layout, ())
    regions = boards.list_regions(replace(record, processes=(first, second)))
    with closing(Loader((), regions, gate, Memory(threads=1))) as found:
        wait_until_done({VARIABLE: found.path})
    assert gate.asked[:2] == [first.regions[0].table.chunks[0].blob, table.chunks[0].blob]


@pytest.mark.parametrize("at", ["images", "memory"])
def test_a_load_process_that_is_killed_at_work(
    runtime: Runtime, record: Manifest, layout: Layout, content: bytes, memory: bytes, at: str
) -> None:
    """The runtime loads what is missing, and nothing twice."""
    blobs = file_blobs(record) if at == "images" else memory_blobs(record)
    with (
        child(record, Gate(layout, [blobs[-1]])) as (environment, pid),
        runtime.joined(environment) as joined,
    ):
        missing = len(record.files[0].table.chunks) + len(memory_blobs(record)) - 1
        if at == "memory":
            wait_for(lambda: sum(joined.board.read_loaded()) == missing, "all but the last")
        else:
            wait_for(lambda: sum(joined.board.read_loaded()) > 3, "some chunks")
        os.kill(pid, signal.SIGKILL)
        with runtime.images(joined) as images, runtime.memory(joined) as found:
            images.wait()
            assert Path(images.paths[NAME]).read_bytes() == content
            assert images.are_from_load_process == (at == "memory")
            found.wait()
            assert runtime.content(joined) == memory
    assert runtime.begun == (at == "images")
    if at == "memory":
        (rest,) = runtime.restarted
        assert [chunk.blob for chunk in rest.chunks] == blobs[-1:]
    assert sorted(runtime.placed) == [each.offset for each in record.processes[0].regions[0].table.chunks]


def test_a_load_process_that_is_killed_when_all_is_there(
    runtime: Runtime, record: Manifest, layout: Layout, content: bytes, memory: bytes
) -> None:
    """The files are as good as before."""
    with child(record, layout) as (environment, pid):
        wait_until_done(environment)
        with runtime.joined(environment) as joined:
            os.kill(pid, signal.SIGKILL)
            with runtime.images(joined) as images, runtime.memory(joined) as found:
                images.wait()
                found.wait()
                assert Path(images.paths[NAME]).read_bytes() == content
                assert runtime.content(joined) == memory
    assert (runtime.begun, runtime.restarted) == (0, [])


def test_a_load_process_that_is_killed_before_the_runtime_comes(
    record: Manifest, layout: Layout, stage: Path
) -> None:
    """There is nothing to join, and nothing but an empty tmpfs, which the next one unmounts."""
    with child(record, layout) as (environment, pid):
        wait_until_done(environment)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not proc.is_running(pid), "its end")
        assert join(record, KEY, Memory(), environment) is None
        assert list(stage.iterdir()) == []


def test_a_load_process_that_gets_no_further_is_killed(
    runtime: Runtime,
    record: Manifest,
    layout: Layout,
    memory: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is stopped, say. It must not write once the runtime does."""
    with (
        child(record, Gate(layout, memory_blobs(record)[1:])) as (environment, pid),
        runtime.joined(environment) as joined,
    ):
        joined._patience = 0.2
        with runtime.memory(joined) as found:
            found.wait()
            assert not proc.is_running(pid)
            assert runtime.content(joined) == memory
    assert runtime.restarted


def test_a_load_process_that_cannot_be_killed(
    runtime: Runtime, record: Manifest, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still write to what the container would have: the restore fails."""
    monkeypatch.setattr(module, "_ENDING", 0.01)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    with (
        child(record, Gate(layout, memory_blobs(record)[1:])) as (environment, _),
        runtime.joined(environment) as joined,
    ):
        joined._patience = 0.0
        with runtime.memory(joined) as found, pytest.raises(GpusnapError, match="has not ended"):
            found.wait()
    assert not runtime.restarted


@pytest.mark.parametrize("at", ["images", "memory"])
def test_a_chunk_that_is_damaged(runtime: Runtime, record: Manifest, layout: Layout, at: str) -> None:
    """The runtime comes upon it itself, and reports it as ever."""
    blob = (file_blobs(record) if at == "images" else memory_blobs(record))[3]
    damage(layout, blob)
    with child(record, layout) as (environment, _), runtime.joined(environment) as joined:
        wait_for(lambda: read_state(environment) is State.FAILED, "the end of the loading")
        with runtime.images(joined) as images, runtime.memory(joined) as found:
            if at == "images":
                with pytest.raises(ImageError, match=blob):
                    images.wait()
            else:
                with pytest.raises(OciError, match=blob):
                    found.wait()
                with pytest.raises(OciError, match=blob):
                    found.check()


def test_a_runtime_that_gives_up(runtime: Runtime, record: Manifest, layout: Layout) -> None:
    """CRIU failed, say: nobody waits for what does not come."""
    gate = Gate(layout, memory_blobs(record)[1:])
    with loading(record, gate) as environment:
        with runtime.joined(environment) as joined, runtime.memory(joined) as found:
            found.close()
            with pytest.raises(OciError):
                found.wait()
        gate.open()


def test_a_runtime_that_never_comes(record: Manifest, layout: Layout, stage: Path) -> None:
    """Podman failed, or was killed: nothing is left."""
    before = os.listdir("/proc/self/fd")
    with loading(record, layout) as environment:
        wait_until_done(environment)
        assert os.path.ismount(stage)
    assert not os.path.ismount(stage)
    new = set(os.listdir("/proc/self/fd")).difference(before)
    assert not [name for name in map(read_target, new) if "gpusnap" in name]


def read_target(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize("when", ["area", "populate"])
def test_a_full_tmpfs(
    runtime: Runtime,
    record: Manifest,
    layout: Layout,
    content: bytes,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    """Nothing is begun, or nothing comes of it; the runtime does as it does there."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    monkeypatch.setattr(tmpfs.Unnamed if when == "area" else tmpfs.Area, when, full)
    if when == "area":
        with pytest.raises(OSError, match="somewhere"), loading(record, layout):
            pass
        return
    with (
        child(record, layout) as (environment, _),
        runtime.joined(environment) as joined,
        runtime.images(joined) as images,
    ):
        images.wait()
        assert Path(images.paths[NAME]).read_bytes() == content
    assert runtime.begun == 1


def test_two_restores_of_one_checkpoint(
    runtime: Runtime, record: Manifest, layout: Layout, content: bytes
) -> None:
    """Each has files of its own, and none takes the tmpfs from the other when it ends."""
    with loading(record, layout) as first:
        with loading(record, layout) as other:
            assert other[VARIABLE] != first[VARIABLE]
        with runtime.joined(first) as joined, runtime.images(joined) as images:
            images.wait()
            assert Path(images.paths[NAME]).read_bytes() == content
    assert runtime.begun == 0


def test_files_that_get_no_name(
    record: Manifest, layout: Layout, monkeypatch: pytest.MonkeyPatch, stage: Path
) -> None:
    """The tmpfs is another one by now, say: the load process is ended, and no half of them is left."""

    def gone(*_: object) -> str:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(tmpfs.Stage, "name_unnamed", gone)
    with child(record, layout) as (environment, pid):
        assert join(record, KEY, Memory(), environment) is None
        assert not proc.is_running(pid)
        assert not stage.exists() or list(stage.iterdir()) == []


def test_another_process_with_the_number_of_the_load_process(
    record: Manifest, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child(record, layout) as (environment, pid), monkeypatch.context() as patched:
        patched.setattr(proc, "is_same", lambda pid, start: False)
        patched.setattr(proc, "exists", lambda pid, start: False)
        assert join(record, KEY, Memory(), environment) is None
        assert proc.is_running(pid), "it is somebody else"


def test_what_is_not_joined(
    record: Manifest, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another checkpoint's, what is not a board, and none where memory.ceiling limits what is used."""
    (tmp_path / "file").write_bytes(b"x")
    (table,) = write(
        [Buffer(bytearray(os.urandom(64 * KIB)))], layout, threads=2, ceiling=64 << 20, chunk_size=4 * KIB
    )
    with child(record, layout) as (environment, pid):
        other = replace(record, files=(FileRecord(NAME, table),))
        assert join(other, KEY, Memory(), environment) is None
        assert join(record, KEY, Memory(ceiling=1 << 30), environment) is None
        assert join(record, KEY, Memory(), {}) is None
        for path in (str(tmp_path / "file"), str(tmp_path / "nowhere"), "/proc/self/exe"):
            assert join(record, KEY, Memory(), {VARIABLE: path}) is None
        assert proc.is_running(pid), "it may be another restore's"


HOSTILE = {
    "empty": b"",
    "short": b"\0" * 20,
    "no JSON": b"\0" * 64 + b"nothing that it says",
    "more chunks than bytes": b"\0" * 8 + b"\xff" * 8 + b"\0" * 48 + b"{}",
    "another shape": b"\0" * 64 + b'{"owner": 5, "identity": []}',
    "a list": b"\0" * 64 + b"[]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_board_that_is_none(record: Manifest, name: str) -> None:
    with ExitStack() as stack:
        found = os.memfd_create(boards.NAME)
        stack.callback(os.close, found)
        os.pwrite(found, HOSTILE[name], 0)
        assert join(record, KEY, Memory(), {VARIABLE: f"/proc/self/fd/{found}"}) is None


def test_descriptors_that_are_of_other_files(record: Manifest, layout: Layout, tmp_path: Path) -> None:
    """They are not opened for writing, nor named: the owner is a process that is no load process."""
    with open(tmp_path / "file", "wb") as file, child(record, layout) as (_, pid):
        process = proc.process(pid)
        assert process is not None
        files, regions = load_process.choose_contents(record, Memory())
        count = sum(len(each.table.chunks) for each in files) + len(memory_blobs(record))
        facts = Facts(
            (pid, process.start), boards.digest_contents(files, regions), True, True, (file.fileno(), 0)
        )
        with closing(Board.create(count, facts)) as board:
            assert join(record, KEY, Memory(), {VARIABLE: board.path}) is None


def test_digests_are_part_of_the_contents(record: Manifest) -> None:
    """A load process may check by BLAKE3 alone: it does not load for a manifest that has another one."""

    def changed(**other: str) -> str:
        file = record.files[0]
        first, *rest = file.table.chunks
        table = Table(file.table.size, (replace(first, **other), *rest))  # type: ignore[arg-type]
        return boards.digest_contents((replace(file, table=table),), ())

    found = {changed(), changed(blake3="ab" * 32), changed(plain="sha256:" + "ab" * 32)}
    assert len(found) == 3


@contextmanager
def limit_descriptors(more: int) -> Iterator[None]:
    """This process may open so many files more than it has open."""
    gc.collect()  # what other tests left closes its files now, and not after they were counted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def many_regions(record: Manifest, layout: Layout) -> Manifest:
    """Without a file, and with more regions than a runtime with few descriptors may open."""
    sources = [Buffer(bytearray(os.urandom(4 * KIB))) for _ in range(100)]
    tables = write(sources, layout, threads=2, ceiling=64 << 20, chunk_size=4 * KIB, level=0)
    regions = tuple(RegionRecord(at << 30, table) for at, table in enumerate(tables, 1))
    return replace(record, processes=(replace(record.processes[0], regions=regions),), files=())


@pytest.mark.parametrize("fits", [True, False])
def test_a_runtime_that_may_open_few_files(
    many_regions: Manifest, layout: Layout, stage: Path, fits: bool
) -> None:
    """The load process had another limit. What could not be finished is not begun, and frees its RAM."""
    with child(many_regions, layout) as (environment, pid):
        wait_until_done(environment)
        # With those that JoinedMemory, demand paging and the rest of a restore open.
        with limit_descriptors(300 if fits else 210):
            joined = join(many_regions, KEY, Memory(), environment)
        if not fits:
            assert joined is None
            assert not proc.is_running(pid)
            assert list(stage.iterdir()) == []
            return
        assert joined is not None
        with closing(joined):
            assert len(joined.areas) == 100
            joined.drop_areas()


def test_a_load_process_that_may_open_few_files(record: Manifest) -> None:
    """It has none in RAM, and neither has a runtime that puts the images together."""
    files = tuple(replace(record.files[0], name=f"pages-{number}.img") for number in range(50))
    many = replace(record, files=files)
    with limit_descriptors(110):
        assert load_process.choose_contents(many, Memory()) == ((), boards.list_regions(record))


def test_images_of_a_runtime_that_may_open_few_files(
    record: Manifest, layout: Layout, tmp_path: Path, content: bytes
) -> None:
    """They are put together on the disk, with one descriptor for each in place of two."""
    files = tuple(replace(record.files[0], name=f"pages-{number}.img") for number in range(50))
    blobs = Layout(layout.path)
    with limit_descriptors(110):
        found = ImageRebuild(files, blobs, str(tmp_path), threads=2, ceiling=64 << 20, stage=tmpfs.Stage(KEY))
        with closing(found):
            found.wait()
            assert set(found.paths.values()) == {str(tmp_path / each.name) for each in files}
            assert (tmp_path / "pages-49.img").read_bytes() == content


def test_what_a_load_process_takes(record: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images where there is RAM for two copies; regions where they may be staged."""
    files, regions = load_process.choose_contents(record, Memory())
    assert files == record.files
    assert regions == boards.list_regions(record)
    for ceiling in (8 * KIB, 64 << 30):
        assert load_process.choose_contents(record, Memory(ceiling=ceiling)) == ((), ())
    with monkeypatch.context() as patched:
        patched.setattr(space, "has_memory_for_images", lambda *_, **__: False)
        assert load_process.choose_contents(record, Memory()) == ((), regions)

    def refuse(*_: object, **__: object) -> None:
        raise Refused("there is no RAM")

    monkeypatch.setattr(space, "check_memory_to_restore", refuse)
    assert load_process.choose_contents(record, Memory()) == ((), ())


@pytest.mark.parametrize("threads", [0, 5])
def test_its_workers(record: Manifest, layout: Layout, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """As many as the encodings of the chunks were chosen for."""
    monkeypatch.setattr(copies, "cores", lambda: 8)
    settings = Memory(threads=threads)
    files, regions = load_process.choose_contents(record, settings)
    with closing(Loader(files, regions, layout, settings)) as found:
        assert found._workers == transfer.count_reading_threads(settings) == (threads or 6)


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where RAM is claimed."""
    folder = str(tmp_path / "gpusnap" / "room")
    monkeypatch.setattr(load_process, "claim", partial(reservations.claim, folder))
    monkeypatch.setattr(load_process, "_loaders", [])
    return folder


def needed(record: Manifest) -> int:
    """Bytes that a restore needs: two copies of CRIU's images, and the region."""
    return 2 * record.files[0].table.size + record.processes[0].regions[0].table.size


def test_two_at_once(room: str, record: Manifest, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one is about to load, the other does not take for free; nor what a checkpoint is to move."""
    monkeypatch.setattr(proc, "available_memory", lambda: 2 * needed(record) - 1)
    gate = Gate(layout, memory_blobs(record))
    monkeypatch.setattr(load_process, "Layout", lambda _: gate)
    assert load_process.load(record, layout.path, Memory(threads=2))
    (first,) = load_process._loaders
    with closing(first):
        assert reservations.read_reserved(room) == {reservations.RAM: needed(record)}
        # It has RAM for the region, and CRIU's images go to the disk.
        assert load_process.choose_contents(record, Memory(), reserved=needed(record))[0] == ()
        with reservations.claim(room) as checkpoint:
            checkpoint.record({reservations.RAM: needed(record)})
            assert load_process.load(record, layout.path, Memory(threads=2)) == ""
        gate.open()
        wait_for(lambda: reservations.read_reserved(room) == {}, "the end of its claim")
        assert read_state({VARIABLE: first.path}) in (State.AT_WORK, State.DONE)
    assert load_process._loaders == [first]


def test_what_is_loaded_is_claimed_no_more(
    room: str, record: Manifest, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in use by then: who counted it twice would refuse what fits."""
    monkeypatch.setattr(load_process, "STEP", 1)
    gate = Gate(layout, memory_blobs(record))
    monkeypatch.setattr(load_process, "Layout", lambda _: gate)
    assert load_process.load(record, layout.path, Memory(threads=2))
    (one,) = load_process._loaders
    left = {reservations.RAM: needed(record) - record.files[0].table.size}
    with closing(one):
        wait_for(lambda: reservations.read_reserved(room) == left, "the file's size to be given up")
        gate.open()
        wait_for(lambda: reservations.read_reserved(room) == {}, "the end of its claim")
    assert reservations.read_reserved(room) == {}


def test_a_claim_goes_with_its_load_process(
    room: str, record: Manifest, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it fails, is closed, or is killed."""
    gate = Gate(layout, memory_blobs(record))
    monkeypatch.setattr(load_process, "Layout", lambda _: gate)
    assert load_process.load(record, layout.path, Memory(threads=2))
    (one,) = load_process._loaders
    assert reservations.read_reserved(room)
    gate.open()
    one.close()
    assert reservations.read_reserved(room) == {}
    damage(layout, memory_blobs(record)[0])
    assert load_process.load(record, layout.path, Memory(threads=2))
    failing = load_process._loaders[-1]
    with closing(failing):
        wait_for(lambda: read_state({VARIABLE: failing.path}) is State.FAILED, "its failure")
        assert reservations.read_reserved(room) == {}
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            gate._opened = threading.Event()
            load_process.load(record, layout.path, Memory(threads=2))
            os.write(writing, b"x")
            threading.Event().wait(60)
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    assert reservations.read_reserved(room) == {reservations.RAM: needed(record)}
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert reservations.read_reserved(room) == {}
    os.close(reading)
    tmpfs.unmount_if_empty()


def test_others_that_claim_for_long(
    room: str, record: Manifest, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is loaded ahead."""
    monkeypatch.setattr(load_process, "_PATIENCE", 0.1)
    with reservations.claim(room), pytest.raises(GpusnapError, match=r"kept .* locked"):
        load_process.load(record, layout.path, Memory(threads=2))
    assert load_process._loaders == []


@pytest.fixture
def forker(room: str) -> Iterator[None]:
    """What load processes are forked by."""
    question_process.end()
    question_process.start()
    yield
    question_process.end()


def test_the_command(
    forker: None, runtime: Runtime, record: Manifest, layout: Layout, content: bytes, memory: bytes
) -> None:
    """Its load process has another PID, and has ended when it goes on."""
    with LoadProcess(record, layout.path, Memory()) as process:
        environment = dict(process.environment())
        with runtime.joined(environment) as joined:
            owner = joined.board.read_facts().owner
            assert owner[0] != os.getpid()
            with runtime.images(joined) as images, runtime.memory(joined) as found:
                images.wait()
                found.wait()
                assert Path(images.paths[NAME]).read_bytes() == content
                assert runtime.content(joined) == memory
    assert not proc.is_same(*owner)


def test_a_process_that_was_prepared(
    forker: None, record: Manifest, layout: Layout, runtime: Runtime
) -> None:
    start.prepare()
    parents = proc.parents()
    there = [pid for pid, parent in parents.items() if parents.get(parent) == os.getpid()]
    with (
        LoadProcess(record, layout.path, Memory()) as process,
        runtime.joined(dict(process.environment())) as joined,
    ):
        assert joined.board.read_facts().owner[0] in there


@pytest.mark.parametrize("unused", [0, 1 << 40])
def test_the_page_cache_where_memory_is_used_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record: Manifest, layout: Layout, unused: int
) -> None:
    """Each blob that was not in it is to be dropped; the kernel keeps a page that somebody uses just then."""
    monkeypatch.setattr(proc, "unused_memory", lambda: unused)
    dropped, real = tmp_path / "dropped", os.posix_fadvise
    dropped.touch()

    def advise(descriptor: int, offset: int, size: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            with dropped.open("a") as file:  # from the load process, too
                file.write(f"{os.fstat(descriptor).st_ino}\n")
        real(descriptor, offset, size, advice)

    for blob in (*file_blobs(record), *filter(None, memory_blobs(record))):
        with io.FileIO(blob_path(layout, blob)) as file:
            if not os.major(os.fstat(file.fileno()).st_dev):
                pytest.skip("the folder is on no disk")
            evict(file)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    with loading(record, layout) as environment:
        wait_until_done(environment)
    blobs = {str(os.stat(blob_path(layout, blob)).st_ino) for blob in file_blobs(record)}
    assert blobs & set(dropped.read_text().split()) == (set() if unused else blobs)


def test_a_process_that_cannot_be_prepared() -> None:
    with pytest.raises(GpusnapError, match="no child process"):
        start.prepare()


def test_a_command_without_children(record: Manifest, layout: Layout, stage: Path) -> None:
    """It loads nothing itself."""
    with LoadProcess(record, layout.path, Memory()) as process:
        assert process.environment() == {}
    with LoadProcess(None, layout.path, Memory()) as process:
        assert process.environment() == {}
    assert not stage.exists()


def test_a_load_process_that_does_not_begin(
    forker: None, record: Manifest, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restore goes on without it."""
    monkeypatch.setattr(start, "_START", 0.05)
    monkeypatch.setattr(start, "_load", hang)
    with LoadProcess(record, layout.path, Memory()) as process:
        assert process.environment() == {}


def hang(*_: object) -> str:
    threading.Event().wait(60)
    return ""


def test_a_runtime_that_gives_up_while_it_loads_itself(
    runtime: Runtime, record: Manifest, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for what is left."""
    blobs = memory_blobs(record)
    own = Gate(layout, blobs[5:])
    runtime.layout = own
    with child(record, Gate(layout, blobs)) as (environment, pid), runtime.joined(environment) as joined:
        with runtime.memory(joined) as found:
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: any(blob in own.asked for blob in blobs[5:]), "a blob that does not come")
            closing_thread = threading.Thread(target=found.close)
            closing_thread.start()
            wait_for(lambda: found._own is not None and found._own._crew.is_over, "the end of its workers")
            own.open()
            closing_thread.join(60)
            assert not closing_thread.is_alive()
        assert len(runtime.placed) < len(blobs)


def test_what_was_waited_for_comes_first_afterwards(
    runtime: Runtime, record: Manifest, layout: Layout
) -> None:
    """The load process was dead by then."""
    blobs, table = memory_blobs(record), record.processes[0].regions[0].table
    own = Gate(layout, blobs[:2])
    runtime.layout = own
    with (
        child(record, Gate(layout, blobs)) as (environment, pid),
        runtime.joined(environment) as joined,
        runtime.memory(joined) as found,
    ):
        found.hurry(0, table.chunks[-1].offset)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: set(blobs[:2]) & set(own.asked) or blobs[-1] in own.asked, "its own reading")
        wait_for(lambda: found._own is not None, "its own reading")
        own.open()
        found.wait()
    asked = [digest for digest in own.asked if digest in blobs]
    assert asked.index(blobs[-1]) <= 3


def test_a_signal_while_it_is_joined(
    record: Manifest, layout: Layout, monkeypatch: pytest.MonkeyPatch, stage: Path
) -> None:
    """It ends the restore, and leaves no file."""

    def interrupt(*_: object) -> bool:
        raise Interrupted("stopped by SIGINT")

    with child(record, layout) as (environment, _):
        with monkeypatch.context() as patched:
            patched.setattr(proc, "is_same", interrupt)
            with pytest.raises(Interrupted):
                join(record, KEY, Memory(), environment)
        assert list(stage.iterdir()) == []


def test_a_signal_while_a_load_process_is_killed(
    record: Manifest, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the restore."""

    def interrupt(*_: object) -> None:
        raise Interrupted("stopped by SIGINT")

    def gone(*_: object) -> str:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(tmpfs.Stage, "name_unnamed", gone)
    with child(record, layout) as (environment, _), monkeypatch.context() as patched:
        patched.setattr(module, "kill_process", interrupt)
        with pytest.raises(Interrupted):
            join(record, KEY, Memory(), environment)
