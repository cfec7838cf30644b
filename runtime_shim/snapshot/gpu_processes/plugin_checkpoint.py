"""Checkpoints and restores whose GPU state a CRIU plugin saves, without the steps of the driver.

AMD's plugin always does this; NVIDIA's does if the setting nvidia.driver says so. gpusnap then locks, moves
and fills nothing, because CRIU calls the plugin, and the GPUs' memory is in CRIU's images. A restore uses the
method of its checkpoint, whatever this host's settings say, because no other method can restore it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from gpusnap.runtime_shim.errors import GpusnapError, Refused
from gpusnap.runtime_shim.gpu import driver_of, holders
from gpusnap.runtime_shim.gpu.api.criu_plugin import KNOWN, Plugin
from gpusnap.runtime_shim.gpu.api.driver import Driver, Host, ProcessState
from gpusnap.runtime_shim.gpu.api.gpu_map import GpuMap, is_meant
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.criu import plugins
from gpusnap.runtime_shim.settings import Memory, Settings
from gpusnap.runtime_shim.snapshot.memory.capture import Chunks
from gpusnap.runtime_shim.snapshot.memory.destination import StoreDestination
from gpusnap.runtime_shim.snapshot.memory.pages import Pages
from gpusnap.runtime_shim.snapshot.preflight.checks import find_lasting


def choose_driver(record: Manifest, found: Driver | None) -> Driver | None:
    """Return the driver that restores a checkpoint, with the method that made it.

    `found` is this host's first driver. None if this host has no driver for such a checkpoint.
    """
    if found is not None and found.vendor == record.host.vendor and _name(found.plugin) == record.plugin:
        return found
    return driver_of(record.host.vendor, record.plugin)


def _name(plugin: Plugin | None) -> str:
    return plugin.name if plugin is not None else ""


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


def make_same_gpu_map(record: Manifest, host: Host, request: GpuMap) -> GpuMap:
    """Return the GPU map for a plugin that cannot change GPUs: each GPU stays. Empty for other plugins.

    Raises Refused if this host lacks one of them, or if the request asks for another one.
    """
    plugin = next((each for each in KNOWN if each.name == record.plugin), None)
    if plugin is None or plugin.remaps:
        return ()
    here = {gpu.uuid: gpu for gpu in host.gpus}
    for gpu in record.gpus:
        asked = next((right for left, right in request if is_meant(left, gpu.index, gpu.uuid)), None)
        same = here.get(gpu.uuid)
        if same is None or (asked is not None and not is_meant(asked, same.index, same.uuid)):
            why = "this host does not have it" if same is None else f"the GPU map assigns {asked}"
            raise Refused(
                f"the checkpoint was made with {plugin.what}, which restores a process onto its original "
                f"GPU, {gpu.uuid}, but {why}",
                hint='restore it on its original GPUs; a checkpoint made with nvidia.driver = "native" '
                "can move",
                code="GPS-406",
            )
    return tuple((gpu.uuid, gpu.uuid) for gpu in record.gpus)


def check_came_back(driver: Driver, processes: Iterable[proc.Process]) -> None:
    """Check that the restored processes have their GPU state again. Raises GpusnapError.

    If a plugin restored it, CRIU has already checked that, and the processes run. One may have ended, or have
    closed its GPU, but none may still be suspended.
    """
    for process in processes:
        state = driver.state(process.pid) if proc.is_running(process.pid) else None
        if state is None and driver.plugin is not None:
            continue
        if state is not ProcessState.RUNNING:
            raise GpusnapError(
                f"process {process.pid} ({process.comm}) was not restored with its GPU state",
                hint="its own log may say why",
                code="GPS-509",
            )
