"""Regular expressions of modules, compiled when they are first used.

Python's re takes 0.1 to 0.4 ms for each (Python 3.11 to 3.13). A command of gpusnap imports eighty, uses some
ten of them, and everybody waits for its start.
"""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast

_METHODS = ("fullmatch", "match", "search", "sub", "subn", "split", "findall", "finditer")


class _Later:
    """An `re.Pattern` to be."""

    def __init__(self, text: Any, flags: int) -> None:
        self._text, self._flags = text, flags

    def __getattr__(self, name: str) -> Any:
        """What the pattern has. Its methods are ours from then on, and cost no more than its own."""
        if name.startswith("__"):
            raise AttributeError(name)
        pattern = re.compile(self._text, self._flags)
        vars(self).update({each: getattr(pattern, each) for each in _METHODS})
        return getattr(pattern, name)


def compile_later(text: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """As re.compile, for a constant of a module. What is wrong with the text is said at its first use.

    Only its methods and attributes are a pattern's: functions of `re` do not take it.
    """
    return cast("re.Pattern[AnyStr]", _Later(text, flags))
