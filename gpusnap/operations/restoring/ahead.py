"""What a restore needs of others, asked for before its own modules are imported.

Podman takes 40 ms to list its containers, what a manifest is checked with 50 ms to be imported, and the
modules 60 ms. At the same time they take as long as the longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpusnap.engines import podman
from gpusnap.runtime_shim import question_process, threads
from gpusnap.runtime_shim.records import manifest_json


@contextmanager
def ahead() -> Iterator[podman.Listing]:
    """Have Podman asked for its containers, and the check of manifests prepared, while the block runs."""
    with podman.Listing() as asked:
        question_process.start()  # before there are threads
        with threads.run_meanwhile(manifest_json.prepare, name="gpusnap-schema"):
            yield asked
