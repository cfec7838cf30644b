"""checkpoint and restore: from the command line to an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from gpusnap.oci.base.files import exists
from gpusnap.runtime_shim.base import log, question_process, threads
from gpusnap.runtime_shim.base.errors import (
    ContainerError,
    GpusnapError,
    RuntimeFailed,
    SettingsError,
    make_unforeseen,
    raise_as,
)
from gpusnap.runtime_shim.base.progress import VARIABLE, reporter
from gpusnap.runtime_shim.gpu import find_driver, find_drivers, holders, open_driver
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.gpu.api.errors import GpuError
from gpusnap.runtime_shim.records import cri_layout, manifest_file, manifest_json
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall, RestoreCall, parse, render
from gpusnap.runtime_shim.runtime.criu.external_mounts import list_undeclared
from gpusnap.runtime_shim.runtime.criu.images import image_process
from gpusnap.runtime_shim.runtime.criu.run import make_quiet_command
from gpusnap.runtime_shim.runtime.identify import RealRuntime, identify
from gpusnap.runtime_shim.runtime.podman import dev_shm
from gpusnap.runtime_shim.settings import Settings, apply_annotations, load_usable
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import find_users

# The same as in gpusnap.runtime_shim.snapshot.records.journal, whose import a container without a GPU must
# avoid.
JOURNAL = "/run/gpusnap/journal"
# As in shim/overrides.py, for the same reason.
ORDERS = "/run/gpusnap/orders"


def main(argv: list[str]) -> int:
    """Run `checkpoint` or `restore`; `argv` is without the program's name. Returns the exit code."""
    call: CheckpointCall | RestoreCall | None = None
    threads.bound_thread_starts()
    try:
        call = parse(argv)
        settings = _settings()
        real = _find_real(call)
        if isinstance(call, CheckpointCall):
            return _checkpoint(call, real, settings)
        return _restore(call, real, settings)
    except GpusnapError as error:
        if call is None:
            raise  # the entry point reads --log from a line that could not be parsed
        log.report(error, log=call.globals.log, log_format=call.globals.log_format)
        return error.exit_code if isinstance(error, RuntimeFailed) else 1
    except Exception as error:
        if call is None:
            raise
        # An unexpected kind of error, or a configuration of an unexpected form; whatever was begun was
        # undone.
        if call.globals.debug:
            traceback.print_exception(error)
        log.report(make_unforeseen(error), log=call.globals.log, log_format=call.globals.log_format)
        return 1
    finally:
        question_process.kill_all()  # the entry point ends this process at once


def _settings() -> Settings | SettingsError:
    """Return the settings, or their error, which does not concern a container without a GPU."""
    try:
        return load_usable()
    except SettingsError as error:
        return error


def _require_valid(settings: Settings | SettingsError) -> Settings:
    """Raise that error for a container that may have GPU state, which a plain checkpoint would lose."""
    if isinstance(settings, SettingsError):
        raise settings
    return settings


def _find_real(call: CheckpointCall | RestoreCall) -> RealRuntime:
    """Return the runtime that every other command of this container goes to."""
    command = "checkpoint" if isinstance(call, CheckpointCall) else "restore"
    return locate.start([command, call.container_id], 0, call.globals.root, _identify)


def _identify(path: str, args: list[str]) -> RealRuntime:
    return identify(Path(path))


def _checkpoint(call: CheckpointCall, real: RealRuntime, settings: Settings | SettingsError) -> int:
    _make_work(call, real)
    driver = find_driver()
    if driver is None:
        if (path := call.image_path or "").startswith("/"):
            dev_shm.keep(os.path.dirname(path))  # the driver may be gone since the last checkpoint
        _hand_over(call, real)
    _take_away(call, real, driver)
    root = container_key.root(call.globals.root, real.kind)
    try:
        container = containers.find(make_quiet_command(call, real), call.container_id, root=root)
    except ContainerError:
        _hand_over(call, real)  # the runtime reports the error itself
    if _recover(driver, container, settings):
        container = containers.find(make_quiet_command(call, real), call.container_id, root=root)
    others = (each for each in find_drivers() if each.vendor != driver.vendor)
    drivers = (driver, *others)
    if not any(_concerns_us(each, container) for each in drivers):
        _spare_neighbours(call, container, drivers)
        # Without gpusnap's own copy of the files, Podman's of a container that continues is the only one.
        dev_shm.prepare(containers.bundle_config(container.bundle), container.bundle, runs_on=False)
        _hand_over(call, real)
    question_process.start()  # before there are threads
    # The manifest is checked while the container is stopped, so its checker is imported now.
    checks = threads.run_meanwhile(manifest_json.prepare, name="gpusnap-checks")
    with open_driver(driver), checks:
        # Imported late: a container without a GPU must not wait for it.
        from gpusnap.runtime_shim.runtime.criu import scratch_files
        from gpusnap.runtime_shim.shim import overrides
        from gpusnap.runtime_shim.snapshot.checkpoint import checkpoint
        from gpusnap.runtime_shim.snapshot.gpu_processes.choose_driver import choose_driver
        from gpusnap.runtime_shim.snapshot.records import journal, suspensions
        from gpusnap.runtime_shim.snapshot.recovery import restored_containers

        _announce(call)
        settings = overrides.apply_orders(
            apply_annotations(_require_valid(settings), container.annotations), container.id
        )
        driver = choose_driver(driver, container, settings)
        with journal.hold(container.key):
            asleep = suspensions.read(container.key)
            if asleep is not None and asleep.stage is not suspensions.Stage.SUSPENDED:
                raise suspensions.make_unfinished_error(asleep)
            recipient = overrides.find_recipient(container.id)
            remover = overrides.find_remover(container.id) if call.leave_running else None
            checkpoint(call, real, settings, driver, container, asleep, recipient, remover)
            if cri_layout.is_wanted(str(call.images()), container.annotations):
                cri_layout.fold(str(call.images()))
        restored_containers.sweep()
        scratch_files.sweep_all()
    return 0


def _make_work(call: CheckpointCall, real: RealRuntime) -> None:
    """Make the work directory, as runc does and crun does not; containerd relies on it."""
    if real.kind == "crun" and (work := call.work()) is not None:
        with contextlib.suppress(OSError):  # the runtime reports the error itself
            os.mkdir(work, 0o700)


def _recover(driver: Driver, container: containers.Container, settings: Settings | SettingsError) -> bool:
    """First repair what a killed gpusnap left of this container; return whether there was anything."""
    if not _is_there(JOURNAL):
        return False
    from gpusnap.runtime_shim.snapshot.records import journal, suspensions
    from gpusnap.runtime_shim.snapshot.records.suspensions import Stage

    if (asleep := suspensions.read(container.key)) is not None:
        if asleep.stage is Stage.SUSPENDED:
            return False  # there is nothing to repair
        raise suspensions.make_unfinished_error(asleep)
    # An earlier version's entry has only the ID; its processes are found by PID and start time.
    found = [entry for key in (container.key, container.id) if (entry := journal.read(key)) is not None]
    if not found:
        return False
    from gpusnap.runtime_shim.snapshot.recovery.checkpoint import recover

    for entry in found:
        log.note(
            "an earlier checkpoint was interrupted; "
            f"{recover(entry, driver, _require_valid(settings).memory)}",
            code="GPS-021",
        )
    return True


def _is_there(path: str) -> bool:
    """Whether a file of the journal exists. Raises GpusnapError."""
    with raise_as(GpusnapError, f"{path} cannot be read", hint="try again", code="GPS-007"):
        return exists(path)


def _take_away(call: CheckpointCall | RestoreCall, real: RealRuntime, driver: Driver | None) -> None:
    """First remove what a killed restore left of this container.

    Before a restore. The caller of a checkpoint considers the container running, so none is removed then,
    whatever it looks like.
    """
    key = container_key.key(container_key.root(call.globals.root, real.kind), call.container_id)
    for each in (key, call.container_id):  # an earlier version's has only the ID, and the command to ask
        if _is_there(f"{JOURNAL}/{each}.restore"):
            from gpusnap.runtime_shim.snapshot.recovery import restore as recover_restore

            said = recover_restore.recover(each, driver, remove=isinstance(call, RestoreCall))
            log.note(f"an earlier restore was interrupted; {said}", code="GPS-022")


def _announce(call: CheckpointCall | RestoreCall) -> None:
    """Report each step as it begins: to the command that waits, and with --debug on stderr.

    Not in --log, because Podman reads one line of that.
    """
    from gpusnap.runtime_shim.base.transaction import announce

    def tell(name: str) -> None:
        reporter.step(name)
        if call.globals.debug:
            log.say(f"step {name}")

    announce(tell)


def _restore(call: RestoreCall, real: RealRuntime, settings: Settings | SettingsError) -> int:
    _take_away(call, real, find_driver())
    images = str(call.images(real.kind))
    cri_layout.unfold(images)
    if not manifest_file.is_ours(images):
        _hand_over(call, real)
    valid = _require_valid(settings)
    question_process.start()  # before there are threads
    checks = threads.run_meanwhile(manifest_json.prepare, image_process.prepare, name="gpusnap-checks")
    with open_driver(find_driver()), checks:
        from gpusnap.runtime_shim.runtime.criu import scratch_files
        from gpusnap.runtime_shim.snapshot.recovery import restored_containers
        from gpusnap.runtime_shim.snapshot.restore import restore

        _announce(call)
        if board := os.environ.get(VARIABLE):
            reporter.report_to(board)
        config = containers.bundle_config(str(call.bundle_dir()))
        code = restore(call, real, apply_annotations(valid, containers.bundle_annotations(config)), config)
    restored_containers.sweep()
    scratch_files.sweep_all()
    key = container_key.key(container_key.root(call.globals.root, real.kind), call.container_id)
    restored_containers.record_report(key)  # last: with the exit code the engine knows
    return code


def _concerns_us(driver: Driver, container: containers.Container) -> bool:
    """Whether a process may have GPU state, or the driver has mounts at which CRIU would fail."""
    if not container.pid:
        return False
    members = containers.processes(container.pid, container.id)
    if any(driver.holds(process.pid) for process in members):
        return True
    if list_undeclared(container.pid, containers.bundle_config(container.bundle))[0]:
        return True
    if not holders(driver, [process.pid for process in members]):
        return False
    if container.status == "paused":
        return True  # it cannot be asked before it is thawed
    try:
        driver.open()  # a process that only loaded the driver's library may be suspended: ask
    except GpuError:
        return False  # without the checkpoint API it cannot be suspended
    return bool(find_users(driver, members))


def _spare_neighbours(
    call: CheckpointCall, container: containers.Container, drivers: Iterable[Driver]
) -> None:
    """Refuse if the checkpoint of a container without a GPU would end another one that uses GPUs."""
    if call.leave_running:
        return
    others = containers.list_beside(container.pid, container.id)
    if any(each.holds(process.pid) for each in drivers for process in others):
        from gpusnap.runtime_shim.snapshot.preflight import checks as preflight

        preflight.refuse_neighbours(call, container)


def _hand_over(call: CheckpointCall | RestoreCall, real: RealRuntime) -> NoReturn:
    """Become the real runtime: this container has no GPU, and gpusnap must not be noticeable."""
    if (
        isinstance(call, CheckpointCall)
        and call.leave_running
        and exists(f"{ORDERS}/{call.container_id}.json")
    ):
        from gpusnap.runtime_shim.shim import overrides

        if overrides.find_remover(call.container_id) is not None:
            from gpusnap.runtime_shim.snapshot import left_stopped

            raise left_stopped.make_refusal("none of its processes uses a GPU")
    path, *args = render(call, real)
    sys.stdout.flush()
    sys.stderr.flush()
    locate.become(path, args)
