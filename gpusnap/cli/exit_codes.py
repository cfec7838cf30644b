"""The exit codes of `gpusnap`, and the code of each error; the documentation lists them from here."""

from __future__ import annotations

from collections.abc import Mapping

from gpusnap.runtime_shim.errors import GpusnapError, Interrupted, ManifestError, ManifestVersion, UsageError
from gpusnap.user_errors import Damaged, NoManifest, NotFound

DONE = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
DAMAGED = 4
INTERRUPTED = 130

MEANINGS: Mapping[int, str] = {
    DONE: "Success.",
    FAILED: "The command failed; a message on stderr gives the reason.",
    USAGE: "The command line is invalid.",
    NOT_FOUND: "There is no such container, checkpoint, store, file or reference.",
    DAMAGED: "What was found is damaged: truncated, or it does not match its digests.",
    INTERRUPTED: "The command was interrupted by Ctrl-C or a signal, and undid what it had started.",
}

# From the most specific to the base: the first that fits counts.
_CODES: tuple[tuple[type[GpusnapError], int], ...] = (
    (UsageError, USAGE),
    (NotFound, NOT_FOUND),
    (Damaged, DAMAGED),
    (NoManifest, FAILED),
    (ManifestVersion, FAILED),
    (ManifestError, DAMAGED),
    (Interrupted, INTERRUPTED),
)


def exit_code(error: GpusnapError) -> int:
    """The exit code for an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)
