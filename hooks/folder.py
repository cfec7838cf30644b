"""The name of the folder of gpusnap.hooks.place, for who only looks whether there is anything in it."""

from __future__ import annotations

FOLDER = "/run/gpusnap/containers"
