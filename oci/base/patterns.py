"""Regular expressions of modules, compiled when they are first used.

Python's re takes 0.1 to 0.4 ms for each (Python 3.11 to 3.13). A command of gpusnap imports eighty, uses
about ten of them, and its user waits for its start.
"""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast

_METHODS = ("fullmatch", "match", "search", "sub", "subn", "split", "findall", "finditer")


class _Later:
    """An `re.Pattern` that is compiled later."""

    def __init__(self, text: Any, flags: int) -> None:
        self._text, self._flags = text, flags

    def __getattr__(self, name: str) -> Any:
        """Compile the pattern, and copy its methods, which then take no longer than its own."""
        if name.startswith("__"):
            raise AttributeError(name)
        pattern = re.compile(self._text, self._flags)
        vars(self).update({each: getattr(pattern, each) for each in _METHODS})
        return getattr(pattern, name)


def compile_later(text: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Like re.compile, for a constant of a module. Errors in the text are raised at its first use.

    The result only has a pattern's methods and attributes: functions of `re` do not accept it.
    """
    return cast("re.Pattern[AnyStr]", _Later(text, flags))
