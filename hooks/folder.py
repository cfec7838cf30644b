"""The name of the directory of gpusnap.hooks.place, for callers that only check whether it is empty."""

from __future__ import annotations

FOLDER = "/run/gpusnap/containers"
