"""crun's empty folder for masked paths, which a dump and a restore name differently.

crun (seen with 1.28) masks a folder such as /sys/firmware by one empty folder of its own, .empty-directory in
its root, and declares that to CRIU as external: for a restore by its path in the root of that call, for a
dump by its path in the default root, whatever --root says (src/libcrun/criu.c, register_masked_paths_mounts,
where only the restore knows its context). So what was dumped with a --root, as containerd gives one, or in
the session of a user, CRIU refuses to restore: "No mapping for N:(null) mountpoint".

The names are in CRIU's images (criu/images/mnt.proto, ext_key), and each stands for the folder of the crun
that restores.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from gpusnap.oci.base.files import read_below
from gpusnap.runtime_shim.errors import ImageError, reason
from gpusnap.runtime_shim.records.manifest import DriverMount
from gpusnap.runtime_shim.runtime import container_key

__all__ = ["mounts"]

_FOLDER = ".empty-directory"
# Field 18 of a mount, a string: its tag (18 << 3 | 2 as a varint), its length, and the key. Images may come
# from anywhere, and the name goes into a configuration file: so nothing but plain words and slashes.
_NAME = re.compile(rb"\x92\x01([\x80-\xff]?[\x00-\x7f])((?:/[A-Za-z0-9._-]+)+/\.empty-directory)")
# Bytes of an image of mounts; a hundred of them take 20 KiB.
_LIMIT = 16 << 20


def mounts(
    images: str, kind: str, root: str | None, environ: Mapping[str, str] = os.environ
) -> tuple[DriverMount, ...]:
    """What a restore of these images by a runtime of this kind and with this --root has to be told.

    None of it but the folder itself is opened to the container, whatever the images say. Raises ImageError.
    """
    if kind != "crun":
        return ()
    own = os.path.join(container_key.root(root, kind, environ), _FOLDER)
    names: set[str] = set()
    for path in Path(images).glob("mountpoints-*.img"):
        try:
            found = _NAME.findall(read_below(images, path.name, limit=_LIMIT))
        except (OSError, ValueError) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            raise ImageError(f"{path} cannot be read: {why}") from error
        names.update(name.decode("ascii") for length, name in found if _number(length) == len(name))
    return tuple(DriverMount(name, "", own) for name in sorted(names) if name != own)


def _number(varint: bytes) -> int:
    """A varint of at most two bytes (protobuf's encoding)."""
    return varint[0] & 0x7F | (varint[1] << 7 if len(varint) > 1 else 0)
