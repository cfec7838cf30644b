"""containerd through its ctr: exports and imports images.

ctr takes the socket from CONTAINERD_ADDRESS, /run/containerd/containerd.sock by default.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

from gpusnap.base.user_errors import NotFound
from gpusnap.oci.base.errors import reason
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.layout.documents import DOCUMENT_LIMIT, INDEX, Descriptor
from gpusnap.runtime_shim.base.errors import AlreadyPaused, GpusnapError, advise
from gpusnap.runtime_shim.runtime.child_process import Child, output

if TYPE_CHECKING:
    from gpusnap.oci.tar.compression import Readable

_DIGEST = compile_later(r"sha256:[0-9a-f]{64}", re.ASCII)
_LONGEST = 64 << 10
_PAUSING = 10.0
"""Seconds for a pause that has begun to end."""
# Seconds for an answer, because containerd may unpack an image or pause a container for it, and without a
# byte of a stream, because it may sync a large blob to disk; and for a killed ctr to end.
_PATIENCE, _DYING = 900.0, 5.0
_SHORT = 15.0
"""Seconds for an answer that nothing depends on."""
_PIECE = 1 << 20
_HINT = "check that containerd is running, that CONTAINERD_ADDRESS names its socket, and that you may use it"


class InContainerd:
    """`formats.containerd.Source` of an image in containerd. Raises NotFound, GpusnapError."""

    def __init__(self, namespace: str, name: str) -> None:
        self.word = f"{name} in containerd"
        self.name, self._namespace = name, namespace
        self._all: frozenset[str] | None = None
        found = _find_image(namespace, name)
        if found is None:
            raise NotFound(
                f"containerd has no image {name} in the namespace {namespace}",
                hint=f"ctr -n {namespace} images ls lists them",
            )
        digest, media_type = found
        self.root = Descriptor(media_type, digest, self._size(digest) if media_type == INDEX else 0)

    def has(self, wanted: Descriptor) -> bool:
        """Return whether containerd has that blob."""
        if self._all is None:
            said = _ask(self._namespace, "content", "ls", "--quiet")
            self._all = frozenset(_DIGEST.findall(said))
        return wanted.digest in self._all

    @contextmanager
    def open(self, wanted: Descriptor) -> Iterator[Readable]:
        """Open a blob; read it to its end. Raises GpusnapError."""
        with _start(self._namespace, "content", "get", wanted.digest, out=subprocess.PIPE) as (child, err):
            yield _Output(child, err, f"the blob {wanted.digest}", f"ctr -n {self._namespace} images check")

    def _size(self, digest: str) -> int:
        """Return the size of the index, which is unknown before; of a huge one, a size beyond the limit."""
        with self.open(Descriptor(INDEX, digest, 0)) as file:
            return len(file.read(DOCUMENT_LIMIT + 1))


class _Output:
    """The output of ctr, unless ctr fails."""

    def __init__(self, child: subprocess.Popen[bytes], err: IO[bytes], what: str, look: str) -> None:
        self._child, self._err, self._what, self._look = child, err, what, look

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, fewer only at the end. Raises GpusnapError, also if none comes."""
        assert self._child.stdout is not None
        source = self._child.stdout.fileno()
        data = bytearray()
        while len(data) < size:
            _wait_for(source, select.POLLIN, "content get")
            piece = os.read(source, min(size - len(data), _PIECE))
            if not piece:
                break
            data += piece
        if not data and size and _wait_for_end(self._child, "content get"):
            raise GpusnapError(
                f"containerd cannot export {self._what}: {_read_last_line(self._err)}",
                hint=f"{self._look} shows which images are complete",
                code="GPS-903",
            )
        return bytes(data)


class Target:
    """An import of an image into containerd, from the tar of a layout; a `with` block completes or aborts it.

    Raises GpusnapError.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def __enter__(self) -> Target:
        # Without unpacking, which is a separate step: ctr takes a checkpoint for an image of layers.
        self._open = _start(
            self._namespace,
            "images",
            "import",
            "--no-unpack",
            "-",
            to=subprocess.PIPE,
            out=subprocess.DEVNULL,
        )
        self._child, self._err = self._open.__enter__()
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        return self

    def append(self, data: bytes) -> None:
        """Write a piece of the tar. Raises GpusnapError, also if ctr reads nothing for a long time."""
        assert self._child.stdin is not None
        into, left = self._child.stdin.fileno(), memoryview(data)
        try:
            while left:
                _wait_for(into, select.POLLOUT, "images import")
                left = left[os.write(into, left) :]
        except OSError as error:
            _wait_for_end(self._child, "images import")
            raise GpusnapError(
                f"containerd rejected the image: {_read_last_line(self._err)}", code="GPS-903"
            ) from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._end()
        finally:
            # Before its input ends: ctr could otherwise take an incomplete tar for a complete one.
            if self._child.poll() is None:
                self._child.kill()
            self._open.__exit__(None, None, None)

    def _end(self) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.close()
        except OSError as error:
            raise GpusnapError(
                f"containerd rejected the image: {_read_last_line(self._err)}", code="GPS-903"
            ) from error
        if _wait_for_end(self._child, "images import"):
            raise GpusnapError(f"containerd rejected the image: {_read_last_line(self._err)}", code="GPS-903")


def find_digest(namespace: str, name: str) -> str:
    """Return the digest of an image; "" if there is none of that name. Raises GpusnapError."""
    found = _find_image(namespace, name)
    return found[0] if found is not None else ""


def unpack(namespace: str, digest: str, snapshotter: str) -> None:
    """Unpack an image's files for containers. Raises GpusnapError."""
    chosen = ("--snapshotter", snapshotter) if snapshotter else ()
    _ask(namespace, "snapshots", *chosen, "unpack", digest)


def pause(namespace: str, container_id: str) -> None:
    """Pause a task. Raises AlreadyPaused, GpusnapError."""
    try:
        _ask(namespace, "tasks", "pause", container_id)
    except GpusnapError as error:
        if "paused container" in str(error):  # containerd, cmd/containerd-shim-runc-v2/process/init_state.go
            raise AlreadyPaused(container_id) from error
        raise


def go_on(namespace: str, container_id: str) -> None:
    """Unpause a task, if it is paused or is just being paused. Raises GpusnapError."""
    end = time.monotonic() + _PAUSING
    while (state := _find_state(namespace, container_id)) == "PAUSING" and time.monotonic() < end:
        time.sleep(0.1)
    if state in ("PAUSED", "PAUSING"):
        _ask(namespace, "tasks", "resume", container_id)


def list_states(namespace: str) -> dict[str, str]:
    """Return the states of all tasks, such as RUNNING or PAUSED, by their IDs. Raises GpusnapError.

    Nothing may depend on the answer: containerd has less time for it.
    """
    return _list_states(namespace, patience=_SHORT)


def _find_state(namespace: str, container_id: str) -> str:
    return _list_states(namespace).get(container_id, "")


def _list_states(namespace: str, *, patience: float | None = None) -> dict[str, str]:
    lines = (line.split() for line in _ask(namespace, "tasks", "ls", patience=patience).splitlines())
    return {words[0]: words[-1] for words in lines if words}


def make_no_task_error(task: str, namespace: str) -> NotFound:
    """Return the error for a task that containerd does not have in a namespace; "": in none."""
    where = f"in containerd's namespace {namespace}" if namespace else "in containerd"
    return NotFound(
        f"there is no task {task} {where}", hint=f"see ctr --namespace {namespace or 'NS'} task ls"
    )


def _find_image(namespace: str, name: str) -> tuple[str, str] | None:
    """Return digest and media type of an image."""
    said = _ask(namespace, "images", "ls", f'name=="{name}"')
    for line in said.splitlines():
        words = line.split()
        if len(words) > 2 and words[0] == name and _DIGEST.fullmatch(words[2]):
            return words[2], words[1]
    return None


def _ask(namespace: str, *words: str, patience: float | None = None) -> str:
    """Return the output of ctr."""
    with (
        _open_output() as out,
        _start(namespace, *words, out=out) as (child, err),
    ):
        if _wait_for_end(child, f"{words[0]} {words[1]}", patience=patience):
            raise GpusnapError(
                f"ctr {words[0]} {words[1]} failed: {_read_last_line(err)}", hint=_HINT, code="GPS-901"
            )
        out.seek(0)
        return out.read().decode(errors="replace")


def _wait_for_end(child: subprocess.Popen[bytes], command: str, *, patience: float | None = None) -> int:
    """Return ctr's exit code. Raises GpusnapError if it does not end in time."""
    patience = _PATIENCE if patience is None else patience
    try:
        return child.wait(patience)
    except subprocess.TimeoutExpired:
        raise GpusnapError(
            f"ctr {command} did not finish within {patience:g} s", hint=_HINT, code="GPS-901"
        ) from None


def _wait_for(pipe: int, event: int, command: str) -> None:
    """Wait until a pipe to or from ctr can be used, or is closed. Raises GpusnapError after a long time."""
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(_PATIENCE * 1000):
        raise GpusnapError(
            f"ctr {command} has made no progress for {_PATIENCE:g} s", hint=_HINT, code="GPS-901"
        )


@contextmanager
def _start(
    namespace: str, *words: str, out: int | IO[bytes], to: int = subprocess.DEVNULL
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Run ctr as a child, with a file for its stderr; it has ended at the end of the block."""
    argv: Sequence[str] = ["ctr", "--namespace", namespace, *words]
    with _open_output() as err:
        try:
            child = Child(argv, stdin=to, stdout=out, stderr=err)
        except OSError as error:
            raise _make_not_run_error(error) from error
        try:
            yield child, err
        finally:
            if child.poll() is None:
                child.kill()
            for pipe in (child.stdout, child.stdin):
                if pipe is not None:
                    _close(pipe)
            with suppress(subprocess.TimeoutExpired):  # one that waits for a disk does not go
                child.wait(_DYING)


def _open_output() -> IO[bytes]:
    try:
        return output()
    except OSError as error:
        raise _make_not_run_error(error) from error


def _make_not_run_error(error: OSError) -> GpusnapError:
    lack = advise(error)
    return GpusnapError(
        f"ctr cannot be run: {reason(error)}",
        hint=lack or "install containerd, and check that ctr is in PATH",
        code="" if lack else "GPS-901",
    )


def _close(pipe: IO[bytes]) -> None:
    with suppress(OSError):  # the rest in it has no reader
        pipe.close()


def _read_last_line(err: IO[bytes]) -> str:
    err.seek(max(0, err.seek(0, os.SEEK_END) - _LONGEST))
    lines = [line.strip() for line in err.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("ctr: ") if lines else "it reported no reason"
