"""checkpoint and restore: from the command line to an exit code."""

from __future__ import annotations

import sys
from typing import NoReturn

from runtime_shim import container as containers
from runtime_shim import locate, log, manifest
from runtime_shim.argv import CheckpointCall, RestoreCall, parse, render, render_globals
from runtime_shim.errors import ContainerError, GpusnapError, RuntimeFailed
from runtime_shim.gpu import find_driver, holders
from runtime_shim.real import RealRuntime, find, identify
from runtime_shim.settings import Settings, annotated, load

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Run `checkpoint` or `restore`; `argv` is without the program's name. Returns the exit code."""
    call: CheckpointCall | RestoreCall | None = None
    try:
        call = parse(argv)
        settings = load()
        real = identify(find(settings.runtime or None))
        if isinstance(call, CheckpointCall):
            return _checkpoint(call, real, settings)
        return _restore(call, real, settings)
    except GpusnapError as error:
        if call is None:
            raise  # the entry point reads --log from a line that could not be parsed
        log.report(error, log=call.globals.log, log_format=call.globals.log_format)
        return error.exit_code if isinstance(error, RuntimeFailed) else 1


def _checkpoint(call: CheckpointCall, real: RealRuntime, settings: Settings) -> int:
    driver = find_driver()
    if driver is None:
        _hand_over(call, real)
    try:
        container = containers.find(render_globals(call.globals, real), call.container_id)
    except ContainerError:
        _hand_over(call, real)  # the runtime says it in its own words
    members = containers.processes(container.pid) if container.pid else ()
    if not holders(driver, [process.pid for process in members]):
        _hand_over(call, real)
    # Imported late: a container without a GPU must not wait for it.
    from runtime_shim.checkpoint import checkpoint

    checkpoint(call, real, annotated(settings, container.annotations), driver, container)
    return 0


def _restore(call: RestoreCall, real: RealRuntime, settings: Settings) -> int:
    if not manifest.belongs(str(call.images(real.kind))):
        _hand_over(call, real)
    from runtime_shim.restore import restore

    annotations = containers.bundle_annotations(containers.bundle_config(str(call.bundle_dir())))
    return restore(call, real, annotated(settings, annotations))


def _hand_over(call: CheckpointCall | RestoreCall, real: RealRuntime) -> NoReturn:
    """Become the real runtime: this container has no GPU, and nothing of ours shall show."""
    path, *args = render(call, real)
    sys.stdout.flush()
    sys.stderr.flush()
    locate.become(path, args)
