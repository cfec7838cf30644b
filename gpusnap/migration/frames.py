"""The protocol between two gpusnap processes, over two pipes such as those of ssh.

    MAGIC          first, from the one that was started, so that a shell's greeting can be recognised
    4 bytes        the length of what follows, big endian
    JSON object    a frame; with "payload": N, so many raw bytes follow it

During work, a frame {"alive": MARK} is sent every few seconds. So silence means that the other side, or the
connection, is gone: nothing here waits for a byte longer than `SILENCE`. MARK says what the side works on,
and how far that is: a side that is alive but makes no progress is waited for no longer than `PATIENCE`.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gpusnap.oci.base.json_text import parse_json
from gpusnap.runtime_shim.base.errors import GpusnapError, printable, reason

VERSION = 1
MAGIC = b"gpusnap-migrate 1\n"
SILENCE = 30.0
"""Seconds without a byte, after which the other side counts as gone."""
PATIENCE = 900.0
"""Seconds without progress, after which the other side counts as stuck."""
LONGEST_PATIENCE = 86400
# Seconds between two alive frames.
_EVERY = 5.0
_LONGEST = 1 << 20
_PIECE = 1 << 20
_ALIVE = "alive"


class LinkLost(GpusnapError):
    """The other side ended, is silent, or sent something that is no frame."""

    code = "GPS-820"


class Channel:
    """One end. Any thread may send; only one at a time receives."""

    def __init__(
        self, reading: int, writing: int, who: str, *, silence: float = SILENCE, every: float = _EVERY
    ) -> None:
        """`reading`, `writing`: descriptors, which the caller closes; `who`: the other side, for messages.

        every: seconds between two alive frames.
        """
        self._reading, self._writing, self.who = reading, writing, who
        self._silence, self._every = silence, every
        self.patience = PATIENCE
        self._sending = threading.Lock()
        os.set_blocking(writing, False)

    def send(self, frame: Mapping[str, Any], payload: Iterable[bytes] = (), size: int = 0) -> None:
        """Send a frame, followed by `size` bytes. Raises LinkLost, and the errors of `payload`.

        After a payload of another size nothing can be sent any more: it would be taken for the rest of it.
        """
        data = json.dumps({**frame, **({"payload": size} if size else {})}).encode()
        with self._sending:
            self._write(len(data).to_bytes(4, "big") + data)
            for piece in payload:
                self._write(piece[: max(0, size)])
                size -= len(piece)
            if size:
                raise LinkLost(
                    f"a file changed while it was sent to {self.who}: it is {abs(size)} bytes "
                    f"{'shorter' if size > 0 else 'longer'} than before",
                    hint="gpusnap verify lists all damage; then run the same command again",
                )

    def greet(self) -> None:
        """Send the greeting of the side that was started. Raises LinkLost."""
        with self._sending:
            self._write(MAGIC)

    def expect_greeting(self) -> None:
        """Wait for the other side's greeting. Raises LinkLost."""
        found = b""
        while len(found) < len(MAGIC) and MAGIC.startswith(found):
            found += self._read(len(MAGIC) - len(found))
        if found != MAGIC:
            with suppress(LinkLost):
                found += self._read(200, patience=1.0)  # the rest of the line
            text = printable(found.decode(errors="replace").strip())[:200]
            raise LinkLost(
                f"{self.who} did not respond as gpusnap does, but with: {text}",
                hint="check that both hosts have the same version of gpusnap, and that the shell there "
                "prints nothing when it starts",
                code="GPS-821",
            )

    def receive(self) -> dict[str, Any]:
        """Return the next frame, without alive frames. Raises LinkLost."""
        limit, mark = time.monotonic() + self.patience, None
        while True:
            length = int.from_bytes(self._read_all(4), "big")
            if not 0 < length <= _LONGEST:
                raise self._make_broken_error(f"a frame of {length} bytes")
            try:
                frame = parse_json(self._read_all(length))
            except (ValueError, RecursionError):
                raise self._make_broken_error("a frame that is not JSON") from None
            if not isinstance(frame, dict) or not _is_size(frame.get("payload", 0)):
                raise self._make_broken_error("a frame that is not an object, or whose payload has no size")
            if _ALIVE not in frame:
                return frame
            if frame[_ALIVE] != mark:
                limit, mark = time.monotonic() + self.patience, frame[_ALIVE]
            elif time.monotonic() > limit:
                raise LinkLost(
                    f"{self.who} has made no progress for {self.patience:g} s{_format_mark(mark)}",
                    hint="check what it waits for; --patience gives it more time",
                )

    def payload(self, size: int) -> Iterator[bytes]:
        """Yield the bytes that follow a frame, in pieces; all must be read. Raises LinkLost."""
        while size:
            piece = self._read(min(size, _PIECE))
            size -= len(piece)
            yield piece

    @contextmanager
    def keep_alive(
        self, mark: Callable[[], object] = lambda: "", lost: Callable[[], object] = lambda: None
    ) -> Iterator[None]:
        """Send alive frames while the block runs; `lost` is called once if they cannot be sent.

        mark: returns what is being done, and how far it is, for JSON.
        """
        done = threading.Event()

        def work() -> None:
            while not done.wait(self._every):
                try:
                    self.send({_ALIVE: mark()})
                except LinkLost:
                    if not done.is_set():
                        lost()
                    return

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(self._silence)

    def _make_broken_error(self, what: str) -> LinkLost:
        return LinkLost(f"{self.who} sent {what}", hint=_AGAIN, code="GPS-821")

    def _read_all(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            found += self._read(size - len(found))
        return found

    def _read(self, most: int, *, patience: float | None = None) -> bytes:
        if not select.select([self._reading], [], [], patience or self._silence)[0]:
            raise LinkLost(f"{self.who} has sent nothing for {self._silence:g} s", hint=_AGAIN)
        try:
            data = os.read(self._reading, most)
        except OSError as error:
            raise LinkLost(f"cannot read from {self.who}: {reason(error)}", hint=_AGAIN) from error
        if not data:
            raise LinkLost(f"the connection to {self.who} ended", hint=_AGAIN)
        return data

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        end = time.monotonic() + self._silence
        while view:
            if not select.select([], [self._writing], [], max(0.0, end - time.monotonic()))[1]:
                raise LinkLost(f"{self.who} has received nothing for {self._silence:g} s", hint=_AGAIN)
            try:
                sent = os.write(self._writing, view[:_PIECE])
            except BlockingIOError:
                continue
            except OSError as error:
                raise LinkLost(f"the connection to {self.who} ended: {reason(error)}", hint=_AGAIN) from error
            view = view[sent:]
            end = time.monotonic() + self._silence


def _format_mark(mark: object) -> str:
    """Return what the side works on, from the value of Progress.mark."""
    match mark:
        case [str(stage), _] if stage:
            return f": {printable(stage)[:100]}"
    return ""


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


_AGAIN = "check both hosts and the network, then run the same command again; what was sent stays there"


def error_frame(error: GpusnapError) -> dict[str, Any]:
    """Return a frame with an error for the other side."""
    return {"error": " ".join(str(error).split()), "hint": error.hint, "code": error.code}


def decode_error(frame: Mapping[str, Any], who: str) -> GpusnapError:
    """Return the error that the other side sent, as one of ours."""
    said, hint, code = (str(frame.get(key, ""))[:4000] for key in ("error", "hint", "code"))
    return GpusnapError(f"{who}: {printable(said)}", hint=printable(hint), code=code)
