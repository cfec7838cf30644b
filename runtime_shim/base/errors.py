"""What can go wrong, as a tree of exceptions.

    GpusnapError
    ├── UsageError           the command line is not one that Podman, containerd, CRI-O or a person may send
    ├── SettingsError        /etc/gpusnap/gpusnap.toml or an io.gpusnap.* annotation: unknown key or bad value
    ├── ContainerError       the container is not there, not running, paused
    ├── Refused              pre-flight: nothing has been changed
    ├── RuntimeFailed        crun, runc or CRIU, run as a child, failed
    │   └── NotStarted       … or is a program that cannot be started
    ├── ManifestError        the manifest is missing, cut short, or not what the schema says
    │   └── ManifestVersion  … or of a major version that this gpusnap does not know
    ├── ImageError           the checkpoint's directory: not writable, full, not what was dumped
    ├── OtherNamespace       a file of /run/gpusnap has PIDs of another PID namespace
    ├── Interrupted          a signal asked us to stop
    ├── CdiError             a CDI file of this host: see gpusnap.runtime_shim.gpu.cdi.spec
    └── GpuError             the GPU's driver: see gpusnap.runtime_shim.gpu.api.errors

A message is one sentence that says what happened to what; `hint` is the next thing to do; `code`, such as
GPS-312, identifies it in docs/errors.md and for `gpusnap explain` (gpusnap.error_codes has all). A class may
have a code for all its errors, and the place that raises one a more precise one. Podman replaces every
message with the text of ENOENT or EACCES by "OCI runtime attempted to invoke a command that was not found"
(libpod, getOCIRuntimeError). So `reason()` words those two differently, and `sentence()` does so for messages
of crun, runc or CRIU. It keeps the rest of the line, and so the code at its end.
"""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False  # not from typing, whose import takes longer than all of this module
if TYPE_CHECKING:
    from types import TracebackType


class GpusnapError(Exception):
    """The base of all errors that a user may see: one sentence, and a hint."""

    code: str = ""
    """Such as GPS-312; empty if docs/errors.md says no more than the sentence."""

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if code:
            self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle: a child process raises it for its parent. The constructor may word the message."""
        return _make_again, (type(self), self.args), self.__dict__

    def add_hint(self, text: str) -> None:
        """Append a sentence to the hint."""
        self.hint = "; ".join(filter(None, [self.hint, text]))

    def sentence(self) -> str:
        """Message, hint and code as one line for stderr and for the runtime's JSON log."""
        text = printable(" ".join(str(self).split()))
        return with_code(_reword(f"{text}; {printable(self.hint)}" if self.hint else text), self.code)


def _make_again(kind: type[GpusnapError], arguments: tuple[object, ...]) -> GpusnapError:
    """Make what `arguments` belong to, as BaseException.args, without its constructor."""
    return kind.__new__(kind, *arguments)


MAKE_ROOM = "free some space there"
"""The hint for a disk that is full, or nearly full; `suggest_room` says more of a store."""


def suggest_room(folder: str, *, removing: bool = False) -> str:
    """Return the hint for a directory whose disk is full; only in a store can gpusnap free something.

    `removing`: whether that is what failed; `gpusnap gc` needs no room.
    """
    if folder and all(os.path.exists(os.path.join(folder, name)) for name in ("oci-layout", "staging")):
        how = "gpusnap gc" if removing else "gpusnap prune --gc or gpusnap rm --gc"
        return f"{MAKE_ROOM}, such as with {how}"
    return MAKE_ROOM


class UsageError(GpusnapError):
    """A command line that gpusnap-runtime does not accept."""


class SettingsError(GpusnapError):
    """An unknown key or a bad value in the settings file or in an annotation."""

    code = "GPS-111"


class ContainerError(GpusnapError):
    """The container does not exist or is in a state in which it cannot be checkpointed."""


class AlreadyPaused(ContainerError):
    """Somebody has paused the container before the engine was asked to, and may unpause it."""

    def __init__(self, container: str) -> None:
        super().__init__(
            f"the container {container} was paused by another process",
            hint="unpause it, then suspend it",
            code="GPS-203",
        )


class Refused(GpusnapError):
    """Pre-flight found a reason not to start; the container was not touched."""


class RuntimeFailed(GpusnapError):
    """The real runtime (or CRIU under it) failed; `exit_code` is its exit code."""

    def __init__(self, message: str, *, hint: str = "", code: str = "", exit_code: int = 1) -> None:
        super().__init__(message, hint=hint, code=code)
        self.exit_code = exit_code


class NotStarted(RuntimeFailed):
    """A program cannot be started; another runtime may work."""

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message, hint=hint, code=code, exit_code=127)


class ManifestError(GpusnapError):
    """The manifest is missing, truncated, or does not follow its schema."""

    code = "GPS-601"


class ManifestVersion(ManifestError):
    """The manifest is of a major version that this gpusnap does not know."""

    code = "GPS-603"


class ImageError(GpusnapError):
    """The checkpoint's directory cannot be used: not writable, full, or not what was dumped."""


class OtherNamespace(GpusnapError):
    """A file has PIDs of another PID namespace: nothing can be said of any process on this host."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} was written in another PID namespace, whose process IDs are unknown here",
            hint="run gpusnap on the host itself, not in a container or toolbox that has the host's /run",
        )


class Interrupted(GpusnapError):
    """SIGINT, SIGTERM or SIGHUP arrived during the work; what was done has been undone."""


# The texts that Podman replaces (libpod/oci_util.go, getOCIRuntimeError).
_REWORDED = {
    errno.ENOENT: "it does not exist",
    errno.EACCES: "access is refused",
    errno.EPERM: "it is not allowed",
}
_WORDS = {
    "no such file or directory": _REWORDED[errno.ENOENT],
    "permission denied": _REWORDED[errno.EACCES],
    "operation not permitted": _REWORDED[errno.EPERM],
    "executable file not found": "the program was not found",
}


def _reword(text: str) -> str:
    for words, ours in _WORDS.items():
        while (at := text.lower().find(words)) >= 0:
            text = text[:at] + ours + text[at + len(words) :]
    return text


def with_code(text: str, code: str) -> str:
    """Append a code to a line that does not have it yet."""
    return f"{text} [{code}]" if code and f"[{code}]" not in text else text


def split_code(text: str) -> tuple[str, str]:
    """Split a line from the code at its end; "" if there is none."""
    # No regular expression: importing `re` takes longer than a pass-through to crun may take.
    before, _, last = text.rpartition(" [")
    number = last.removeprefix("GPS-").removesuffix("]")
    if last == f"GPS-{number}]" and len(number) == 3 and number.isascii() and number.isdecimal():
        return before, last.removesuffix("]")
    return text, ""


def reason(error: OSError | ValueError) -> str:
    """Return a text for the errno of `error` that Podman does not replace; the text of a ValueError."""
    if not isinstance(error, OSError):
        return str(error)
    number = error.errno or 0
    return _REWORDED.get(number) or os.strerror(number)


class raise_as:  # a class with the name of a function, as contextlib.suppress
    """Raise an OSError of the block as an error of gpusnap: a sentence, which the reason is added to.

    `errors`: which ones. Files that others can write to are read with (OSError, ValueError), see
    gpusnap.oci.base.files.
    """

    def __init__(
        self,
        kind: type[GpusnapError],
        sentence: str,
        *,
        hint: str = "",
        code: str = "",
        errors: tuple[type[OSError | ValueError], ...] = (OSError,),
    ) -> None:
        self._kind, self._sentence, self._hint, self._code = kind, sentence, hint, code
        self._errors = errors

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, OSError | ValueError) and isinstance(error, self._errors):
            said = f"{self._sentence}: {reason(error)}"
            raise self._kind(said, hint=self._hint, code=self._code) from error


_OUT_OF = {
    errno.EMFILE: "raise the limit on open files for gpusnap (ulimit -n, LimitNOFILE= of a unit)",
    errno.ENFILE: "this host has too many files open: end what opens them, or raise fs.file-max",
    errno.ENOMEM: "free some memory and try again",
    errno.EAGAIN: "raise the limit on processes and threads for gpusnap (ulimit -u, pids.max)",
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or raise the quota",
    errno.EIO: "look for I/O errors in the kernel log (dmesg)",
}


def advise(error: OSError) -> str:
    """Return what to do if the kernel has run out of something, or a disk fails; "" for other errors.

    Such an error says nothing about whether a program is installed, or who may open a file.
    """
    return _OUT_OF.get(error.errno or 0, "")


def is_of_no_module(error: BaseException) -> bool:
    """Whether a module is empty: Python takes one whose file it cannot read for a directory.

    Or it lacks a name that a module needs at its import: one of the two is of another version, because
    gpusnap is being upgraded.
    """
    if not isinstance(error, AttributeError):
        return False
    at = _find_origin(error)
    importing = at is not None and at.tb_frame.f_code.co_name == "<module>"
    return getattr(error.obj, "__file__", "") is None or (importing and isinstance(error.obj, type(os)))


def make_unforeseen(error: Exception) -> GpusnapError:
    """Make a sentence for the user from an unexpected exception, with its line of code."""
    if isinstance(error, ImportError) or is_of_no_module(error):
        # Then it is not known whether a container has GPU state, which a plain checkpoint would lose.
        return GpusnapError(
            f"a module of gpusnap is missing: {error}",
            hint="try again if gpusnap is being upgraded; else reinstall it; gpusnap doctor checks it",
            code="GPS-002",
        )
    if isinstance(error, RuntimeError) and is_of_no_thread(error):
        return no_thread(error)
    if isinstance(error, OSError) and _is_of_an_import(error):
        return own_file_unreadable(str(error.filename or "a Python module"), error)
    if isinstance(error, MemoryError):
        return GpusnapError("this host has no memory left for gpusnap", hint="free some memory and try again")
    if isinstance(error, OSError):
        said = (f"{error.filename}: " if error.filename else "") + reason(error)
    else:
        said = f"{type(error).__name__}: {error}"
    trace = _find_origin(error)
    if trace is not None:
        said += f" ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})"
    return GpusnapError(
        said, hint="internal error: please report it, with the output of gpusnap report", code="GPS-001"
    )


def _is_of_an_import(error: OSError) -> bool:
    """Whether it was raised by Python's own import system."""
    trace = _find_origin(error)
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith("<frozen importlib")


def _find_origin(error: BaseException) -> TracebackType | None:
    """Return where it was raised; None if it was not."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def own_file_unreadable(path: str, error: OSError) -> GpusnapError:
    """The error if a file of the installed gpusnap, or of a module that it imports, cannot be read."""
    return GpusnapError(
        f"gpusnap cannot read its own file {path}: {reason(error)}",
        hint="try again, or look for I/O errors in the kernel log (dmesg), and reinstall gpusnap",
        code="GPS-002",
    )


def is_of_no_thread(error: RuntimeError) -> bool:
    """Whether Python raised it because a thread could not be started."""
    return "can't start new thread" in str(error)


def no_thread(error: RuntimeError) -> GpusnapError:
    """The error if Python could not start a thread."""
    return GpusnapError(
        f"a thread cannot be started: {error}",
        hint="raise the limit on processes and threads for gpusnap (ulimit -u, pids.max)",
        code="GPS-003",
    )


def printable(text: str) -> str:
    r"""Make a text safe for a terminal: control sequences are escaped, such as \x1b.

    A process chooses its own name, and an archive the names in it. Control sequences of a terminal (ECMA-48),
    line ends and marks that change the direction of writing are shown and not obeyed.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
