"""Thaws version 1's freezer in CRIU's image of a container's control groups (images/cgroup.proto)."""

from __future__ import annotations

import os

from gpusnap.oci.base.files import read_below, replace_below
from gpusnap.runtime_shim.base.errors import ImageError, reason

_IMAGE = "cgroup.img"
_STATE, _FROZEN, _THAWED = b"freezer.state", b"FROZEN", b"THAWED"
# Bytes of the image; one with thousands of control groups has megabytes.
_LIMIT = 256 << 20
# CgroupPropEntry (images/cgroup.proto) as it is encoded: field 1, the name, then field 2, the value. The name
# of a control group or a network interface has no newline, with which field 1 begins (linux, cgroup_mkdir,
# cgroup1_rename, dev_valid_name).
_BEFORE = b"\x0a%c%s\x12%c" % (len(_STATE), _STATE, len(_FROZEN))


def thaw(image_path: str) -> None:
    """Make a restore from these images leave version 1's freezer thawed, if it is beside version 2.

    CRIU records for every freezer the state of the group that the runtime named to it, which is version 2's.
    It would restore version 1's frozen, where nobody thaws it. It records a freezer only for version 1. The
    image is changed without being decoded: users wait for it, and both states have the same length. Raises
    ImageError, only for a disk error: the container may have ended by now. May be called again. The caller
    syncs the images.
    """
    path = os.path.join(image_path, _IMAGE)
    try:
        data = read_below(image_path, _IMAGE, limit=_LIMIT)
        if _BEFORE + _FROZEN in data:
            replace_below(image_path, _IMAGE, data.replace(_BEFORE + _FROZEN, _BEFORE + _THAWED), sync=False)
    except FileNotFoundError:
        return  # CRIU was told to leave control groups alone
    except (OSError, ValueError) as error:
        raise ImageError(
            f"{path} cannot be changed: {reason(error)}",
            hint="check that the checkpoint's directory has free space",
        ) from error
