"""CRIU's images that `gpusnap restore` begins to put together, and gpusnap-runtime ends."""

from __future__ import annotations

import errno
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fakes import a_manifest, wait_for

from gpusnap.oci.chunks.buffers import Buffer
from gpusnap.oci.chunks.writer import write
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.errors import ImageError
from gpusnap.runtime_shim.process import mount_namespace, proc
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.records.manifest import FileRecord, Manifest
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.memory import images_ahead as module
from gpusnap.runtime_shim.snapshot.memory.images_ahead import VARIABLE, Joined, ahead, join
from gpusnap.runtime_shim.snapshot.memory.source import Rebuilding
from gpusnap.runtime_shim.snapshot.preflight import space

KIB = 1 << 10
KEY = "some-key"
NAME = "pages-1.img"


class Gate:
    """The blobs of a layout; those after the first come when it is opened."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._opened = layout, threading.Event()
        self._first = threading.Lock()
        self.waiting = threading.Event()

    def open(self) -> None:
        """Let all of them come."""
        self._opened.set()

    def open_blob(self, digest: str, size: int | None = None) -> io.FileIO:
        """As gpusnap.oci.layout.blobs.Blobs."""
        if not self._first.acquire(blocking=False):
            self.waiting.set()
            self._opened.wait(60)
        return self._layout.open_blob(digest, size)

    def check_blob(self, wanted: Descriptor) -> None:
        """Likewise."""
        self._layout.check_blob(wanted)


class Runtime:
    """What the runtime has of its own: it begins anew in a folder."""

    def __init__(self, record: Manifest, layout: Layout, folder: Path) -> None:
        self.record, self.begun = record, 0
        self._layout, self._folder = layout, folder

    def rebuild(self) -> Rebuilding:
        """Begin anew."""
        self.begun += 1
        self._folder.mkdir(exist_ok=True)
        return Rebuilding(self.record.files, self._layout, str(self._folder), threads=2, ceiling=64 << 20)

    @contextmanager
    def joined(self, environment: dict[str, str]) -> Iterator[Joined]:
        """Join what such an environment says."""
        found = join(self.record.files, KEY, Memory(), self.rebuild, environment)
        assert found is not None
        with closing(found):
            yield found


@pytest.fixture
def content() -> bytes:
    return os.urandom(64 * KIB)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


@pytest.fixture
def record(layout: Layout, content: bytes) -> Manifest:
    (table,) = write(
        [Buffer(bytearray(content))], layout, threads=2, ceiling=64 << 20, chunk_size=4 * KIB, level=0
    )
    return replace(a_manifest(), pages="store", processes=(), files=(FileRecord(NAME, table),))


@pytest.fixture(autouse=True)
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The tmpfs of a test's own, of which nothing is left."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a tmpfs")
    folder = tmp_path / "gpusnap" / "stage"
    monkeypatch.setattr(tmpfs, "FOLDER", str(folder))
    monkeypatch.setattr(mount_namespace, "is_lasting", lambda: True)
    yield folder
    assert not os.path.ismount(folder)


@pytest.fixture
def runtime(record: Manifest, layout: Layout, tmp_path: Path) -> Runtime:
    return Runtime(record, layout, tmp_path / "images")


@pytest.fixture
def begun(record: Manifest, layout: Layout) -> Iterator[dict[str, str]]:
    """The environment of a runtime for which all is there."""
    with ahead(record, layout, Memory()) as environment:
        wait_for(lambda: state(dict(environment)) == module.DONE, "the images")
        yield dict(environment)


def state(environment: dict[str, str]) -> str:
    """What a command says of its work."""
    board = os.open(environment[VARIABLE], os.O_RDONLY)
    try:
        return module._read_state(board)[0]
    finally:
        os.close(board)


def damage(record: Manifest, layout: Layout) -> str:
    """Make a blob another one; its digest."""
    blob = record.files[0].table.chunks[3].blob
    (Path(layout.path) / "blobs" / "sha256" / blob.removeprefix("sha256:")).write_bytes(os.urandom(4 * KIB))
    return blob


def test_a_runtime_that_comes_when_all_is_there(
    runtime: Runtime, begun: dict[str, str], stage: Path, content: bytes
) -> None:
    """It has the files by name, and begins nothing."""
    with runtime.joined(begun) as joined:
        assert list(stage.iterdir()) == [], "nothing has a name before"
        assert not waits(joined)
        joined.result()
        assert joined.paths == {NAME: str(stage / KEY / f"images-{NAME}")}
        assert Path(joined.paths[NAME]).read_bytes() == content
        assert joined.taken
    assert runtime.begun == 0
    assert list(stage.iterdir()) == []


def test_a_runtime_that_comes_before(
    runtime: Runtime, record: Manifest, layout: Layout, content: bytes
) -> None:
    """It waits for what is left, and so does whoever comes behind."""
    gate, found = Gate(layout), list[bytes]()

    def wait() -> None:
        joined.result()
        found.append(Path(joined.paths[NAME]).read_bytes())

    with ahead(record, gate, Memory(threads=2)) as environment, runtime.joined(dict(environment)) as joined:
        assert gate.waiting.wait(60)
        assert waits(joined)
        thread = threading.Thread(target=wait)
        thread.start()
        assert not found
        gate.open()
        thread.join(60)
        assert not waits(joined)
    assert found == [content]
    assert runtime.begun == 0


def waits(joined: Joined) -> bool:
    """Whether who comes behind waits."""
    return not joined.begun


@contextmanager
def command(record: Manifest, blobs: Gate | Layout) -> Iterator[tuple[dict[str, str], Callable[[], None]]]:
    """A command in a process of its own, which can be killed; what its runtime's environment has."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            with ahead(record, blobs, Memory(threads=2)) as environment:
                os.write(writing, environment[VARIABLE].encode())
                threading.Event().wait(60)
        finally:
            os._exit(1)
    os.close(writing)
    killed = False

    def kill() -> None:
        nonlocal killed
        if not killed:
            killed = True
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    try:
        path = os.read(reading, 4096).decode()
        assert path
        yield {VARIABLE: path}, kill
    finally:
        kill()
        os.close(reading)
        tmpfs.tidy()


def test_a_command_that_is_killed_at_work(
    runtime: Runtime, record: Manifest, layout: Layout, content: bytes
) -> None:
    """The runtime begins anew."""
    with command(record, Gate(layout)) as (environment, kill), runtime.joined(environment) as joined:
        assert waits(joined)
        kill()
        joined.result()
        assert not waits(joined)
        assert not joined.taken
        assert Path(joined.paths[NAME]).read_bytes() == content
    assert runtime.begun == 1


def test_a_command_that_is_killed_when_all_is_there(
    runtime: Runtime, record: Manifest, layout: Layout, content: bytes
) -> None:
    """The runtime has had the files opened: they are as good as before."""
    with command(record, layout) as (environment, kill):
        wait_for(lambda: state(environment) == module.DONE, "the images")
        with runtime.joined(environment) as joined:
            kill()
            joined.result()
            assert Path(joined.paths[NAME]).read_bytes() == content
    assert runtime.begun == 0


def test_a_command_that_is_killed_before_the_runtime_comes(
    runtime: Runtime, record: Manifest, layout: Layout, stage: Path
) -> None:
    """There is nothing to join, and nothing but an empty tmpfs, which the next one unmounts."""
    with command(record, layout) as (environment, kill):
        wait_for(lambda: state(environment) == module.DONE, "the images")
        kill()
        assert join(record.files, KEY, Memory(), runtime.rebuild, environment) is None
        assert list(stage.iterdir()) == []


def test_another_process_with_the_number_of_the_command(
    runtime: Runtime, record: Manifest, begun: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proc, "is_same", lambda pid, start: False)
    assert join(record.files, KEY, Memory(), runtime.rebuild, begun) is None


@pytest.mark.parametrize("at", ["work", "the end"])
def test_a_runtime_that_never_comes(record: Manifest, layout: Layout, stage: Path, at: str) -> None:
    """Podman failed, or was killed: nothing is left."""
    gate, before = Gate(layout), os.listdir("/proc/self/fd")
    with ahead(record, gate, Memory(threads=2)) as environment:
        assert gate.waiting.wait(60)
        gate.open()
        if at == "the end":
            wait_for(lambda: state(dict(environment)) == module.DONE, "the images")
        assert os.path.ismount(stage)
    assert not os.path.ismount(stage)
    new = set(os.listdir("/proc/self/fd")).difference(before)
    assert not [name for name in map(_target, new) if "gpusnap" in name]


def _target(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:
        return ""


def test_a_command_that_ends_when_the_runtime_waits(
    runtime: Runtime, record: Manifest, layout: Layout, content: bytes
) -> None:
    """Podman was killed, and its runtime goes on by itself."""
    gate = Gate(layout)
    with ahead(record, gate, Memory(threads=2)) as environment:
        joined = join(record.files, KEY, Memory(), runtime.rebuild, environment)
        assert gate.waiting.wait(60)
        ending = threading.Timer(0, gate.open)
        ending.start()
    assert joined is not None
    with closing(joined):
        joined.result()
        assert Path(joined.paths[NAME]).read_bytes() == content
    ending.join()


def test_a_chunk_that_is_damaged(runtime: Runtime, record: Manifest, layout: Layout) -> None:
    """The runtime comes upon it itself, and says so as ever."""
    blob = damage(record, layout)
    with ahead(record, layout, Memory()) as environment, runtime.joined(dict(environment)) as joined:
        with pytest.raises(ImageError, match=blob):
            joined.result()
        assert state(dict(environment)) == module.FAILED
    assert runtime.begun == 1


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
    with ahead(record, layout, Memory()) as environment:
        if when == "area":
            assert environment == {}
            return
        with runtime.joined(dict(environment)) as joined:
            joined.result()
            assert Path(joined.paths[NAME]).read_bytes() == content
    assert runtime.begun == 1


def test_a_command_that_gets_no_further(
    runtime: Runtime, record: Manifest, layout: Layout, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, say. The runtime does not wait for ever, and what the command does then harms nobody."""
    monkeypatch.setattr(module, "_STUCK", 0.0)
    gate = Gate(layout)
    with ahead(record, gate, Memory(threads=2)) as environment, runtime.joined(dict(environment)) as joined:
        assert gate.waiting.wait(60)
        joined.result()
        assert runtime.begun == 1
        gate.open()
        wait_for(lambda: state(dict(environment)) == module.DONE, "the images")
        assert Path(joined.paths[NAME]).read_bytes() == content


def test_two_restores_of_one_checkpoint(
    runtime: Runtime, record: Manifest, layout: Layout, begun: dict[str, str], content: bytes
) -> None:
    """Each command has files of its own, and none takes the tmpfs from the other when it ends."""
    with ahead(record, layout, Memory()) as other:
        assert other[VARIABLE] != begun[VARIABLE]
    with runtime.joined(begun) as joined:
        joined.result()
        assert Path(joined.paths[NAME]).read_bytes() == content
    assert runtime.begun == 0


def test_files_that_get_no_name(
    runtime: Runtime, begun: dict[str, str], content: bytes, monkeypatch: pytest.MonkeyPatch, stage: Path
) -> None:
    """The tmpfs is another one by now, say: the runtime begins anew, and leaves no half of them."""

    def gone(*_: object) -> str:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(tmpfs.Stage, "take", gone)
    with runtime.joined(begun) as joined:
        joined.result()
        assert Path(joined.paths[NAME]).read_bytes() == content
        assert list(stage.iterdir()) == []
    assert runtime.begun == 1


def test_what_is_not_joined(
    runtime: Runtime, record: Manifest, layout: Layout, begun: dict[str, str], tmp_path: Path
) -> None:
    """Another checkpoint's, what is no such thing, and none where memory.ceiling limits what is used."""
    files, to = record.files, partial(join, key=KEY, rebuild=runtime.rebuild)
    (table,) = write(
        [Buffer(bytearray(os.urandom(64 * KIB)))], layout, threads=2, ceiling=64 << 20, chunk_size=4 * KIB
    )
    (tmp_path / "file").write_bytes(b"x")
    assert to((FileRecord(NAME, table),), settings=Memory(), environ=begun) is None
    assert to(files, settings=Memory(ceiling=1 << 30), environ=begun) is None
    assert to(files, settings=Memory(), environ={}) is None
    for path in (str(tmp_path / "file"), str(tmp_path / "nowhere"), "/proc/self/exe"):
        assert to(files, settings=Memory(), environ={VARIABLE: path}) is None
    other = os.memfd_create(module._NAME)
    try:
        os.pwrite(other, b"nothing that it says", 60)
        assert to(files, settings=Memory(), environ={VARIABLE: f"/proc/self/fd/{other}"}) is None
    finally:
        os.close(other)
    found = to(files, settings=Memory(), environ=begun)
    assert found is not None
    found.close()
    found.close()
    assert runtime.begun == 0


def test_what_is_not_begun(
    record: Manifest, layout: Layout, monkeypatch: pytest.MonkeyPatch, stage: Path
) -> None:
    """Where there are no such files, more than may be open at once, or no room in RAM."""
    for files in ((), record.files * 1000):
        with ahead(replace(record, files=files), layout, Memory()) as environment:
            assert environment == {}
    with ahead(None, layout, Memory()) as environment:
        assert environment == {}
    monkeypatch.setattr(space, "has_memory_for_images", lambda *_: False)
    with ahead(record, layout, Memory()) as environment:
        assert environment == {}
    assert not stage.exists()


def test_a_disk_that_hangs(
    record: Manifest, layout: Layout, monkeypatch: pytest.MonkeyPatch, stage: Path
) -> None:
    """The command ends all the same."""
    monkeypatch.setattr(module, "_ENDING", 0.01)
    gate = Gate(layout)
    with ahead(record, gate, Memory(threads=2)):
        assert gate.waiting.wait(60)
    assert os.path.ismount(stage)
    gate.open()
    wait_for(lambda: not os.path.ismount(stage), "the end of the reading")
