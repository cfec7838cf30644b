"""Starts the slow requests of a restore before the restore's own modules are imported.

Podman takes 40 ms to list its containers. Importing takes 50 ms for the code that checks manifests, 60 ms for
the modules, and 70 ms for those of the load process. In parallel, all of them take as long as the longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpusnap.engines import podman
from gpusnap.runtime_shim.base import question_process, threads
from gpusnap.runtime_shim.records import manifest_json
from gpusnap.runtime_shim.snapshot.loading import start as load_process


@contextmanager
def start_ahead(*, loads: bool) -> Iterator[podman.Listing]:
    """Ask Podman for its containers, and import the modules for checking and loading, while the block runs.

    `loads`: there may be a load process, which is so for everything but an archive.
    """
    prepared = [manifest_json.prepare, *([load_process.prepare] if loads else [])]
    with podman.Listing() as asked:
        question_process.start()  # before any threads exist
        with threads.run_meanwhile(*prepared, name="gpusnap-ahead"):
            yield asked
