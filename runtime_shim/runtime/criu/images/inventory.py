"""The part of CRIU's inventory that a restore must repeat (images/inventory.proto)."""

from __future__ import annotations

import io
import os

from gpusnap.oci.base.files import read_below
from gpusnap.runtime_shim.base.errors import ImageError, reason
from gpusnap.runtime_shim.records.manifest import INVENTORY
from gpusnap.runtime_shim.runtime.criu.images.messages import Damage, decode_messages

# Bytes; real ones have less than a hundred.
_LARGEST = 1 << 20


def has_closed_connections(images: str) -> bool:
    """Whether the image was dumped with tcp-close, without which CRIU then restores nothing of it.

    False if the inventory cannot be decoded: CRIU will report that better. Raises ImageError, and Refused
    without pycriu.
    """
    try:
        data = read_below(images, INVENTORY, limit=_LARGEST)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise ImageError(f"{os.path.join(images, INVENTORY)} cannot be read: {reason(error)}") from error
    try:
        return any(entry.tcp_close for entry in decode_messages(io.BytesIO(data), len(data), "inventory"))
    except Damage:
        return False
