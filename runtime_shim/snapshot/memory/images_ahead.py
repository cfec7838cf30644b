"""CRIU's images that are in chunks, begun by `gpusnap restore`, and ended by gpusnap-runtime.

The command knows the manifest some 0.3 s before the runtime runs, which Podman starts when it has made a
container. It puts the images together meanwhile, in RAM, and the runtime waits for what is left:

    gpusnap restore      `ahead`: files without a name on the tmpfs of process/memory/tmpfs.py, and a piece of
                         memory (memfd_create(2)) that says which they are, and how far they are
                           |  GPUSNAP_IMAGES=/proc/PID/fd/N, as Podman and conmon hand it on
    gpusnap-runtime      `join`: opens them; when they are complete each gets a name in the folder of the
                         container that is restored, as those have that the runtime makes itself

Both use the same `Rebuilding`. Nothing has a name before it is the runtime's, so nothing is left of a command
that is killed, or of a runtime that never comes. Nobody depends on the command: where it is gone, has failed
or gets no further, the runtime begins anew by itself, and says what is wrong with a chunk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.layout.blobs import Blobs
from gpusnap.runtime_shim.errors import GpusnapError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.process.memory.tmpfs import Stage, Unnamed
from gpusnap.runtime_shim.records.manifest import FileRecord, Manifest
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.memory.source import Rebuilding
from gpusnap.runtime_shim.snapshot.preflight import space

VARIABLE = "GPUSNAP_IMAGES"
"""In the environment of a restore's runtime: the path of a `_Board`."""
_NAME = "gpusnap-images"
_HEAD, _LARGEST = 64, 1 << 20  # bytes: of how far it is, and of which files there are
AT_WORK, DONE, FAILED = "at work", "done", "failed"
# Files: each is open for as long as this takes, in the command and in the runtime.
_MOST = 128
# Blobs that are read at once: Podman and the runtime read their programs from the same disk meanwhile.
_READS = 2
# Seconds for the chunks that are being read when the command ends: a disk that hangs may never give them.
_ENDING = 10.0
# Seconds without any progress until the runtime begins anew (the command is stopped, say), and between looks.
_STUCK, _LOOK = 10.0, 0.005


def _some_of(cores: int) -> int:
    """Threads for them. They share the interpreter with the command, which is to call Podman meanwhile."""
    return max(min(cores, 2), cores * 3 // 8)


@dataclass(frozen=True, slots=True)
class _Files:
    """Which files they are."""

    owner: tuple[int, int]
    """The PID of the command, and its start time."""
    of: str
    """`_identity` of them."""
    descriptors: tuple[int, ...]
    """Within the command, in the order of the manifest."""


def _identity(files: Sequence[FileRecord]) -> str:
    """A digest of what the files are to hold."""
    found = hashlib.sha256()
    for each in files:
        chunks = "".join(f"{chunk.offset}:{chunk.size}:{chunk.plain};" for chunk in each.table.chunks)
        found.update(f"{each.name}\0{each.table.size}\0{chunks}\n".encode())
    return found.hexdigest()


class _Board:
    """What the command says of its work. Written by it alone."""

    def __init__(self, files: _Files) -> None:
        """Raises OSError."""
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        try:
            self.say(AT_WORK, 0)
            words = {"pid": files.owner[0], "start": files.owner[1], "of": files.of}
            text = json.dumps({**words, "descriptors": files.descriptors})
            os.pwrite(self._file, text.encode("ascii"), _HEAD)
        except BaseException:
            self.close()
            raise

    def say(self, state: str, done: int) -> None:
        """How far it is: bytes. Raises OSError."""
        os.pwrite(self._file, json.dumps([state, done]).encode("ascii").ljust(_HEAD), 0)

    def close(self) -> None:
        """Whoever has it open can still read it."""
        with contextlib.suppress(OSError):
            os.close(self._file)


def _read_state(board: int) -> tuple[str, int]:
    """How far the work is that a board tells of; FAILED where it does not say so."""
    try:
        state, done = parse_json(os.pread(board, _HEAD, 0).rstrip(b"\0 "))
        return str(state), int(done)
    except (OSError, ValueError, TypeError):
        return FAILED, 0


def _read_files(board: int) -> _Files:
    """Which files a board tells of. Raises OSError, ValueError, KeyError, TypeError."""
    found = parse_json(os.pread(board, _LARGEST, _HEAD))
    descriptors = tuple(int(each) for each in found["descriptors"])
    return _Files((int(found["pid"]), int(found["start"])), str(found["of"]), descriptors)


class _Ahead:
    """The command's side."""

    def __init__(self, record: Manifest, blobs: Blobs, settings: Memory) -> None:
        """Raises OSError, GpusnapError, OciError, and RuntimeError where no thread is to be had."""
        own = proc.process(os.getpid())
        self._done = 0
        self._board: _Board | None = None
        self._thread: threading.Thread | None = None
        self._rebuilding = Rebuilding(
            record.files,
            blobs,
            "",
            threads=settings.threads or _some_of(copies.cores()),
            ceiling=transfer.ceiling(settings),
            stage=Unnamed(),
            reads=threading.Semaphore(_READS),
            progress=self._count,
        )
        try:
            descriptors = tuple(self._rebuilding.descriptors[each.name] for each in record.files)
            owner = os.getpid(), own.start if own is not None else 0
            self._board = _Board(_Files(owner, _identity(record.files), descriptors))
            thread = threading.Thread(target=self._wait, name="gpusnap-images-ahead", daemon=True)
            thread.start()
            self._thread = thread
        except BaseException:
            self._close()
            raise
        self.environment = {VARIABLE: self._board.path}

    def close(self) -> None:
        """End it, wherever it is. A disk that hangs is not waited for."""
        closing = threading.Thread(target=self._close, name="gpusnap-images-end", daemon=True)
        try:
            closing.start()
        except RuntimeError:
            self._close()
        else:
            closing.join(_ENDING)

    def _close(self) -> None:
        self._rebuilding.close()
        if self._thread is not None:
            self._thread.join()  # before another file may have the board's number
        if self._board is not None:
            self._board.close()

    def _count(self, done: int, _whole: int) -> None:
        self._done = done
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.say(AT_WORK, done)

    def _wait(self) -> None:
        state = FAILED
        try:
            self._rebuilding.result()
            state = DONE
        except (GpusnapError, OciError, OSError):
            pass  # the runtime comes upon it as well
        assert self._board is not None
        with contextlib.suppress(OSError):
            self._board.say(state, self._done)


@contextlib.contextmanager
def ahead(record: Manifest | None, blobs: Blobs, settings: Memory) -> Iterator[Mapping[str, str]]:
    """Put CRIU's images of a checkpoint together while the block runs, where there is RAM for them.

    What the environment of the restore's runtime needs for that; nothing where it is not begun.
    """
    begun: _Ahead | None = None
    if record is not None and 0 < len(record.files) <= _MOST:
        with contextlib.suppress(OSError, GpusnapError, OciError, RuntimeError):
            if space.has_memory_for_images(record, settings):
                begun = _Ahead(record, blobs, settings)
    try:
        yield begun.environment if begun is not None else {}
    finally:
        if begun is not None:
            begun.close()


class Joined:
    """The runtime's side: used as a `Rebuilding`. To be closed."""

    def __init__(
        self,
        board: int,
        owner: tuple[int, int],
        files: Mapping[str, int],
        key: str,
        rebuild: Callable[[], Rebuilding],
    ) -> None:
        """`board` and `files`, by name, are descriptors, closed with this. For the rest see `join`."""
        self._board, self._owner, self._files = board, owner, files
        self._stage = Stage(key)
        self._rebuild = rebuild
        self._own: Rebuilding | None = None
        self.paths: Mapping[str, str] = {}
        """As Rebuilding.paths."""

    @property
    def taken(self) -> bool:
        """Whether they are the command's, after `result`."""
        return self._own is None

    @property
    def begun(self) -> bool:
        """As Rebuilding.begun, for whoever comes behind; from any thread."""
        return self._own.begun if self._own is not None else not self._at_work()

    def result(self) -> None:
        """Return when the images are there, and checked. Raises ImageError."""
        seen, since = -1, time.monotonic()
        while self._at_work():
            done = _read_state(self._board)[1]
            if done != seen:
                seen, since = done, time.monotonic()
            elif time.monotonic() - since > _STUCK:
                break
            time.sleep(_LOOK)
        if _read_state(self._board)[0] == DONE and self._take():
            return
        self._own = self._rebuild()
        self._own.result()
        self.paths = self._own.paths

    def close(self) -> None:
        """As Rebuilding.close."""
        board, self._board = self._board, -1
        files, self._files = self._files, {}
        for each in (board, *files.values()):
            if each >= 0:
                with contextlib.suppress(OSError):
                    os.close(each)
        if self._own is not None:
            self._own.close()
        transfer.free(self._stage)

    def _at_work(self) -> bool:
        """Whether the command still puts them together."""
        return _read_state(self._board)[0] == AT_WORK and proc.is_same(*self._owner)

    def _take(self) -> bool:
        """Give the files names; whether they have some."""
        paths = {}
        try:
            for name, descriptor in self._files.items():
                paths[name] = self._stage.take(descriptor, f"images-{name}")
        except OSError:  # the tmpfs is another one by now, say
            for path in paths.values():
                with contextlib.suppress(OSError):
                    os.unlink(path)
            return False
        self.paths = paths
        return True


def join(
    files: Sequence[FileRecord],
    key: str,
    settings: Memory,
    rebuild: Callable[[], Rebuilding],
    environ: Mapping[str, str] = os.environ,
) -> Joined | None:
    """What `ahead` has begun of these files, for the container of a key; None where it has not.

    `rebuild`: begins it anew, should nothing come of it.
    """
    path = environ.get(VARIABLE)
    if not path or settings.ceiling:
        return None
    with contextlib.ExitStack() as opened:
        try:
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                return None
            board = _open(path, opened)
            found = _read_files(board)
            if found.of != _identity(files) or len(found.descriptors) != len(files):
                return None
            folder = f"/proc/{found.owner[0]}/fd"
            descriptors = {
                each.name: _open(f"{folder}/{number}", opened)
                for each, number in zip(files, found.descriptors, strict=True)
            }
            device = os.stat(tmpfs.FOLDER).st_dev
            for each in files:
                status = os.fstat(descriptors[each.name])
                shape = (stat.S_IFMT(status.st_mode), status.st_dev, status.st_size)
                if shape != (stat.S_IFREG, device, each.table.size):
                    return None
            if not proc.is_same(*found.owner):  # another process may have had that PID
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        joined = Joined(board, found.owner, descriptors, key, rebuild)
        opened.pop_all()
        return joined


def _open(path: str, opened: contextlib.ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    opened.callback(os.close, descriptor)
    return descriptor
