"""The Python environment that gpusnap is installed in.

gpusnap installs `oci`, `hooks` and `runtime_shim` beside `gpusnap`, under these import names. Other packages
have such names, too: Oracle's SDK is `oci`. In one environment the one that was installed last has written
over files of the other, and neither can be relied on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata

OURS = ("gpusnap", "hooks", "oci", "runtime_shim")
"""The import names of what gpusnap installs."""


def strangers(
    installed: Callable[[], Mapping[str, list[str]]] = metadata.packages_distributions,
) -> Mapping[str, str]:
    """By import name of ours, the other package of this environment that has it, with its version."""
    found = {}
    for name, owners in installed().items():
        others = sorted({owner for owner in owners if owner.lower() != "gpusnap"})
        if name in OURS and others:
            found[name] = f"{others[0]} {metadata.version(others[0])}"
    return found
