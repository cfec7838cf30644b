"""Suspends a running container: the driver moves its GPU memory into files in RAM.

    inspect → pause (the engine) → hold → lock → driver checkpoint → pages → freeze

The container stays paused in its engine, so its name, network and files stay as they were. Within the frozen
cgroup, its GPU processes are stopped too. If somebody thaws it without gpusnap, only processes that need no
GPU run. If a step fails, the steps before it are undone.

The modules for the steps after the pause are imported while the engine pauses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from gpusnap.oci.base.dataclass import replace
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import AlreadyPaused, GpusnapError
from gpusnap.runtime_shim.base.import_ahead import import_meanwhile
from gpusnap.runtime_shim.base.transaction import Step, Transaction, make_interruptible, name_recover
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot.devices import device_access
from gpusnap.runtime_shim.snapshot.records import journal, suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers import preflight
from gpusnap.runtime_shim.snapshot.suspended_containers.engine import Engine

if TYPE_CHECKING:
    from gpusnap.runtime_shim.snapshot.gpu_processes.job import CheckpointJob

Room = Callable[[int], AbstractContextManager[Callable[[], object]]]
"""Claims bytes of RAM until the block ends. What it yields is called when they are claimed otherwise."""

_TAKE = "gpusnap.runtime_shim.snapshot.suspended_containers.take"


def suspend(
    container: containers.Container,
    real: RealRuntime,
    settings: Settings,
    driver: Driver,
    engine: Engine,
    *,
    room: Room = lambda need: nullcontext(lambda: None),
) -> tuple[Suspension, Sequence[Step]]:
    """Suspend a running container that uses GPUs; return its record, and how long each step took.

    `room` is called with the bytes of RAM that it will take, before anything is changed, and may refuse.
    Raises a GpusnapError; the container then continues to run, unless the error says otherwise.
    """
    question_process.start()
    with (
        make_interruptible(),
        journal.hold(container.key),
        ExitStack() as claimed,
        Transaction() as transaction,
    ):
        with transaction.step("inspect"):
            seen = preflight.inspect(container, driver, engine.name)
            allow = partial(device_access.update, real, container)
            device_access.check(container.pid, engine.name, seen.nodes, allow)
            end_early_claim = claimed.enter_context(room(seen.memory))
        begun = _make_suspension(container, real, engine, seen.init)
        way_back = _Undo(container, begun, engine)
        transaction.undo("removing the record of the suspend", way_back.forget)
        suspensions.write(begun)
        transaction.undo("unpausing the container", way_back.go_on)
        with transaction.step("pause"), import_meanwhile(_TAKE), way_back.unless_paused():
            engine.pause()
        from gpusnap.runtime_shim.snapshot.suspended_containers import take

        way_back.job = take.job_of(container, real, settings, driver, transaction, seen)
        way_back.job.end_early_claim = end_early_claim
        return take.take_gpu_state(way_back.job, begun), tuple(transaction.steps)


def _make_suspension(
    container: containers.Container, real: RealRuntime, engine: Engine, init: proc.Process | None
) -> Suspension:
    return Suspension(
        key=container.key,
        name=engine.name,
        engine=engine.kind,
        namespace=engine.namespace,
        stage=Stage.SUSPENDING,
        owner=state_files.owner(),
        init=(init.pid, init.start) if init is not None else (0, 0),
        since=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        runtime=real.kind,
    )


class _Undo:
    """Undoes a suspend, around what `take` does and undoes."""

    def __init__(self, container: containers.Container, begun: Suspension, engine: Engine) -> None:
        self._key, self._begun, self._engine = container.key, begun, engine
        self.job: CheckpointJob | None = None
        """Set once the container is paused."""
        self._failed = self._others = False

    @contextmanager
    def unless_paused(self) -> Iterator[None]:
        """Around the pause: if somebody else has paused the container, it stays so."""
        try:
            yield
        except AlreadyPaused:
            self._others = True
            raise

    def go_on(self) -> None:
        """Make the engine resume the container, which it refuses until the record allows it."""
        if self._others:
            return
        try:
            suspensions.write(replace(self._begun, stage=Stage.UNDONE))
        except GpusnapError:
            # For example, /run is full. Without the file it may as well; if GPU state is missing, recover
            # needs it.
            if self._gpu_state_is_missing:
                raise
            suspensions.drop(self._key)
        try:
            with name_recover(self._begun.container):
                self._engine.go_on()
        except GpusnapError:
            self._failed = True
            raise

    def forget(self) -> None:
        """The last step: everything runs again, so there is nothing to recover."""
        if self._gpu_state_is_missing:
            return  # `gpusnap recover` undoes the rest
        if self.job is not None:
            self.job.pages.close()
        journal.remove(self._key)
        if not self._failed and (self.job is None or self.job.stuck is None):
            suspensions.drop(self._key)  # otherwise `gpusnap recover` makes the engine resume it

    @property
    def _gpu_state_is_missing(self) -> bool:
        return self.job is not None and self.job.suspended
