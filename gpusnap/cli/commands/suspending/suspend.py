"""gpusnap suspend, resume and swap: containers off their GPUs, and back."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from gpusnap.cli.completion import complete_container, complete_suspended
from gpusnap.cli.options.several import run_each
from gpusnap.operations.suspending.moved import MovedContainer, SpilledContainer
from gpusnap.privileges import require_root
from gpusnap.runtime_shim.errors import GpusnapError, UsageError
from gpusnap.runtime_shim.units import human

if TYPE_CHECKING:
    from gpusnap.runtime_shim.gpu.api.gpu_map import GpuMap

# Seconds for Podman to say which suspended container has a name. Who checkpoints that one has its lock.
_NAMING = 60.0

_as_json = click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")


@click.command()
@click.argument(
    "containers", nargs=-1, required=True, metavar="CONTAINER...", shell_complete=complete_container
)
@click.option("--spill", is_flag=True, help="Move their GPU memory on to the store: RAM is free too.")
@click.option("--wait", is_flag=True, help="With --spill: end when the memory is in the store.")
@_as_json
def suspend(containers: tuple[str, ...], spill: bool, wait: bool, as_json: bool) -> None:
    """Take running containers off their GPUs, and keep their GPU memory in RAM.

    The GPUs are free then, and the container is paused: its name, network and files stay as they are, and so
    do its connections. `gpusnap resume` brings it back, onto the same GPU or another. `podman unpause` of it
    is refused; `podman rm --force` ends it, and frees the RAM.

    CONTAINER is Podman's name or ID. A task of containerd is named by its ID, or as NAMESPACE/ID.

    \b
    gpusnap suspend llama              its GPU is free
    gpusnap resume llama

    With --spill, the GPU memory is written to the store (store.path) in the background, and RAM is free when
    all of it is on disk. A resume reads it from there. --spill also takes containers that are suspended
    already. The setting suspend.ram limits how much RAM all suspended containers have together.

    What is suspended is lost when the host is restarted, in the store too: `gpusnap checkpoint` makes what
    lasts, also of a suspended container. GPU memory in RAM is not swapped.

    Several containers are suspended one after another, each on its own. As JSON: container, containerId,
    engine, memory (bytes that it used of GPUs), seconds, driverSeconds, the driver's part of these, and
    timing, a list of steps; for several a list, results. Of one that was suspended already: container, and
    with --wait spilled (bytes).
    """
    require_root("suspend")
    if wait and not spill:
        raise UsageError("--wait goes with --spill")
    from gpusnap.operations.suspending.ahead import start_ahead

    def work(name: str) -> MovedContainer | SpilledContainer:
        with start_ahead(name) as early:
            from gpusnap.operations.suspending import suspend as suspending
            from gpusnap.operations.suspending import targets

            asleep = spill and targets.is_suspended(name, early.container)
            moved = None if asleep else suspending.suspend(name, early)
            if not spill:
                assert moved is not None
                return moved
            from gpusnap.operations.suspending import spill as spilling

            if not wait:
                spilling.spill_behind(name, early.container)
                return moved if moved is not None else SpilledContainer(name, None)
            size = spilling.spill(name, early.container)
            return moved if moved is not None else SpilledContainer(name, size)

    def show(done: MovedContainer | SpilledContainer) -> None:
        if isinstance(done, SpilledContainer):
            how = "is in the store already"
            if done.size is None:
                how = "is moving to the store"
            elif done.size:
                how = f"in the store: {human(done.size)}"
            click.echo(f"{done.name}  GPU memory {how}")
            return
        size = human(done.container.gpu_memory)
        more = "" if not spill else ", in the store" if wait else ", moving to the store"
        click.echo(f"{done.container.name}  suspended: GPU memory {size}{more}, {done.seconds:.1f} s")

    def document(done: MovedContainer | SpilledContainer) -> dict[str, object]:
        if isinstance(done, MovedContainer):
            return _document(done)
        return {"container": done.name} | ({} if done.size is None else {"spilled": done.size})

    run_each(
        tuple(dict.fromkeys(containers)),
        work,
        show=show,
        document=document,
        as_json=as_json,
        key="container",
    )


@click.command()
@click.argument(
    "containers", nargs=-1, required=True, metavar="CONTAINER...", shell_complete=complete_suspended
)
@click.option("--gpu-map", default="", metavar="MAP", help="Put old GPUs on others: 0=1,1=0, or UUIDs.")
@_as_json
def resume(containers: tuple[str, ...], gpu_map: str, as_json: bool) -> None:
    """Bring suspended containers back onto their GPUs.

    If no GPU has room for one, this is refused, says why for each GPU, and changes nothing. A container comes
    back onto the GPU that it was on, or onto another that it can see: one that was started with all GPUs can
    come back onto any of them. --gpu-map says onto which.

    \b
    gpusnap resume llama
    gpusnap resume --gpu-map 0=1 llama

    Numbers in CONTAINER's place that are no container's name are PIDs of single GPU processes, which another
    program than gpusnap left suspended: their GPU memory is in themselves. `gpusnap recover` puts right what
    a killed gpusnap left.

    As JSON: container, containerId, engine, memory (bytes that it uses of GPUs), seconds, driverSeconds, the
    driver's part of these, and timing, a list of steps; for several a list, results.
    """
    require_root("resume")
    from gpusnap.operations.suspending.ahead import start_ahead

    pids = [int(each) for each in containers if each.isdecimal() and not _is_suspended(each)]
    if pids:
        if len(pids) != len(containers) or gpu_map or as_json:
            raise UsageError(
                f"{pids[0]} is no suspended container, and process IDs stand alone",
                hint="gpusnap ps lists the containers",
            )
        _resume_processes(pids)
        return

    def work(name: str) -> MovedContainer:
        with start_ahead(name, seconds=_NAMING) as early:
            from gpusnap.operations.suspending.resume import resume as resume_container

            return resume_container(name, early, _request(gpu_map))

    def show(done: MovedContainer) -> None:
        moved = [(old, new) for old, new in done.container.pairs if old != new]
        where = "".join(f", {old} is on {new} now" for old, new in moved)
        click.echo(f"{done.container.name}  resumed{where}, {done.seconds:.1f} s")

    run_each(
        tuple(dict.fromkeys(containers)),
        work,
        show=show,
        document=_document,
        as_json=as_json,
        key="container",
    )


@click.command()
@click.argument("out", metavar="OUT", shell_complete=complete_container)
@click.argument("into", metavar="IN", shell_complete=complete_suspended)
@click.option("--gpu-map", default="", metavar="MAP", help="Put old GPUs of IN on others: 0=1,1=0, or UUIDs.")
@_as_json
def swap(out: str, into: str, gpu_map: str, as_json: bool) -> None:
    """Suspend the container OUT, and resume IN in its place.

    OUT runs and IN is suspended. If IN would not fit even without OUT, nothing is done. If IN cannot be
    resumed, OUT is. The one is off the GPU before the other comes: their memory is never on it together.

    \b
    gpusnap swap llama qwen

    As JSON: out and in, each as `gpusnap suspend` and `gpusnap resume` have it, and seconds.
    """
    require_root("swap")
    from gpusnap.operations.suspending.ahead import start_ahead

    began = time.monotonic()
    with start_ahead(out, into) as early:
        from gpusnap.operations.suspending import swap as swapping

        off, on = swapping.swap(out, into, early, _request(gpu_map))
    seconds = time.monotonic() - began
    if as_json:
        document = {"out": _document(off), "in": _document(on), "seconds": round(seconds, 3)}
        click.echo(json.dumps(document, indent=1))
        return
    moved = human(off.container.gpu_memory + on.container.gpu_memory)
    click.echo(f"{off.container.name}  suspended, {off.seconds:.1f} s")
    click.echo(f"{on.container.name}  resumed, {on.seconds:.1f} s")
    click.echo(f"GPU memory moved: {moved}, {seconds:.1f} s", err=True)


def _request(text: str) -> GpuMap:
    from gpusnap.runtime_shim.snapshot.devices.choose import gpu_request

    return gpu_request(text or None)


def _is_suspended(name: str) -> bool:
    from gpusnap.engines.podman import Inspection
    from gpusnap.operations.suspending import targets

    with Inspection(name, seconds=_NAMING) as asked:
        return targets.is_suspended(name, asked)


def _document(done: MovedContainer) -> dict[str, object]:
    return {
        "container": done.container.name,
        "containerId": done.container.container,
        "engine": done.container.engine,
        "memory": done.container.gpu_memory,
        "seconds": round(done.seconds, 3),
        "driverSeconds": round(done.driver_seconds, 3),
        "timing": [
            {"step": step.name, "start": round(step.start, 3), "seconds": round(step.seconds, 3)}
            for step in done.steps
        ],
    }


def _resume_processes(pids: Sequence[int]) -> None:
    """Resume single processes whose GPU memory is in themselves. Raises GpusnapError."""
    from gpusnap.operations.driver import needed_driver
    from gpusnap.runtime_shim.gpu import holders
    from gpusnap.runtime_shim.snapshot.bring_back import list_alive
    from gpusnap.runtime_shim.snapshot.gpu_processes import gpu_state
    from gpusnap.runtime_shim.snapshot.memory.pages import Pages
    from gpusnap.runtime_shim.snapshot.records import journal, suspensions

    driver = needed_driver()
    missing = [pid for pid in pids if pid not in holders(driver, pids)]
    if missing:
        raise GpusnapError(
            f"process {missing[0]} is no GPU process",
            hint="gpusnap ps lists suspended containers, gpusnap recover --list what a killed gpusnap left",
        )
    noted = {p.pid: entry for entry in journal.entries() for p in list_alive(entry) if p.regions or p.staged}
    for pid in pids:
        if pid in noted:
            command = "recover" if suspensions.read(noted[pid].key) is None else "resume"
            raise GpusnapError(
                f"the GPU memory of process {pid} is in files",
                hint=f"gpusnap {command} {noted[pid].container}",
                code="GPS-021",
            )
    driver.open()
    gpu_state.resume(driver, pids, Pages())
    click.echo("running: " + " ".join(map(str, pids)))
