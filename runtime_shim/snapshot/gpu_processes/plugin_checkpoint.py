"""Checkpoints whose GPU state a CRIU plugin saves, without the steps of the driver.

AMD's plugin always does this; NVIDIA's does if the setting nvidia.driver says so. gpusnap then locks, moves
and fills nothing, because CRIU calls the plugin, and the GPUs' memory is in CRIU's images.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.gpu import holders
from gpusnap.runtime_shim.gpu.api.criu_plugin import Plugin
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.criu import plugins
from gpusnap.runtime_shim.settings import Memory, Settings
from gpusnap.runtime_shim.snapshot.memory.capture import Chunks
from gpusnap.runtime_shim.snapshot.memory.destination import StoreDestination
from gpusnap.runtime_shim.snapshot.memory.pages import Pages
from gpusnap.runtime_shim.snapshot.preflight.checks import find_lasting


def make_pages(
    image_path: str, container: containers.Container, memory: Memory, destination: StoreDestination | None
) -> Pages:
    """The pages for this case: in CRIU's images, and with these in a store if there is a destination."""
    if destination is not None:
        return Chunks(image_path, container.key, memory, container.bundle, destination=destination)
    return Pages(image_path, container.key, memory.threads)


def refuse_impossible(
    driver: Driver, container: containers.Container, processes: Collection[proc.Process], settings: Settings
) -> None:
    """Refuse, before anything is changed, what CRIU's plugin cannot do; without a plugin, do nothing."""
    if (plugin := driver.plugin) is None:
        return
    if holders(driver, [process.pid for process in processes]):
        plugins.find(plugin, settings)
    if plugin.running and container.status == "paused":
        raise Refused(
            f"container {container.id} is paused, but {plugin.what} needs its processes to run",
            hint='unpause it first; with nvidia.driver = "native" it may stay paused',
            code="GPS-203",
        )


def refuse_inherited(plugin: Plugin, find: Callable[[], Mapping[proc.Process, Sequence[str]]]) -> None:
    """Refuse if processes hold GPU files without GPU state; `find` returns them.

    A process that is just starting to use a GPU looks the same, and gets a second for that.
    """
    for process, files in find_lasting(find).items():
        raise Refused(
            f"process {process.pid} ({process.comm}) has {files[0]} open but no GPU state of its own; "
            f"{plugin.what} leaves that file to CRIU, which cannot dump it",
            hint='start workers with spawn; for NVIDIA GPUs, nvidia.driver = "native" closes such files',
            code="GPS-213",
        )
