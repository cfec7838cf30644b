"""The plugins of CRIU that save and restore GPU state: their names and abilities.

The plugin is a library that CRIU loads, and works within CRIU's dump and restore (criu-plugin.h): before CRIU
stops a task, after it has stopped it, for each device file that it finds, and when everything is restored. So
gpusnap has nothing to lock, to move or to fill, and the GPU's memory is in CRIU's images.
"""

from __future__ import annotations

from gpusnap.oci.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin of CRIU for a vendor's GPUs."""

    name: str
    """Its own name; CRIU writes it into inventory.img, and refuses a restore without it."""
    file: str
    what: str
    """Its description for messages."""
    remaps: bool
    """Whether it can restore a process onto other GPUs."""
    into_memory: bool
    """Whether the GPU's memory passes through that of the process, which must have room for it."""
    running: bool
    """Whether the processes must run when it begins: those of a paused container cannot answer it."""
    program: str = ""
    """The program that it runs, and searches on PATH."""


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
"""plugins/amdgpu of CRIU 3.17 and later. It copies the GPU's memory directly into images of its own."""

KNOWN = (CUDA, AMDGPU)
