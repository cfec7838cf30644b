"""Records each checkpoint and restore if the settings say so; errors do not stop the command."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gpusnap.base.user_errors import NotFound
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError, printable, reason
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.runtime.find import SYSTEM_LOG
from gpusnap.runtime_shim.settings import Metrics

_INFO = b"<30>"  # syslog(3): LOG_DAEMON | LOG_INFO
# Limit on a name from a checkpoint, which anybody may have written.
_LONGEST_NAME = 256
_OF_CHECKPOINTS = {
    "seconds": "gpusnap_checkpoint_seconds",
    "pause": "gpusnap_checkpoint_pause_seconds",
    "size": "gpusnap_checkpoint_size_bytes",
    "new": "gpusnap_checkpoint_new_bytes",
    "gpuMemory": "gpusnap_checkpoint_gpu_memory_bytes",
}


class Record:
    """The facts about a checkpoint or restore."""

    def __init__(self, container: str) -> None:
        self.container = container
        """The container's name, once it is known."""
        self.figures: dict[str, float | str] = {}
        """In bytes and seconds."""


@contextmanager
def record_operation(
    operation: str, container: str = "", *, find_name: Callable[[], str] = str
) -> Iterator[Record]:
    """Record the operation of the block, a "checkpoint" or a "restore", also if it fails.

    find_name: returns the container's name if the block failed before it was known.
    """
    record, began = Record(container), time.monotonic()
    try:
        yield record
    except GpusnapError as error:
        _record(operation, record, began, error, find_name)
        raise
    _record(operation, record, began, None)


def _record(
    operation: str,
    record: Record,
    began: float,
    error: GpusnapError | None,
    find_name: Callable[[], str] = str,
) -> None:
    """Write to the textfile and the journal. Any error is only a note."""
    try:
        chosen = settings_file.load().metrics
    except GpusnapError:  # the command itself has reported it
        return
    if not (chosen.textfile or chosen.journal):
        return
    if not record.container:
        with suppress(Exception):  # the command's own error is what counts
            record.container = printable(find_name())[:_LONGEST_NAME]
    event = {
        "operation": operation,
        "container": record.container,
        "result": "failure" if error is not None else "success",
        "seconds": round(time.monotonic() - began, 3),
        **record.figures,
        **({"code": error.code, "error": str(error)} if error is not None else {}),
    }
    for tell in (_tell_textfile, _tell_journal):
        if tell is _tell_textfile and error is not None and _is_slip(error):
            continue
        try:
            tell(chosen, event)
        except Exception as failure:  # full disk, no permission, no folder: the checkpoint is what counts
            what = "textfile" if tell is _tell_textfile else "journal"
            said = GpusnapError(
                f"metrics.{what}: this {operation} is not recorded: {failure}",
                hint="check that it can be written, or remove the setting",
            )
            note(said.sentence())


def _is_slip(error: GpusnapError) -> bool:
    """Return whether the command line is wrong: nothing has been tried, and no alert is wanted."""
    return isinstance(error, UsageError) or (isinstance(error, NotFound) and not error.code)


def _tell_textfile(chosen: Metrics, event: Mapping[str, Any]) -> None:
    if not chosen.textfile:
        return
    from gpusnap.metrics.textfile import update_values

    container, operation, now = event["container"], event["operation"], round(time.time(), 3)
    with update_values(chosen.textfile) as values:
        if event["result"] == "failure":
            values.add("gpusnap_failures_total", operation=operation, code=event["code"] or "none")
            values.set(
                "gpusnap_last_failure_timestamp_seconds", now, operation=operation, container=container
            )
        elif operation == "restore":
            values.add("gpusnap_restores_total", container=container)
            values.set("gpusnap_restore_seconds", event["seconds"], container=container)
            values.set("gpusnap_last_restore_timestamp_seconds", now, container=container)
        else:
            values.add("gpusnap_checkpoints_total", container=container)
            values.add("gpusnap_checkpoint_written_bytes_total", event.get("new", 0), container=container)
            for key, name in _OF_CHECKPOINTS.items():
                if key in event:
                    values.set(name, event[key], container=container)
            values.set("gpusnap_last_checkpoint_timestamp_seconds", now, container=container)


def _tell_journal(chosen: Metrics, event: Mapping[str, Any]) -> None:
    """Send one line of JSON to the socket of the system's log, which journald reads too; see syslog(3)."""
    if not chosen.journal:
        return
    import socket

    line = json.dumps({key: value for key, value in event.items() if value is not None})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.setblocking(False)
        try:
            log.sendto(_INFO + f"gpusnap[{os.getpid()}]: {line}".encode(), SYSTEM_LOG)
        except OSError as error:
            raise GpusnapError(f"{SYSTEM_LOG}: {reason(error)}") from error
