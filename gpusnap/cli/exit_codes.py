"""The exit codes of `gpusnap`, and which error has which; the docs of the commands list them from here."""

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
    DONE: "It is done.",
    FAILED: "It could not be done; one sentence on stderr says why.",
    USAGE: "The command line is wrong.",
    NOT_FOUND: "There is no such container, checkpoint, store, file or reference.",
    DAMAGED: "What was found is damaged: cut short, or not what its digests say.",
    INTERRUPTED: "It was interrupted, by Ctrl-C or a signal, and has undone what it had begun.",
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
