"""crun's empty directory for masked paths, which a dump and a restore name differently.

crun (seen with 1.28) masks a directory such as /sys/firmware with one empty directory of its own,
.empty-directory in its root, and declares that to CRIU as external. For a restore it uses the path in the
root of that call, for a dump the path in the default root, whatever --root says (src/libcrun/criu.c,
register_masked_paths_mounts, where only the restore knows its context). So CRIU refuses to restore what was
dumped with a --root, as containerd uses one, or in the session of a user: "No mapping for N:(null)
mountpoint".

The names are in CRIU's images (criu/images/mnt.proto, ext_key), and each means the directory of the crun that
restores.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from pathlib import Path

from gpusnap.oci.base.files import read_below
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import ImageError, reason
from gpusnap.runtime_shim.records.manifest import DriverMount
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.runtime.criu.images.messages import Damage, decode_messages

_FOLDER = ".empty-directory"
# Images may come from anywhere, and the name goes into a configuration file. There CRIU ends a word at a
# blank, a quote and a number sign, and a key at its bracket (criu/config.c; criu/external.c).
_NAME = compile_later(rf"(?:/[^/\s\"'#\\\[\]:]+)+/{re.escape(_FOLDER)}")
# Bytes of an image of mounts; a hundred of them take 20 KiB.
_LIMIT = 16 << 20


def mounts(
    images: str, kind: str, root: str | None, environ: Mapping[str, str] = os.environ
) -> tuple[DriverMount, ...]:
    """Return the mounts to declare for a restore of these images by this kind of runtime and --root.

    They open only the empty directory to the container, whatever the images say. Raises ImageError, and
    Refused without pycriu.
    """
    if kind != "crun":
        return ()
    own = os.path.join(container_key.root(root, kind, environ), _FOLDER)
    names: set[str] = set()
    for path in Path(images).glob("mountpoints-*.img"):
        try:
            data = read_below(images, path.name, limit=_LIMIT)
            keys = {mount.ext_key for mount in decode_messages(io.BytesIO(data), len(data), "mountpoints")}
        except Damage as damage:
            raise ImageError(f"{path} {damage}", hint="use another copy of the checkpoint") from None
        except (OSError, ValueError) as error:
            raise ImageError(f"{path} cannot be read: {reason(error)}") from error
        # protobuf in C returns bytes for text that is not UTF-8.
        names.update(
            key for key in keys if isinstance(key, str) and _NAME.fullmatch(key) and key.isprintable()
        )
    return tuple(DriverMount(name, "", own) for name in sorted(names) if name != own)
