"""What the user is told, and the one exception that reaches the user."""

from __future__ import annotations

import os
import sys
from typing import TextIO


class DemoError(Exception):
    """Something is not as it should be: one sentence, what happened and what to do next."""


def say(text: str = "", *, file: TextIO | None = None) -> None:
    print(text, file=file, flush=True)  # at once: children write to the same terminal


def title(text: str) -> None:
    """Announce a step."""
    bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    say(f"\n\x1b[1m{text}\x1b[0m" if bold else f"\n{text}")
