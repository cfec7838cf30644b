"""What CRIU's inventory image says of a dump, as far as a restore has to repeat it.

The image is a magic number, the length of a message and the message (criu/include/magic.h; criu/image.c,
img_write_magic; criu/protobuf.c, pb_write_one; images/inventory.proto).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

from runtime_shim.errors import ImageError, reason
from runtime_shim.image import INVENTORY

__all__ = ["has_closed_connections"]

_HEAD = struct.Struct("<II")
_MAGIC = 0x58313116
_TCP_CLOSE = 10
# Bytes; real ones have less than a hundred.
_LARGEST = 1 << 20
# protobuf.dev, Encoding: how a field's value is stored.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def has_closed_connections(images: str) -> bool:
    """Whether the image was dumped with tcp-close, without which CRIU then restores nothing of it.

    False where the inventory cannot be understood: CRIU will say so better. Raises ImageError.
    """
    path = os.path.join(images, INVENTORY)
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ImageError(f"{path} cannot be read: {reason(error)}") from error
    if len(data) < _HEAD.size:
        return False
    magic, size = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        return False
    try:
        return any(
            number == _TCP_CLOSE and bool(value)
            for number, value in _numbers(data[_HEAD.size : _HEAD.size + size])
        )
    except (IndexError, ValueError):
        return False


def _numbers(message: bytes) -> Iterator[tuple[int, int]]:
    """(Field, value) of a message's varints. Raises IndexError or ValueError where it is none."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == _VARINT:
            value, at = _varint(message, at)
            yield key >> 3, value
        elif key & 7 == _BYTES:
            length, at = _varint(message, at)
            at += length
        elif key & 7 in (_FIXED64, _FIXED32):
            at += 8 if key & 7 == _FIXED64 else 4
        else:
            raise ValueError(f"type {key & 7} of a field")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A varint, and where the next byte is. Raises IndexError at the message's end."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
