"""The console script gpusnap-hook: `gpusnap-hook STAGE`, one small program for each stage.

    gpusnap-hook precreate [--criu-config PATH]    a configuration on stdin, and on stdout
    gpusnap-hook createRuntime                     a container's state on stdin
    gpusnap-hook poststop                          a container's state on stdin

No hook may make a container fail, so the exit code is always 0, and an error is one line on stderr. precreate
then prints the configuration unchanged, byte for byte. Every container of the host may have to wait for
imports here, so each module is imported only if it has something to do, and JSON is parsed only if a text in
it says that there may be a GPU, or if there are records that may have to be removed.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # not from typing, whose import takes longer than all of this module
if TYPE_CHECKING:
    from collections.abc import Callable

STAGES = ("precreate", "createRuntime", "poststop")
SECONDS = 5.0
"""The hook's own limit, less than the timeout in the hooks.d files: a killed hook fails the container."""

# Seconds after which it is enforced once more, until the hook gives up.
_AGAIN = 1.0

_USAGE = "usage: gpusnap-hook precreate [--criu-config PATH] | createRuntime | poststop"
_CONFIG_LIMIT = 16 << 20
_STATE_LIMIT = 1 << 20
_BLOCK = 1 << 16


class _TimeUp(BaseException):
    """Not an Exception, so that no handler on the way takes it for one of its own."""


def main(words: list[str] | None = None, *, source: int = 0, target: int = 1) -> int:
    """Run the hook that `words` name (by default those of sys.argv); return the exit code, always 0.

    `source` and `target` are the descriptors of stdin and stdout.
    """
    stage, *options = (sys.argv[1:] if words is None else words) or [""]
    if stage in ("-h", "--help"):
        try:
            _write(target, f"{_USAGE}\n".encode())
        except BrokenPipeError:
            return 0
    elif stage == "precreate":
        _run_precreate(options, source, target)
    elif stage not in STAGES:
        _say(f"there is no stage {stage[:80]!r}; {_USAGE}" if stage else _USAGE)
    else:
        _run_limited(lambda: _with_state(stage, options, source))
    return 0


def _run_precreate(options: list[str], source: int, target: int) -> None:
    came: list[bytes] = []
    answer: list[bytes] = []
    whole = [False]

    def work() -> None:
        whole[0] = _read(source, came, _CONFIG_LIMIT)
        data = b"".join(came)
        path = _criu_config(options)
        if not whole[0]:
            raise OverflowError(f"the configuration is larger than {_CONFIG_LIMIT >> 20} MiB")
        from gpusnap.hooks.config import may_have_gpu

        if may_have_gpu(data):
            from gpusnap.hooks.precreate import prepare_config

            answer.append(prepare_config(data, path))

    done = _run_limited(work)
    try:
        _write(target, b"".join(answer if done and answer else came))
        while not whole[0] and (block := os.read(source, _BLOCK)):
            _write(target, block)
    except OSError as error:
        if done:  # otherwise the error was printed
            _say(f"the configuration cannot be passed on: {error.strerror}")


def _criu_config(options: list[str]) -> str:
    if not options:
        return ""
    name, equals, value = options[0].partition("=")
    values = [value, *options[1:]] if equals else options[1:]
    if name != "--criu-config" or len(values) != 1 or not values[0].startswith("/"):
        raise ValueError(f"{' '.join(options)[:80]!r} is not --criu-config with an absolute path")
    return values[0]


def _with_state(stage: str, options: list[str], source: int) -> None:
    came: list[bytes] = []
    if options:
        raise ValueError(f"the stage {stage} takes no options")
    if not _read(source, came, _STATE_LIMIT):
        raise OverflowError(f"the container's state is larger than {_STATE_LIMIT >> 20} MiB")
    if stage == "createRuntime":
        from gpusnap.hooks.create_runtime import record_gpus as act
    else:
        from gpusnap.hooks.poststop import remove_record as act
    act(b"".join(came))


def _read(source: int, came: list[bytes], limit: int) -> bool:
    """Read to the end, or until more than `limit` bytes arrived; return whether it was the end."""
    size = 0
    while size <= limit:
        block = os.read(source, _BLOCK)
        if not block:
            return True
        came.append(block)
        size += len(block)
    return False


def _write(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


def _run_limited(work: Callable[[], None]) -> bool:
    """Do the work within SECONDS; return whether it was done. Any error is one line on stderr."""
    # The C module of `signal`, whose enums take a millisecond.
    import _signal  # type: ignore[import-not-found]

    def ring(number: int, frame: object) -> None:
        raise _TimeUp

    try:
        before = _signal.signal(_signal.SIGALRM, ring)
        try:
            # Again and again: Python swallows an exception that is raised within an object's __del__.
            _signal.setitimer(_signal.ITIMER_REAL, SECONDS, _AGAIN)
            work()
        finally:
            _signal.setitimer(_signal.ITIMER_REAL, 0)
            _signal.signal(_signal.SIGALRM, before)
    except _TimeUp:
        _say(f"gave up after {SECONDS:g} s")
        return False
    except BaseException as error:
        sentence = getattr(error, "sentence", None)
        _say(sentence() if sentence else f"{error}" or type(error).__name__)
        return False
    return True


def _say(text: str) -> None:
    line = " ".join(text.split())[:1000]
    try:
        os.write(2, f"gpusnap-hook: {line}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        return  # nobody reads it


if __name__ == "__main__":
    sys.exit(main())
