"""The name of a container in gpusnap's own files: from its ID and its runtime's root.

An ID is unique only within the real runtime's root (--root; runc(8), crun(1)): each namespace of containerd
is such a root, and another engine may have its own. Two containers with the same ID must not share a journal
entry or files in RAM.

    <ID>@<12 hex digits>     of the SHA-256 of the root, links resolved. No ID contains an "@".
    <ID>                     written by earlier versions; `gpusnap recover` still finds it
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
    """Return the root that a real runtime of this kind uses if `given` is its --root.

    crun: src/libcrun/status.c, get_run_directory; runc: main.go, for root.
    """
    session = environ.get("XDG_RUNTIME_DIR") if kind == "crun" else None
    return given or (f"{session}/{kind}" if session else f"/run/{kind}")


def key(folder: str, container: str) -> str:
    """Return the key of a container from its runtime's root and its ID; the ID if the root is not known."""
    if not folder:
        return container
    digest = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()
    return f"{container}@{digest[:_DIGITS]}"


def id_of(name: str) -> str:
    """Return the ID in a key."""
    return name.partition("@")[0]


def is_key(name: str) -> bool:
    """Whether it can be a key, which becomes part of file names."""
    return _KEY.fullmatch(name) is not None
