"""Resumes a suspended container onto its GPUs, or onto others that it can see.

    load → plan → hold → fill (from a store) → driver restore → freeze → let go on (the engine)

Everything that can refuse does so before anything is changed. A resume that fails or is killed loses nothing:
the memory stays where it is until all processes have their GPU state, and the next resume continues from
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpusnap.oci.base.dataclass import replace
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, Refused, reason
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.base.transaction import (
    Step,
    Transaction,
    hold_signals,
    make_interruptible,
    name_recover,
    stop_if_asked,
)
from gpusnap.runtime_shim.gpu.api.driver import Driver, Host, ProcessState
from gpusnap.runtime_shim.gpu.api.gpu_map import GpuMap
from gpusnap.runtime_shim.gpu.assignment import ELSEWHERE, FREE, MORE, plan_assignment
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory.tmpfs import Area
from gpusnap.runtime_shim.runtime import cgroup_freezer
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot.devices import device_access
from gpusnap.runtime_shim.snapshot.devices.device_access import Update
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_calls, driver_watch, paused_container
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import Pairs, map_needs
from gpusnap.runtime_shim.snapshot.memory import suspended_memory, transfer
from gpusnap.runtime_shim.snapshot.preflight import space
from gpusnap.runtime_shim.snapshot.records import journal, suspensions
from gpusnap.runtime_shim.snapshot.records.reservations import RAM, GpuClaim, claim
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension
from gpusnap.runtime_shim.snapshot.recovery import bring_back, held_threads
from gpusnap.runtime_shim.snapshot.suspended_containers import sweep
from gpusnap.runtime_shim.snapshot.suspended_containers.engine import Engine

if TYPE_CHECKING:
    from gpusnap.runtime_shim.snapshot.suspended_containers.load import MemoryLoad

Loaded = Mapping[int, Sequence[Area]]
"""Files with the spilled memory of processes, by PID."""

_SETTLING = 10.0  # seconds


class NoRoom(Refused):
    """A suitable GPU has too little free memory.

    `more`: the end of the hint, which stays if a caller names who uses the GPU; it is empty or begins with ";
    ".
    """

    more: str = ""


def resume(
    key: str,
    settings: Settings,
    driver: Driver,
    engine: Engine,
    *,
    request: GpuMap = (),
    loading: MemoryLoad | None = None,
) -> tuple[Suspension, Sequence[Step]]:
    """Resume a suspended container; return its record, and how long each step took.

    `request`: which GPUs it is to get. `loading`: its spilled memory, which is read into RAM. Raises a
    GpusnapError: Refused if no GPU fits, and nothing has been changed then.
    """
    question_process.start()
    with make_interruptible(), journal.hold(key), ExitStack() as held, Transaction() as transaction:
        found = suspensions.read(key)
        if found is None or not found.is_alive:
            raise Refused(f"container {key.partition('@')[0]} is not suspended", code="GPS-206")
        if found.stage is not Stage.SUSPENDED:
            raise suspensions.make_unfinished_error(found)
        loaded: Loaded = {}
        # Otherwise somebody has resumed it since, and suspended it again.
        if loading is not None and loading.entry == journal.read(key):
            with transaction.step("load"), _name_recover(found):
                loaded = loading.areas()
        with claim() as room:
            with transaction.step("plan"):
                driver.open()
                spilled = {} if loaded else _measure_spilled(found)
                pairs = _plan(found, driver.host(), request, settings, room, spilled)
            found = replace(found, stage=Stage.RESUMING, owner=state_files.owner(), pairs=pairs)
            held.enter_context(hold_signals())  # until the commit: nothing of what follows is undone
            with _name_recover(found):
                suspensions.write(found)
                _bring_back(found, settings, driver, transaction, loaded, engine.allow, cut_off=False)
        ended = not found.is_alive  # by itself, it cannot end before it continues
        with name_recover(found.container):
            _finish(found, transaction, engine.go_on)
            transaction.commit()
        if ended:
            raise found.make_ended_error("resumed")
        _tell_of_ended(found)
        return found, tuple(transaction.steps)


def recover(key: str, settings: Settings, driver: Driver, engine: Engine) -> str:
    """Finish a resume, or undo a suspend, whose gpusnap was killed; return what was done, in words.

    Raises GpusnapError, also if another gpusnap is working on that container.
    """
    question_process.start()
    with make_interruptible(), journal.hold(key), Transaction() as transaction:
        found = suspensions.read(key)
        if found is None:
            return "another process has already repaired it"
        if not found.is_alive:
            sweep.remove(found)
            return "it has exited, and nothing is left of it"
        if found.stage is Stage.SUSPENDED:
            held_threads.unblock_signals(key)
            return "it is suspended, and its threads have their signal masks; resume it with gpusnap resume"
        stage = found.stage
        with hold_signals():
            if stage is not Stage.RESUMED:
                with _name_resume(found):
                    _bring_back(found, settings, driver, transaction, {}, engine.allow, cut_off=True)
            _finish(found, transaction, engine.go_on)
            transaction.commit()
        return "it was not suspended, and continues to run" if stage in suspensions.THERE else "it is resumed"


def check(
    found: Suspension, host: Host, request: GpuMap, reserved: Mapping[str, int] = MappingProxyType({})
) -> tuple[tuple[str, str], ...]:
    """Choose the GPU of `host` for each of its GPUs; (old UUID, new UUID). Raises Refused if there is none.

    `reserved`: bytes by UUID that others have claimed. The error is NoRoom if only memory is missing.
    """
    made = partial(
        plan_assignment,
        found.gpus,
        found.driver_version,
        host,
        request=request,
        reserved=reserved,
        suspended=found.name,
    )
    chosen = made(given={gpu.uuid for gpu in found.gpus})
    if chosen.refusal:
        elsewhere = made()
        refused = chosen.make_refusal()
        there = _explain_move(found, host, elsewhere.pairs)
        if refused.hint == FREE:
            refused = NoRoom(str(refused), hint=f"gpusnap swap OTHER {found.name}", code=refused.code)
            refused.more = "" if elsewhere.refusal else f"; {there}"
            refused.hint += refused.more
        elif not elsewhere.refusal:
            refused.hint = there
        elif refused.hint in (MORE, ELSEWHERE):
            then = f"then gpusnap restore {found.name} there"
            refused.hint = f"to move it to a host that has such GPUs: {_leave(found)}, {then}"
        raise refused
    return chosen.pairs


def _explain_move(found: Suspension, host: Host, pairs: Iterable[tuple[str, str]]) -> str:
    """Return the hint for a container that can move to GPUs of this host that it cannot see."""
    old, new = ({gpu.uuid: gpu.index for gpu in gpus} for gpus in (found.gpus, host.gpus))
    moved = [(old[one], new[other]) for one, other in pairs if one != other]
    gpus = ", ".join(str(index) for _, index in moved)
    gpu_map = ",".join(f"{one}={other}" for one, other in moved)
    return (
        f"to move it to GPU {gpus} of this host: {_leave(found)} && gpusnap restore --gpu-map {gpu_map} "
        f"{found.name}"
    )


def _leave(found: Suspension) -> str:
    """Return the commands that checkpoint a suspended container and remove it."""
    return f"gpusnap checkpoint {found.name} && podman rm --force {found.name}"


def _plan(
    found: Suspension,
    host: Host,
    request: GpuMap,
    settings: Settings,
    room: GpuClaim,
    spilled: Mapping[int, int],
) -> tuple[tuple[str, str], ...]:
    """Like `check`, and claim the memory of the GPUs, and the RAM for what was spilled. Raises Refused.

    `spilled`: bytes by PID, which are read through RAM.
    """
    pairs = check(found, host, request, room.reserved)
    new = dict(pairs)
    wanted = {new[gpu.uuid]: gpu.memory_used for gpu in found.gpus}
    if any(spilled.values()):
        space.check_memory(spilled, found.init[0], settings.memory, reserved=room.reserved.get(RAM, 0))
        wanted[RAM] = sum(spilled.values())
    room.record(wanted)
    return pairs


def _measure_spilled(found: Suspension) -> Mapping[int, int]:
    entry = journal.read(found.key)
    return entry.measure_spilled() if entry is not None else {}


def _map_pairs(found: Suspension) -> Mapping[int, Pairs]:
    """Return the pairs for each process; none if no GPU has changed."""
    new = dict(found.pairs)
    if all(old == to for old, to in found.pairs):
        return {}
    return {each.pid: tuple((uuid, new[uuid]) for uuid, _ in each.gpus) for each in found.processes}


def _bring_back(
    found: Suspension,
    settings: Settings,
    driver: Driver,
    transaction: Transaction,
    loaded: Loaded,
    allow: Update,
    *,
    cut_off: bool,
) -> None:
    """Give its processes their GPU state; the container is frozen before and after."""
    entry = journal.read(found.key)
    if entry is None:
        return  # the suspend was killed before it touched the first process
    pids = [each.pid for each in bring_back.list_alive(entry)]
    paused = paused_container.reopen(entry, pids)
    let_go = None
    try:
        if paused is not None:
            with transaction.step("hold"):
                paused.keep(pids)
                paused.hold(pids, timeout=_SETTLING)
            let_go = paused.let_go
        with transaction.step("driver restore"):
            try:
                bring_back.bring_back(
                    entry,
                    driver,
                    settings.memory,
                    let_go,
                    check=partial(_check_access, found, driver, allow),
                    pairs=_map_pairs(found),
                    needs=map_needs({each.pid: each.gpus for each in found.processes}, found.pairs),
                    loaded=loaded,
                    interrupt=stop_if_asked,
                    cut_off=cut_off,
                )
            except Exception:  # also of a module that is imported late
                if not cut_off or found.stage is Stage.RESUMING:
                    _stay_suspended(found, entry, driver)
                raise
            finally:
                for text in driver_watch.take_notes():
                    transaction.note(text)
    finally:
        if paused is not None:
            with transaction.step("freeze"):
                paused.freeze()


def _check_access(found: Suspension, driver: Driver, allow: Update) -> None:
    """Check that it may open its GPUs' device nodes. Raises Refused."""
    if found.is_alive:
        init = found.init[0]
        device_access.check(init, found.name, driver.nodes(init), allow)


@contextmanager
def _name_recover(found: Suspension) -> Iterator[None]:
    """Make an error of the block name `gpusnap recover`, unless the container is suspended as before."""
    try:
        yield
    except Exception as error:
        if _is_suspended(found.key):
            if isinstance(error, ImageError):
                error.add_hint(f"{found.name} is suspended as before")
            raise
        with name_recover(found.container):
            raise


@contextmanager
def _name_resume(found: Suspension) -> Iterator[None]:
    """Make an error of the block name `gpusnap resume`, if the container is suspended as before."""
    try:
        yield
    except GpusnapError as error:
        if _is_suspended(found.key):
            error.add_hint(f"it is suspended as before: gpusnap resume {found.name} tries again")
        raise


def _tell_of_ended(found: Suspension) -> None:
    """Report which of its GPU processes were killed while it was suspended; none could end by itself."""
    for each in found.processes:
        if not proc.is_still_running(each.pid, each.start):
            note(
                f"process {each.pid} of container {found.name} (PID {each.inner_pid} in it) was killed "
                "while it was suspended; the container continues without it",
                code="GPS-316",
            )


def _is_suspended(key: str) -> bool:
    """Whether its record says that it is suspended; False if that cannot be read."""
    with suppress(GpusnapError, OSError):
        found = suspensions.read(key)
        return found is not None and found.stage is Stage.SUSPENDED
    return False


def _stay_suspended(found: Suspension, entry: journal.Entry, driver: Driver) -> None:
    """After a failure: if none of its processes has its GPU state, record that it is suspended as before."""
    there = bring_back.list_alive(entry)
    with suppress(Exception):  # such as an import that fails late: the first error is reported
        states = [driver_calls.state(driver, each.pid) for each in there]
        if all(state is ProcessState.CHECKPOINTED for state in states):
            for each in there:
                regions = [(r.start, r.table.size) for r in each.regions]
                regions += [(s.start, s.size) for s in each.staged]
                transfer.release_memory(found.key, each.pid, regions)
            suspensions.write(replace(found, stage=Stage.SUSPENDED, pairs=()))


def _finish(found: Suspension, transaction: Transaction, go_on: Callable[[], object]) -> None:
    """Its GPU state is restored: free the copy, and make the engine resume it.

    If something cannot be removed, that is only reported, because the container can run.
    """
    with transaction.step("let go"):
        suspensions.write(replace(found, stage=Stage.RESUMED))
        try:
            suspended_memory.free(found.key)
        except (GpusnapError, OSError) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            note(
                f"files of the suspended container {found.name} could not be removed: {why}; gpusnap "
                "recover removes them",
                code="GPS-027",
            )
    with transaction.step("go on"):
        go_on()
        group = containers.frozen_group(found.init[0], found.container)
        if group is not None:  # its engine considered it running: see operations/checkpointing
            cgroup_freezer.thaw(group)
        suspensions.drop(found.key)
