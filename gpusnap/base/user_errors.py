"""Errors for users: a sentence, a hint, and a kind.

    GpusnapError
    ├── NotFound    there is no such container, name, file or reference
    ├── Damaged     it exists, but does not match its digests or its format
    ├── NoManifest  it is a checkpoint without gpusnap's manifest
    └── Killed      Podman was killed while it worked for us, and the processes that it started continue

The first two have exit codes of their own. Any other exception of the packages below is a GpusnapError.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from gpusnap.oci.base import errors
from gpusnap.runtime_shim.base.errors import (
    GpusnapError,
    Interrupted,
    ManifestError,
    make_unforeseen,
    suggest_room,
)


class NotFound(GpusnapError):
    """There is no such container, name, file or reference."""


class Damaged(GpusnapError):
    """Something does not match its digests or its format."""

    code = "GPS-601"


class NoManifest(ManifestError):
    """A checkpoint without gpusnap's manifest, such as that of a container without a GPU."""


class Killed(GpusnapError):
    """Podman was killed; the processes that it started continue."""


# From the most specific class to the base: the first match counts.
_KINDS: tuple[tuple[type[errors.OciError], type[GpusnapError], str], ...] = (
    (errors.NotThere, NotFound, "gpusnap ls lists the checkpoints"),
    (errors.Ambiguous, GpusnapError, "give the full name or digest; gpusnap ls lists them"),
    (errors.StoreBusy, GpusnapError, ""),
    (errors.StoreError, GpusnapError, ""),
    (errors.NotInRegistry, NotFound, "check the name, the tag, and your access rights"),
    (errors.Unauthorized, GpusnapError, "log in with podman login, or check the auth file"),
    (errors.NotARegistry, GpusnapError, "check host and port, and whether a proxy responds there"),
    (errors.RegistryError, GpusnapError, ""),
    (errors.ReadOnlyStore, GpusnapError, "remount it for writing"),
    (errors.DiskError, GpusnapError, ""),
    (errors.BlobError, Damaged, "gpusnap verify lists all damage"),
    (errors.NotACheckpoint, GpusnapError, ""),
    (errors.LayoutError, Damaged, ""),
    (errors.ChunkError, Damaged, ""),
    (errors.BrokenArchive, Damaged, "use another copy of it; gpusnap verify lists all damage"),
    (errors.NotAnArchive, GpusnapError, "check the path"),
    (errors.ArchiveError, Damaged, ""),
    (errors.CeilingError, GpusnapError, "raise memory.ceiling in the settings"),
    (errors.Cancelled, Interrupted, ""),
)

# With these errors, the data that could not be read may be undamaged.
_NO_DAMAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE)

# By the engine that restores an image.
_OF_IMAGES = {
    "podman": "run podman pull, then podman container restore IMAGE; or gpusnap restore REF",
    "cri": "use it as the image of a container in a new pod",
}

# Another attempt is useless for these.
_TLS = (
    ("does not speak TLS", "give --plain-http, or http:// before the reference"),
    ("speaks TLS", "omit --plain-http, and http:// before the reference"),
    ("is not trusted", ""),
)
# By the cause, for a registry that cannot be reached.
_CAUSES = (
    ("the host name is unknown", "check the name of the registry, and this host's DNS"),
    ("the DNS server does not respond", "check this host's network and /etc/resolv.conf"),
    ("nothing listens there", "check that the registry is running, and that host and port are right"),
    ("it did not respond in", "check that the registry is running, and that no firewall is in between"),
)
_AGAIN = "run the same command again later"


def is_tls(error: errors.OciError) -> bool:
    """Return whether a registry answers, but its TLS, or the lack of it, causes the error."""
    return isinstance(error, errors.Unreachable) and any(words in str(error) for words, _ in _TLS)


def may_be_whole(error: errors.OciError) -> bool:
    """Return whether what could not be read may be undamaged: reading failed, or access was refused."""
    return _is_no_damage(error) or isinstance(error.__cause__, PermissionError)


def _is_no_damage(error: errors.OciError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _NO_DAMAGE


def make_told_error(error: Exception) -> GpusnapError:
    """Return an error of any kind as one for the user."""
    if isinstance(error, GpusnapError):
        return error
    return failure(error) if isinstance(error, errors.OciError) else make_unforeseen(error)


def failure(error: errors.OciError) -> GpusnapError:
    """Return an error for users: its sentence, and what to do about it."""
    for words, hint in _TLS:
        if isinstance(error, errors.Unreachable) and words in str(error):
            return GpusnapError(str(error), hint=hint, code=error.code)
    if isinstance(error, errors.EngineImage) and error.engine:
        return GpusnapError(str(error), hint=_OF_IMAGES[error.engine], code=error.code)
    if isinstance(error, errors.Unreachable):
        causes = [hint for words, hint in _CAUSES if words in str(error)]
        return GpusnapError(str(error), hint="; ".join((*causes[:1], _AGAIN)), code=error.code)
    if isinstance(error, errors.DiskFull):
        return GpusnapError(
            str(error), hint=suggest_room(error.folder, removing=error.removing), code=error.code
        )
    for kind, ours, hint in _KINDS:
        if isinstance(error, kind):
            if ours is Damaged and _is_no_damage(error):
                return GpusnapError(str(error))
            return ours(str(error), hint=hint, code=error.code)
    return GpusnapError(str(error), code=error.code)


@contextmanager
def convert_errors(*, option: str = "") -> Iterator[None]:
    """Convert errors of the `oci` package into errors for users.

    `option`: the command's option that names another store to write to.
    """
    try:
        yield
    except errors.OciError as error:
        converted = failure(error)
        if option and isinstance(error, errors.ReadOnlyStore):
            converted.hint += f", or name another store with {option}"
        raise converted from error
