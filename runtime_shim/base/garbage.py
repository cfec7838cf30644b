"""How often Python searches for garbage in cycles.

By default it does so a hundred times while the modules of a command are imported, for a tenth of that time,
and finds nothing (bench/suspend.py).
"""

from __future__ import annotations

import gc

# New objects until it searches these, and the number of such searches until it searches older ones.
_SELDOM = (50_000, 20, 20)


def look_seldom() -> None:
    """Search less often from now on, in this process and in its children by fork."""
    gc.set_threshold(*_SELDOM)
