"""A runtime that waits at a command until the test lets it go on: a moment lasts as long as it is needed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import shimhost

_SCRIPT = """#!/bin/sh
case " $* " in
*" --help "*) ;;
*" {command} "*)
    {first}
    echo $$ $PPID >{met}.new; mv {met}.new {met}
    while [ ! -e {go} ]; do sleep 0.02; done
    {then};;
esac
exec /usr/bin/{real} "$@"
"""


@dataclass(frozen=True)
class Held:
    """The runtime, as it is held."""

    _met: Path
    _go: Path

    def met(self) -> bool:
        """Whether it has come to the command."""
        return self._met.exists()

    @property
    def pid(self) -> int:
        return int(self._met.read_text().split()[0])

    @property
    def caller(self) -> int:
        """The PID of gpusnap, which has started it."""
        return int(self._met.read_text().split()[1])

    def let_go(self) -> None:
        self._go.touch()

    def kill(self) -> None:
        """End it instead."""
        os.kill(self.pid, signal.SIGKILL)


@contextmanager
def held(folder: Path, real: str, command: str, settings: str, *, after: bool = False) -> Iterator[Held]:
    """Hold a real runtime (crun, runc) at `command`, before it does it or, with `after`, when it has done it.

    `settings` is what the settings file has but for the runtime. It goes on at the end of the context.
    """
    wrapper, it = folder / real, Held(folder / "met", folder / "go")
    run = f'/usr/bin/{real} "$@"; code=$?'
    wrapper.write_text(
        _SCRIPT.format(
            command=command,
            first=run if after else ":",
            then="exit $code" if after else ":",
            met=it._met,
            go=it._go,
            real=real,
        )
    )
    wrapper.chmod(0o755)
    shimhost.write_settings(f'runtime = "{wrapper}"\n{settings}')
    try:
        yield it
    finally:
        it.let_go()
        with suppress(FileNotFoundError):
            it._met.unlink()
        shimhost.write_settings(f'runtime = "{real}"\n{settings}')
