"""`gpusnap suspend`, `resume` and `swap`: take containers off their GPUs, and put them back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from gpusnap.base.privileges import require_root
from gpusnap.cli.completion import complete_container, complete_suspended
from gpusnap.cli.json_output import print_json
from gpusnap.cli.options.container_names import check_not_empty
from gpusnap.cli.options.several import run_each
from gpusnap.operations.suspending.moved import MovedContainer, SpilledContainer
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError
from gpusnap.runtime_shim.base.units import human

if TYPE_CHECKING:
    from gpusnap.runtime_shim.gpu.api.gpu_map import GpuMap

# Seconds for Podman to say which suspended container has a name. Who checkpoints that one has its lock.
_NAMING = 60.0

_as_json = click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")


@click.command()
@click.argument(
    "containers",
    nargs=-1,
    required=True,
    metavar="CONTAINER...",
    callback=check_not_empty,
    shell_complete=complete_container,
)
@click.option("--spill", is_flag=True, help="Move the GPU memory on to the store, which also frees RAM.")
@click.option("--wait", is_flag=True, help="With --spill: return only when the memory is in the store.")
@click.option("--suspended", is_flag=True, hidden=True, help="Suspend none: one that runs is refused.")
@_as_json
def suspend(containers: tuple[str, ...], spill: bool, wait: bool, suspended: bool, as_json: bool) -> None:
    """Suspend running containers: free their GPUs, and keep their GPU memory in RAM.

    The container is paused: its name, network, files and connections stay as they are. `gpusnap resume`
    resumes it, on the same GPU or another. `podman unpause` is refused for it; `podman rm --force` removes
    it, and frees the RAM.

    CONTAINER is Podman's name or ID. A containerd task is named by its ID, or as NAMESPACE/ID.

    \b
    gpusnap suspend llama              its GPU is free
    gpusnap resume llama

    With --spill, the GPU memory is written to the store (store.path) in the background, and its RAM is freed
    when all of it is on disk. A resume reads it from there. --spill also accepts containers that are already
    suspended. The setting suspend.ram limits the RAM of all suspended containers together.

    Suspended containers are lost when the host is restarted, even if their memory is in the store: `gpusnap
    checkpoint` makes a permanent copy, also of a suspended container. GPU memory in RAM is not swapped.

    Several containers are suspended one after another, independently. As JSON: container, containerId,
    engine, memory (bytes that it used of GPUs), seconds, driverSeconds, the driver's part of these, and
    timing, a list of steps; for several a list, results. For one that was already suspended: container, and
    with --wait spilled (bytes).
    """
    require_root("suspend")
    for option, given in (("--wait", wait), ("--suspended", suspended)):
        if given and not spill:
            raise UsageError(f"{option} requires --spill")
    from gpusnap.operations.suspending.ahead import start_ahead

    def work(name: str) -> MovedContainer | SpilledContainer:
        with start_ahead(name) as early:
            from gpusnap.operations.suspending import suspend as suspending
            from gpusnap.operations.suspending import targets

            asleep = suspended or (spill and targets.is_suspended(name, early.container))
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
            how = "is already in the store"
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
    "containers",
    nargs=-1,
    required=True,
    metavar="CONTAINER...",
    callback=check_not_empty,
    shell_complete=complete_suspended,
)
@click.option("--gpu-map", default="", metavar="MAP", help="Map old GPUs to others: 0=1,1=0, or UUIDs.")
@_as_json
def resume(containers: tuple[str, ...], gpu_map: str, as_json: bool) -> None:
    """Resume suspended containers on their GPUs.

    If no GPU has enough free memory, the command is refused with the reason for each GPU, and nothing is
    changed. A container is resumed on the GPU that it was on, or on another one that it can see: one that was
    started with all GPUs can be resumed on any of them. --gpu-map selects it.

    \b
    gpusnap resume llama
    gpusnap resume --gpu-map 0=1 llama

    A number that is not the name of a container is the PID of a single GPU process that another program left
    suspended, with its GPU memory in its own memory. Use `gpusnap recover` after a killed gpusnap.

    As JSON: container, containerId, engine, memory (bytes that it uses of GPUs), seconds, driverSeconds, the
    driver's part of these, and timing, a list of steps; for several a list, results.
    """
    require_root("resume")
    from gpusnap.operations.suspending.ahead import start_ahead

    pids = [int(each) for each in containers if each.isdecimal() and not _is_suspended(each)]
    if pids:
        if len(pids) != len(containers) or gpu_map or as_json:
            raise UsageError(
                f"{pids[0]} is not a suspended container, and process IDs cannot be combined with containers",
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
        where = "".join(f", {old} is now on {new}" for old, new in moved)
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
@click.argument("out", metavar="OUT", callback=check_not_empty, shell_complete=complete_container)
@click.argument("into", metavar="IN", callback=check_not_empty, shell_complete=complete_suspended)
@click.option(
    "--gpu-map", default="", metavar="MAP", help="Map the old GPUs of IN to others: 0=1,1=0, or UUIDs."
)
@_as_json
def swap(out: str, into: str, gpu_map: str, as_json: bool) -> None:
    """Suspend the container OUT, and resume IN in its place.

    OUT must be running and IN suspended. If IN would not fit even without OUT, nothing is done. If IN cannot
    be resumed, OUT is resumed again. OUT leaves the GPU before IN is restored: both are never in GPU memory
    at the same time. If the driver does not report how much GPU memory OUT uses (MIG, some virtual GPUs), and
    other programs use its GPUs too, the swap is refused unless it is known that IN fits.

    \b
    gpusnap swap llama qwen

    As JSON: out and in, each as in `gpusnap suspend` and `gpusnap resume`, and seconds.
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
        print_json(document)
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
    from gpusnap.runtime_shim.snapshot.gpu_processes import gpu_state
    from gpusnap.runtime_shim.snapshot.memory.pages import Pages
    from gpusnap.runtime_shim.snapshot.records import journal, suspensions
    from gpusnap.runtime_shim.snapshot.recovery.bring_back import list_alive

    driver = needed_driver()
    missing = [pid for pid in pids if pid not in holders(driver, pids)]
    if missing:
        raise GpusnapError(
            f"process {missing[0]} is not a GPU process",
            hint="gpusnap ps lists suspended containers, gpusnap recover --list what a killed gpusnap "
            "left behind",
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
