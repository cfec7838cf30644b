"""What a user, Podman and containerd are told when something goes wrong.

The sentence goes to stderr. If the caller gave --log, it also goes there in the caller's format: a JSON
object with level, msg and time, and code if the error has one (libpod/oci_util.go ociError reads one object;
containerd's go-runc the last one with level error), or runc's text form. The real runtime's own log is a
separate file whose content becomes part of gpusnap's sentence, because Podman could not read a log with two
JSON objects.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from datetime import UTC, datetime

from gpusnap.oci.base.json_text import parse_json
from gpusnap.runtime_shim.base.errors import GpusnapError, printable, reason, with_code

NOTE = "note: "
"""How a sentence on stderr begins that is no error; gpusnap/engines/podman.py distinguishes the two."""


def report(error: GpusnapError, *, log: str | None = None, log_format: str | None = None) -> None:
    """Write the error to stderr and the caller's log; an unwritable log does not hide the error."""
    sentence = error.sentence()
    say(sentence)
    path = (log or "").removeprefix("file:")
    if not path or path.startswith(("journald:", "syslog:")):
        return
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    if log_format == "json":
        entry = {"level": "error", "msg": f"gpusnap: {sentence}", "time": now}
        line = json.dumps(entry | ({"code": error.code} if error.code else {}))
    else:
        line = f"time={json.dumps(now)} level=error msg={json.dumps('gpusnap: ' + sentence)}"
        line += f" code={error.code}" if error.code else ""
    try:
        # Podman's log is in the directory into which it unpacks archives: links there are not followed, and
        # FIFOs not waited for. /dev/stderr is a link, and belongs to nobody else.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        flags |= 0 if path.startswith(("/dev/", "/proc/")) else os.O_NOFOLLOW
        with open(os.open(path, flags, 0o600), "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as failure:
        note(f"the log {path} cannot be written: {reason(failure)}")


def note(text: str, *, code: str = "") -> None:
    """Write a note that is no error on stderr."""
    say(NOTE + with_code(text, code))


def say(text: str) -> None:
    """Write a line on stderr; continue if nobody reads it."""
    with contextlib.suppress(OSError):
        print(f"gpusnap: {printable(text)}", file=sys.stderr, flush=True)


def _entries(text: str) -> list[dict[str, str]]:
    entries = []
    for line in text.splitlines():
        try:
            entry = parse_json(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append({key: str(value) for key, value in entry.items()})
    return entries


def runtime_message(log_text: str, stderr: str) -> str:
    """Return the real runtime's message for its failure: its JSON log's last error, else stderr's end."""
    errors = [e["msg"] for e in _entries(log_text) if e.get("level") == "error" and "msg" in e]
    if errors:
        return errors[-1].strip()
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def runtime_warnings(log_text: str) -> list[str]:
    """Return its warnings and errors, which the user also sees after a success."""
    return [e["msg"] for e in _entries(log_text) if e.get("level") in ("warning", "error") and "msg" in e]
