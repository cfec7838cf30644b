"""What a container is called in gpusnap's own files: by its ID and by who runs it.

An ID stands for one container within the real runtime's root alone (--root; runc(8), crun(1)): each namespace
of containerd is such a root, and so may be another engine's. Two containers of the same ID must not share a
journal entry or staged memory.

    <ID>@<12 hex digits>     of the SHA-256 of the root, links resolved. An "@" is in no ID.
    <ID>                     as earlier versions wrote it; `gpusnap recover` still finds it
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping

from gpusnap.oci.base.patterns import compile_later

_DIGITS = 12
_KEY = compile_later(rf"[A-Za-z0-9][\w.+-]{{0,250}}(@[0-9a-f]{{{_DIGITS}}})?", re.ASCII)


def root(given: str | None, kind: str, environ: Mapping[str, str] = os.environ) -> str:
    """The root that a real runtime of this kind uses where `given` is its --root.

    crun: src/libcrun/status.c, get_run_directory; runc: main.go, for who is root.
    """
    session = environ.get("XDG_RUNTIME_DIR") if kind == "crun" else None
    return given or (f"{session}/{kind}" if session else f"/run/{kind}")


def key(folder: str, container: str) -> str:
    """The key of a container by its runtime's root and its ID; the bare ID where the root is not known."""
    if not folder:
        return container
    digest = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()
    return f"{container}@{digest[:_DIGITS]}"


def id_of(name: str) -> str:
    """The ID in a key."""
    return name.partition("@")[0]


def is_key(name: str) -> bool:
    """Whether that can be one: it becomes part of files' names."""
    return _KEY.fullmatch(name) is not None
