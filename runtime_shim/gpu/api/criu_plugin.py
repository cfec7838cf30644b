"""Drivers whose GPU state a plugin of CRIU's saves and restores: what such a plugin is called, and can.

The plugin is a library that CRIU loads, and it does its work within CRIU's dump and restore (criu-plugin.h):
before CRIU stops a task, once it has stopped it, for each device file that it finds, and when all is back. So
there is nothing to lock, to carry or to fill from outside, and the GPU's memory is in CRIU's images.
"""

from __future__ import annotations

from gpusnap.oci.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin of CRIU's for a vendor's GPUs."""

    name: str
    """As it calls itself; CRIU writes it into inventory.img, and refuses a restore without it."""
    file: str
    what: str
    """For messages."""
    remaps: bool
    """Whether it brings a process back on other GPUs than those that it had."""
    into_memory: bool
    """The GPU's memory passes through that of the process, which has to have room for it."""
    running: bool
    """The processes have to run when it begins: those of a paused container cannot answer it."""
    program: str = ""
    """What it runs, and looks for on PATH."""


CUDA = Plugin(
    name="cuda_plugin",
    file="cuda_plugin.so",
    what="CRIU's CUDA plugin",
    remaps=False,
    into_memory=True,
    running=True,
    program="cuda-checkpoint",
)
"""plugins/cuda of CRIU 4.0 and later. No release up to 4.2 takes a map of devices."""

AMDGPU = Plugin(
    name="amdgpu_plugin",
    file="amdgpu_plugin.so",
    what="CRIU's AMD GPU plugin",
    remaps=True,
    into_memory=False,
    running=False,
)
"""plugins/amdgpu of CRIU 3.17 and later. It copies the GPU's memory straight into images of its own."""

KNOWN = (CUDA, AMDGPU)
