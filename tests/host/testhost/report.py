"""What the user is told."""

from __future__ import annotations

import sys


class HostError(Exception):
    """Something that the user has to know: what happened to what, and what to do next."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}. {hint}" if hint else message)


def say(message: str) -> None:
    """Announce a step on stderr: stdout belongs to the command that is run."""
    print(f"test host: {message}", file=sys.stderr, flush=True)
