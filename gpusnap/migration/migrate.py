"""`gpusnap migrate`: moves a running container to another host.

    check      the other host's release, room, image and GPUs: nothing has been changed
    ahead      a checkpoint while the container runs; sends the chunks that the other store lacks; N times
    plan       the other host chooses GPUs for that checkpoint
    stop       the checkpoint that ends the container; sends what changed since
    note       on disk here: from now on the container may run over there
    restore    over there
    confirm    from here on the container is that of the other host; removes what is left here, the note last

Until `confirm`, the container is ours. If something fails after `stop`, it is restored here, but only after
it is certain that it does not run over there. If the other host cannot be asked at that moment, the container
stays stopped: two hosts with one container are worse than none. The note is then kept, also if this gpusnap
is killed, and `gpusnap recover` asks again (gpusnap/migration/unfinished.py).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import Any

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import Damaged, NotFound, make_told_error
from gpusnap.checkpoints import locator, migrations
from gpusnap.checkpoints.list import blobs_of
from gpusnap.checkpoints.migrations import OutgoingMigration
from gpusnap.checkpoints.names import dated_name
from gpusnap.engines import podman, podman_objects, podman_work
from gpusnap.migration import unfinished
from gpusnap.migration.blobs import check_answer, serve
from gpusnap.migration.frames import PATIENCE, VERSION, Channel
from gpusnap.migration.link import Route, connect
from gpusnap.migration.receiver import new_id
from gpusnap.oci.base.dataclass import asdict, dataclass, field, replace
from gpusnap.oci.base.errors import NotThere, OciError
from gpusnap.oci.store.store import Store
from gpusnap.operations import disk_space
from gpusnap.operations.checkpointing import checkpoint as checkpointing
from gpusnap.operations.checkpointing.checkpoint import CheckpointResult
from gpusnap.operations.restoring import restore as restoring
from gpusnap.operations.restoring.podman_restore import RestoreRequest
from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.base import stop_signals
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError, Interrupted
from gpusnap.runtime_shim.gpu import estimate_used, find_driver, sum_by_gpu
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.records.manifest import GpuRecord
from gpusnap.runtime_shim.runtime import container as containers

# Number of attempts to ask the other host about a container.
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRequest:
    """What to migrate, to which host, and how."""

    container: str
    route: Route
    name: str = ""
    """The container's name over there; empty: the same."""
    gpu_map: str = ""
    ahead: int = 1
    """Number of checkpoints that are sent ahead while the container runs."""
    keep: bool = False
    """The ended container and its checkpoint are kept here."""
    ignore_volumes: bool = False
    force: bool = False
    dry_run: bool = False
    patience: float = PATIENCE
    """Seconds without progress after which either side gives up."""


@dataclass(slots=True)
class MigrationResult:
    """The result of a migration. Sizes are in bytes, times in seconds."""

    container: podman.Container
    host: str
    pairs: list[tuple[str, str]] = field(default_factory=list)
    """Old and new UUID of each GPU."""
    image: bool = True
    """The other host has the container's image; otherwise Podman pulls it there."""
    free: int = 0
    needs: int = 0
    name: str = ""
    id: str = ""
    """The container's ID over there."""
    digest: str = ""
    ahead: int = 0
    """Bytes that were sent while the container ran."""
    after: int = 0
    """Bytes that were sent while it did not run."""
    pause: float = 0.0
    """From the start of the last checkpoint until the container ran over there."""
    seconds: float = 0.0


def migrate(parameters: MigrationRequest, progress: Progress) -> MigrationResult:
    """Migrate a container. Raises NotFound, ContainerError, Refused, LinkLost, Interrupted, GpusnapError."""
    began = time.monotonic()
    found = checkpointing.find_container(parameters.container)
    by_hand = f"run podman container checkpoint --export FILE {found.name} here, and podman container restore"
    podman.check(found, instead=f"{by_hand} --import FILE on the other host")
    podman_objects.check_options(found, force=parameters.force)
    with ExitStack() as link:
        progress.stage(f"asking {parameters.route.to}")
        channel = link.enter_context(connect(parameters.route))
        channel.patience, progress.watched = parameters.patience, True
        link.enter_context(channel.keep_alive(lambda: progress.mark))
        move = _Move(parameters, found, progress, channel, link)
        move.check()
        if not parameters.dry_run:
            move.go()
        move.done.seconds = time.monotonic() - began
        return move.done


class _Move:
    """A migration in progress."""

    def __init__(
        self,
        parameters: MigrationRequest,
        found: podman.Container,
        progress: Progress,
        channel: Channel,
        link: ExitStack,
    ) -> None:
        self._parameters, self._found, self._progress = parameters, found, progress
        self._channel, self._link = channel, link
        self._id, self._hung_up = new_id(), False
        self._to = str(parameters.route.to)
        self._tag = unfinished.ahead_name(found.name, found.id)
        self._note = self._ahead = OutgoingMigration(
            id=self._id,
            container=found.id,
            name=found.name,
            there=parameters.name or found.name,
            host=self._to,
            route=unfinished.encode_route(parameters.route),
            store=locator.default_store().path,
            checkpoint=self._tag,
            keep=parameters.keep,
            auto_remove=found.auto_remove,
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self.done = MigrationResult(found, self._to)

    def check(self) -> None:
        """Ask whether the other host can take the container."""
        parameters, found = self._parameters, self._found
        self._greet()
        driver = find_driver()
        gpus = _gpus(found, driver)
        self.done.needs = disk_space.need(found, volumes=not parameters.ignore_volumes)
        answer = self._ask(
            "check",
            name=parameters.name or found.name,
            image=found.image,
            volumes=[] if parameters.ignore_volumes else list(found.volumes),
            needs=self.done.needs,
            pull=not parameters.dry_run,
            gpus=[asdict(each) for each in gpus],
            vendor=driver.vendor if driver is not None else "",
            driver=driver.host().driver_version if driver is not None and gpus else "",
            gpuMap=parameters.gpu_map,
        )
        self.done.free, self.done.image = int(answer["free"]), bool(answer["image"])
        self.done.pairs = _pairs(answer)

    def _greet(self) -> None:
        self._ask(
            "hello",
            migration=self._id,
            version=__version__,
            protocol=VERSION,
            machine=platform.machine(),
            patience=self._parameters.patience,
        )

    def go(self) -> None:
        try:
            self._ahead.write()
            migrations.check_alone(self._ahead)
            try:
                if self._parameters.ahead:
                    self._send_ahead()
                # The last moment at which a lost connection costs nothing.
                self._greet()
                self._hand_over()
            finally:
                unfinished.remove_name(Store(self._ahead.store), self._tag)
        finally:
            with suppress(GpusnapError):  # if that fails, gpusnap recover does it
                self._ahead.remove()

    def _send_ahead(self) -> None:
        for _ in range(self._parameters.ahead):
            # The previous one, or one that a killed migration left.
            unfinished.remove_name(Store(self._ahead.store), self._tag)
            made = self._checkpoint(self._tag, ahead=True)
            self.done.ahead += self._send(made, ahead=True)
        self.done.pairs = _pairs(self._ask("plan", digest=made.digest, gpuMap=self._parameters.gpu_map))

    def _hand_over(self) -> None:
        stopped = time.monotonic()
        asked = False
        last = dated_name(self._found.name, self._found.id, datetime.now(UTC))
        try:
            made = self._checkpoint(last, ahead=False)
            self._note = replace(self._note, store=made.store, checkpoint=made.name, digest=made.digest)
            self.done.after = self._send(made, ahead=False)
            self._progress.stage(f"restore on {self._to}")
            self._note.write()
            self._ahead.remove()
            # From here on its checkpoint is not restored here.
            if self._runs_here():
                raise ContainerError(
                    f"{self._found.name} was started here while its memory was sent", hint="migrate it again"
                )
            asked = True
            answer = self._ask(
                "restore",
                name=self._found.name,
                newName=self._parameters.name,
                digest=made.digest,
                gpuMap=self._parameters.gpu_map,
                ignoreVolumes=self._parameters.ignore_volumes,
            )
            self.done.pause = time.monotonic() - stopped
            self.done.name, self.done.id = str(answer["container"]), str(answer["containerId"])
            self._ask("confirm")
        except (Exception, KeyboardInterrupt) as error:  # of any kind: the container is stopped
            if not self._note.digest and not self._find_last(last, error):
                raise
            if not asked or self._settle(error) != "confirmed":
                raise self._bring_back(error) from error
            self.done.name = self.done.name or self._note.there
        self.done.digest = self._note.digest
        self._clear()

    def _find_last(self, name: str, error: BaseException) -> bool:
        """Note the last checkpoint if it was stored before an error; return whether it was.

        Raises GpusnapError if that is unknown, and the container does not run.
        """
        store = locator.default_store()
        try:
            with podman_work.ignore_signals():  # a second one would leave the container stopped
                digest = store.find_exactly(name).descriptor.digest
        except NotThere:
            return False
        except OciError as failed:
            with suppress(GpusnapError):
                if self._runs_here():
                    return False
            said = GpusnapError(
                f"{_make_told_error(error)}; {self._found.name} may be stopped, and the store cannot be "
                f"read: {failed}",
                hint=f"if podman ps does not show it, gpusnap restore {name} continues it here",
                code="GPS-824",
            )
            raise _convert_after(error, said) from error
        self._note = replace(self._note, store=store.path, checkpoint=name, digest=digest)
        return True

    def _clear(self) -> None:
        """Remove what is left here. Raises GpusnapError, and then keeps its note."""
        try:
            stays = unfinished.clear(self._note)
        except (GpusnapError, KeyboardInterrupt) as error:
            said = GpusnapError(
                f"{self._found.name} was migrated to {self._to} and runs there, but its remains here "
                f"cannot be removed: {_make_told_error(error)}",
                hint="run gpusnap recover to try again",
                code="GPS-824",
            )
            raise _convert_after(error, said) from error
        if self._hung_up:
            unfinished.tell_settled(self._note)
        else:
            self._hang_up(settled=True)
        if stays:
            raise GpusnapError(
                f"{self._found.name} was migrated to {self._to} and runs there, but the container on this "
                "host stays, because it may have been started meanwhile",
                hint=f"if podman ps shows it, stop one of the two; podman rm --force {self._found.name} "
                "removes the one here",
                code="GPS-824",
            )

    def _checkpoint(self, name: str, *, ahead: bool) -> CheckpointResult:
        parameters = checkpointing.CheckpointRequest(
            container=self._found.id,
            name=name,
            leave_running=ahead,
            ignore_volumes=self._parameters.ignore_volumes,
            force=self._parameters.force,
            bring_back=not ahead,
        )
        return checkpointing.checkpoint(parameters, self._progress)

    def _send(self, made: CheckpointResult, *, ahead: bool) -> int:
        """Let the other side fetch a checkpoint; return how many bytes were sent."""
        store = Store(made.store)
        with store.hold(made.digest) as root:
            self._progress.stage(f"memory to {self._to}")
            container = self._found.id[:32]
            self._request(
                "fetch",
                root=root.to_json(),
                name=made.name,
                container=container,
                of=self._note.there,
                ahead=ahead,
            )
            blobs = blobs_of(store, root)
            answer = serve(self._channel, store.layout, blobs, lambda sent: self._progress.at(sent, None))
        return int(check_answer(answer, self._to)["bytes"])

    def _bring_back(self, error: BaseException) -> GpusnapError:
        """Restore the container here; return the error to raise."""
        return _convert_after(error, self._restore_here(error))

    def _restore_here(self, error: BaseException) -> GpusnapError:
        why = _make_told_error(error)
        name, last = self._found.name, self._note
        try:
            self._progress.stage(f"restore of {name} on this host")
            self._hang_up()
            with suppress(GpusnapError):  # by it, gpusnap recover names the container if we are killed now
                self._ahead.write()
            last.remove()  # it certainly does not run there
            if self._runs_here():
                return GpusnapError(
                    f"{name} was not migrated, and runs on this host: {why}",
                    hint="; ".join(filter(None, (why.hint, f"its checkpoint {last.checkpoint} is kept"))),
                    code="GPS-824",
                )
            place = locator.InStore(Store(last.store), last.digest)
            again = RestoreRequest(what=place, ignore_volumes=self._parameters.ignore_volumes)
            restoring.restore(again, self._progress)
        except (Exception, KeyboardInterrupt) as failed:
            said = _make_told_error(failed)
            # Then its own command failed, or was not run.
            if said.code == "GPS-240" or self._certainly_runs_here():
                return GpusnapError(
                    f"{name} was not migrated, and runs on this host again: {why}; {said}",
                    hint=said.hint,
                    code=said.code or "GPS-824",
                )
            hint = f"gpusnap restore {last.checkpoint} continues it here; its checkpoint is complete"
            if isinstance(said, Damaged):
                hint = f"gpusnap verify {last.checkpoint} lists all damage; do not remove what {self._to} has"
            return GpusnapError(
                f"{name} was not migrated to {self._to} ({why}), and cannot be restored here: {said}",
                hint=hint,
                code="GPS-824",
            )
        with suppress(OciError):  # if that fails, it is kept, and `gpusnap ls` shows it
            Store(last.store).remove(last.digest)
        return GpusnapError(
            f"{name} was not migrated, and runs on this host again: {why}",
            hint=why.hint or "run the same command again; what was sent stays on the other host",
            code=why.code or "GPS-824",
        )

    def _certainly_runs_here(self) -> bool:
        with suppress(GpusnapError):
            return self._runs_here()
        return False

    def _runs_here(self) -> bool:
        """Return whether somebody has started or restored the stopped container. Raises GpusnapError."""
        try:
            return podman.inspect_container(self._found.id).status in ("running", "paused")
        except NotFound:
            return False

    def _settle(self, error: BaseException) -> str:
        """Ask again about the container over there: confirmed or undone."""
        last: BaseException = error
        for _ in range(_TRIES):
            try:
                self._progress.stage(f"asking {self._to} about the container")
                self._hang_up()
                return unfinished.ask(self._note)
            except (Exception, KeyboardInterrupt) as failed:
                last = failed
        raise GpusnapError(
            f"{self._to} does not say what became of its restore of {self._found.name}, and it is unknown "
            f"whether the container runs there: {_make_told_error(last)}; on this host it stays stopped",
            hint=f"run gpusnap recover, which asks {self._to} again; if podman ps there shows that "
            f"{self._note.there} does not run, gpusnap restore --not-migrated {self._note.checkpoint} "
            "continues it here",
            code="GPS-823",
        ) from last

    def _hang_up(self, *, settled: bool = False) -> None:
        """End the connection; the other side undoes what was not confirmed. May be called twice.

        A signal ends the wait for a connection that does not respond. settled: this host will not ask about
        the container again.
        """
        if not self._hung_up:
            self._hung_up = True
            with suppress(GpusnapError, KeyboardInterrupt):
                self._request("end", settled=settled)
            with suppress(KeyboardInterrupt):
                self._link.close()

    def _ask(self, what: str, **more: Any) -> dict[str, Any]:
        """Send a request to the other side. Raises LinkLost, and the error that it reports."""
        self._request(what, **more)
        return check_answer(self._channel.receive(), self._to)

    def _request(self, what: str, **more: Any) -> None:
        self._channel.send({"ask": what, **more})


def _gpus(found: podman.Container, driver: Driver | None) -> list[GpuRecord]:
    """Return the GPUs that its processes use, with their bytes."""
    if driver is None or not found.init:
        return []
    pids = [each.pid for each in containers.processes(found.init, found.id)]
    host = driver.host()
    estimates = estimate_used(driver.memory_used(pids), host).values()
    used = sum_by_gpu(sizes.items() for sizes in estimates)
    return [
        GpuRecord(
            g.uuid, g.minor, g.index, g.model, g.compute_capability, g.memory_total, used[g.uuid], g.pci
        )
        for g in host.gpus
        if g.uuid in used
    ]


def _convert_after(error: BaseException, said: GpusnapError) -> GpusnapError:
    """Return what is said after an error, as an interruption if that was one: the exit code depends on it."""
    if isinstance(error, KeyboardInterrupt | Interrupted):
        return Interrupted(str(said), hint=said.hint, code=said.code)
    return said


def _make_told_error(error: BaseException) -> GpusnapError:
    """Return an error of any kind, or an interruption, as one for the user."""
    return make_told_error(error) if isinstance(error, Exception) else stop_signals.make_interrupted()


def _pairs(answer: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(str(old), str(new)) for old, new in answer["pairs"]]
