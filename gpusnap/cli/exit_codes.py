"""The exit codes of `gpusnap`, and the code of each error; the documentation lists them from here."""

from __future__ import annotations

from collections.abc import Mapping

from gpusnap.base.user_errors import Damaged, NoManifest, NotFound
from gpusnap.runtime_shim.base import stop_signals
from gpusnap.runtime_shim.base.errors import (
    GpusnapError,
    Interrupted,
    ManifestError,
    ManifestVersion,
    UsageError,
)

DONE = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
DAMAGED = 4
HUNG_UP = 129
INTERRUPTED = 130
TERMINATED = 143

MEANINGS: Mapping[int, str] = {
    DONE: "Success.",
    FAILED: "The command failed; a message on stderr gives the reason.",
    USAGE: "The command line is invalid.",
    NOT_FOUND: "There is no such container, checkpoint, store, file or reference.",
    DAMAGED: "What was found is damaged: truncated, or it does not match its digests.",
    HUNG_UP: "As 130, by SIGHUP, which is sent when a terminal is closed.",
    INTERRUPTED: "The command was interrupted by Ctrl-C (SIGINT), and undid what it had started.",
    TERMINATED: "As 130, by SIGTERM.",
}

# From the most specific to the base: the first that fits counts.
_CODES: tuple[tuple[type[GpusnapError], int], ...] = (
    (UsageError, USAGE),
    (NotFound, NOT_FOUND),
    (Damaged, DAMAGED),
    (NoManifest, FAILED),
    (ManifestVersion, FAILED),
    (ManifestError, DAMAGED),
)


def exit_code(error: GpusnapError) -> int:
    """Return the exit code for an error; after a signal, 128 plus the signal's number."""
    if isinstance(error, Interrupted):
        return 128 + stop_signals.find_first()
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)
