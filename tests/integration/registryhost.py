"""Debian's docker-registry on loopback, with or without passwords; a fresh and empty one for each test."""

from __future__ import annotations

import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PASSWORD", "USER", "Registry", "running"]

USER, PASSWORD = "someone", "the right words"
# bcrypt of PASSWORD, the only kind that docker-registry reads.
_HTPASSWD = f"{USER}:$2y$05$abcdefghijklmnopqrstuuIEjFIWaGtJW7VwTeX/TE7Jfd5rsq//O\n"
_LISTENING = re.compile(r"listening on (127\.0\.0\.1:[0-9]+)")
_DEADLINE = 20.0

_CONFIG = """\
version: 0.1
log: {{level: info, formatter: text}}
storage:
  filesystem: {{rootdirectory: {folder}/data}}
  delete: {{enabled: true}}
http:
  addr: 127.0.0.1:0
  secret: for-one-test
"""
_AUTH = "auth: {{htpasswd: {{realm: test, path: {folder}/htpasswd}}}}\n"


@dataclass(frozen=True)
class Registry:
    """A running registry: host:port, the folder of its data, and its log."""

    host: str
    data: Path
    log: Path


@contextmanager
def running(*, passwords: bool = False) -> Iterator[Registry]:
    """A registry until the context ends; `passwords`: only USER may come in, with PASSWORD."""
    with tempfile.TemporaryDirectory(prefix="registry-") as name:
        folder = Path(name)
        (folder / "htpasswd").write_text(_HTPASSWD)
        config = folder / "config.yml"
        config.write_text((_CONFIG + (_AUTH if passwords else "")).format(folder=folder))
        log = folder / "log"
        with log.open("wb") as file:
            child = subprocess.Popen(
                ["docker-registry", "serve", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        try:
            yield Registry(_host(child, log), folder / "data", log)
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(_DEADLINE)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _host(child: subprocess.Popen[bytes], log: Path) -> str:
    """Where it listens, as its log says."""
    end = time.monotonic() + _DEADLINE
    while child.poll() is None and time.monotonic() < end:
        if match := _LISTENING.search(log.read_text(errors="replace")):
            return match[1]
        time.sleep(0.02)
    raise AssertionError(f"docker-registry did not begin to listen:\n{log.read_text(errors='replace')}")
