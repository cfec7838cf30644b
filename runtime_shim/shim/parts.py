"""Whether all of gpusnap is there: everything that a checkpoint or a restore may import is imported.

`gpusnap doctor` has gpusnap-runtime do this as the engines start it, by their interpreter and with next to no
environment, because a package that is missing there would show only in the middle of a checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import sys

from gpusnap.runtime_shim._version import __version__

PACKAGES = ("gpusnap.runtime_shim", "gpusnap.oci")
REQUIRED = ("jsonschema", "urllib3", "yaml", "zstandard")
"""What these packages import of others, some of it late."""


def import_all() -> int:
    """Import them; how many modules. Raises ImportError."""
    names = [*REQUIRED, *PACKAGES]
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        # A package below that cannot be imported is passed over here, and named by the loop.
        names += [each.name for each in pkgutil.walk_packages(path, f"{package}.")]
    for name in names:
        importlib.import_module(name)
    return len(names)


def report_modules() -> int:
    """Import them, and print the version and the interpreter; the exit code."""
    import_all()
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{__version__} {sys.executable}\n".encode("utf-8", "surrogateescape"))
    return 0
