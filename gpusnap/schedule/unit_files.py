"""Encodes names and command lines for systemd's unit files (systemd.unit(5), systemd.service(5))."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpusnap.oci.base.patterns import compile_later

_PLAIN = compile_later(rb"[A-Za-z0-9:_.]")


def escape(text: str) -> str:
    """Return a text as a part of a unit's name, as systemd-escape(1) does."""
    pieces = []
    for at, byte in enumerate(text.encode("utf-8", "surrogateescape")):
        one = bytes([byte])
        if one == b"/":
            pieces.append("-")
        elif _PLAIN.fullmatch(one) and not (at == 0 and one == b"."):
            pieces.append(one.decode())
        else:
            pieces.append(f"\\x{byte:02x}")
    return "".join(pieces)


def unescape(text: str) -> str:
    """Return the text that `escape` has encoded."""
    found = re.sub(rb"\\x([0-9a-f]{2})|-", lambda m: bytes([int(m[1], 16)]) if m[1] else b"/", text.encode())
    return found.decode("utf-8", "surrogateescape")


def value(text: str) -> str:
    """Return a text as the value of a setting with specifiers, such as Description=. Raises ValueError."""
    _check(text)
    return text.replace("%", "%%")


def command_line(words: Iterable[str]) -> str:
    """Return a program and its arguments for ExecStart=, without any expansion. Raises ValueError."""
    return " ".join(map(_word, words))


def path(text: str) -> str:
    """Return a path for RequiresMountsFor=, which takes several. Raises ValueError."""
    _check(text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if re.fullmatch(r"[A-Za-z0-9_./:@=+,-]+", text) else f'"{escaped}"'


def _word(text: str) -> str:
    return path(text).replace("$", "$$")


def _check(text: str) -> None:
    if any(ord(each) < 0x20 or ord(each) == 0x7F for each in text):
        raise ValueError(f"{text[:80]!r} has control characters, which unit files do not allow")
    if any(0xD800 <= ord(each) < 0xE000 for each in text):  # bytes that os.fsdecode could not decode
        raise ValueError(f"{text[:80]!r} is not UTF-8, which unit files must be")
