"""gpusnap's OCI hooks: small programs that an engine or a runtime runs at the stages of a container's life.

`gpusnap-hook STAGE` (gpusnap.hooks.main) is the program; gpusnap.hooks.hooksd writes the files with which
Podman runs it.
"""

from __future__ import annotations

RECORDS = "/run/gpusnap/containers"
"""The directory with the records of running containers, see gpusnap.hooks.record_directories."""
