"""What CRIU's inventory image says of a dump, as far as a restore has to repeat it.

The image is a magic number, the length of a message and the message (criu/include/magic.h; criu/image.c,
img_write_magic; criu/protobuf.c, pb_write_one; images/inventory.proto).
"""

from __future__ import annotations

import os
import struct

from gpusnap.oci.base.files import read_below
from gpusnap.runtime_shim.errors import ImageError, reason
from gpusnap.runtime_shim.records.manifest import INVENTORY
from gpusnap.runtime_shim.runtime.criu.images.messages import MAGIC, Damage, fields

__all__ = ["has_closed_connections"]

_HEAD = struct.Struct("<II")
_TCP_CLOSE = 10
# Bytes; real ones have less than a hundred.
_LARGEST = 1 << 20


def has_closed_connections(images: str) -> bool:
    """Whether the image was dumped with tcp-close, without which CRIU then restores nothing of it.

    False where the inventory cannot be understood: CRIU will say so better. Raises ImageError.
    """
    try:
        data = read_below(images, INVENTORY, limit=_LARGEST)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise ImageError(f"{os.path.join(images, INVENTORY)} cannot be read: {why}") from error
    if len(data) < _HEAD.size:
        return False
    magic, size = _HEAD.unpack_from(data)
    if magic != MAGIC["inventory"]:
        return False
    try:
        numbers, _ = fields(data[_HEAD.size : _HEAD.size + size], "inventory")
    except Damage:
        return False
    return bool(numbers.get(_TCP_CLOSE))
