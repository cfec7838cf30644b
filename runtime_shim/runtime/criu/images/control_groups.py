"""Thaws version 1's freezer in CRIU's image of a container's control groups (images/cgroup.proto)."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

from gpusnap.oci.base.files import read_below, replace_below
from gpusnap.runtime_shim.errors import ImageError, reason
from gpusnap.runtime_shim.runtime.criu.images import pycriu_package
from gpusnap.runtime_shim.runtime.criu.images.messages import Damage, decode_messages, encode_messages

_IMAGE = "cgroup.img"
_STATE, _FROZEN, _THAWED = "freezer.state", "FROZEN", "THAWED"
# Bytes of the image: the most that is read at all, and the most that is decoded into objects. An image with
# thousands of control groups has megabytes.
_LIMIT, _DECODED = 256 << 20, 4 << 20
# CgroupPropEntry (images/cgroup.proto) as it is encoded: field 1, the name, then field 2, the value.
_ENCODED = b"\x0a%c%s\x12%c" % (len(_STATE), _STATE.encode(), len(_FROZEN))


def thaw(image_path: str) -> None:
    """Make a restore from these images leave version 1's freezer thawed, if it is beside version 2.

    CRIU records for every freezer the state of the group that the runtime named to it, which is version 2's.
    It would restore version 1's frozen, where nobody thaws it. It records a freezer only for version 1, so
    with only version 2 the image is not decoded. The container may have ended by now, so only a disk error
    may fail this: a large image, or an image without pycriu, is changed without being decoded. Raises
    ImageError. May be called again. The caller syncs the images.
    """
    path = os.path.join(image_path, _IMAGE)
    try:
        data = read_below(image_path, _IMAGE, limit=_LIMIT)
    except FileNotFoundError:
        return  # CRIU was told to leave control groups alone
    except (OSError, ValueError) as error:
        raise _make_unchanged_error(path, reason(error)) from error
    if _ENCODED + _FROZEN.encode() not in data:
        return
    if len(data) > _DECODED or not pycriu_package.is_there():
        _replace(image_path, data.replace(_ENCODED + _FROZEN.encode(), _ENCODED + _THAWED.encode()))
        return
    try:
        entries = list(decode_messages(io.BytesIO(data), len(data), "cgroup"))
    except Damage as damage:
        raise ImageError(f"{path}, which CRIU just wrote, {damage}", hint="see its dump.log") from None
    frozen = [each for entry in entries for each in _properties(entry) if _is_frozen(each)]
    if not frozen:
        return
    for each in frozen:
        each.value = _THAWED
    _replace(image_path, encode_messages(entries, "cgroup"))


def _replace(image_path: str, data: bytes) -> None:
    try:
        replace_below(image_path, _IMAGE, data, sync=False)
    except OSError as error:
        raise _make_unchanged_error(os.path.join(image_path, _IMAGE), reason(error)) from error


def _is_frozen(prop: Any) -> bool:
    return bool(prop.name == _STATE and prop.value == _FROZEN)


def _properties(entry: Any) -> Iterator[Any]:
    """Yield the properties of all control groups, at any depth."""
    waiting = [group for controller in entry.controllers for group in controller.dirs]
    while waiting:
        group = waiting.pop()
        yield from group.properties
        waiting.extend(group.children)


def _make_unchanged_error(path: str, why: str) -> ImageError:
    return ImageError(
        f"{path} cannot be changed: {why}", hint="check that the checkpoint's directory has free space"
    )
