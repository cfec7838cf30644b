"""The program that connects to the other host, ssh(1) or a similar one, and the gpusnap that runs there."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gpusnap.migration.frames import Channel, LinkLost
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError, advise, printable, reason

# Seconds for ssh to ask for a password, and to connect; its own deadline is ConnectTimeout.
_CONNECTING = 120.0
# Seconds for it to end.
_ENDING = 5.0
_SSH = "ssh"
_DESTINATION = compile_later(
    r"ssh://(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?"
    r"(?P<host>\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9][A-Za-z0-9._-]*)"
    r"(?::(?P<port>[0-9]{1,5}))?/?"
)


@dataclass(frozen=True, slots=True)
class Destination:
    """Another host, in ssh's terms."""

    host: str
    user: str = ""
    port: int = 0

    def __str__(self) -> str:
        return self.host

    def words(self) -> list[str]:
        """Return the words for the command line of ssh, without its name."""
        port = ["-p", str(self.port)] if self.port else []
        return ["-T", *port, "--", f"{self.user}@{self.host}" if self.user else self.host]


def destination(text: str) -> Destination:
    """Parse ssh://[USER@]HOST[:PORT]. Raises UsageError."""
    found = _DESTINATION.fullmatch(text)
    if found is None or (found["port"] and not 0 < int(found["port"]) < 1 << 16):
        raise UsageError(
            f"{text[:120]!r} is not a valid host",
            hint="write ssh://HOST, or ssh://USER@HOST:PORT",
            code="GPS-102",
        )
    return Destination(found["host"].strip("[]"), found["user"] or "", int(found["port"] or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How to connect to the other host."""

    to: Destination
    ssh: str = _SSH
    """A command line, such as ssh -i KEY."""
    program: str = "gpusnap"
    """The command line of gpusnap there, such as sudo -n gpusnap."""

    def command(self, words: str = "migrate --server") -> list[str]:
        """Return the whole command line; `words`: what the gpusnap there shall do."""
        return [*shlex.split(self.ssh), *self.to.words(), f"{self.program} {words}"]


@contextmanager
def connect(route: Route) -> Iterator[Channel]:
    """Connect to a gpusnap on the other host, and wait for its greeting. Raises GpusnapError."""
    command = route.command()
    with tempfile.TemporaryFile() as said:
        try:
            with _ignore_interrupts():
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    bufsize=0,
                )
        except (OSError, ValueError) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            lack = advise(error) if isinstance(error, OSError) else ""
            raise GpusnapError(
                f"{command[0]} cannot be run: {why}",
                hint=lack or ("install OpenSSH's client" if route.ssh == _SSH else "check --ssh"),
                code="" if lack else "GPS-820",
            ) from error
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            channel = Channel(child.stdout.fileno(), child.stdin.fileno(), str(route.to))
            try:
                Channel(
                    child.stdout.fileno(), child.stdin.fileno(), str(route.to), silence=_CONNECTING
                ).expect_greeting()
            except LinkLost as error:
                if error.code == "GPS-821":
                    raise
                raise _make_unreachable_error(route, error, _read_said_lines(said, child)) from error
            yield channel
        finally:
            child.stdin.close()
            child.stdout.close()
            _end(child)


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Programs that are started in the block ignore Ctrl-C: we handle it, and the other side undoes all.

    They stay in our process group, so that they may ask for a password; ssh leaves a signal ignored.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(child: subprocess.Popen[bytes]) -> None:
    for number in (0, signal.SIGTERM, signal.SIGKILL):  # 0 sends no signal
        child.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_ENDING)
            return


def _read_said_lines(said: object, child: subprocess.Popen[bytes]) -> list[str]:
    """Return the lines of stderr from ssh, or from the remote shell; waits a moment for its end."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(_ENDING)
    descriptor = said.fileno()  # type: ignore[attr-defined]
    size = os.fstat(descriptor).st_size
    text = os.pread(descriptor, 4096, max(0, size - 4096)).decode(errors="replace")
    return [printable(line.strip())[:300] for line in text.splitlines() if line.strip()]


def _make_unreachable_error(route: Route, error: LinkLost, lines: list[str]) -> GpusnapError:
    last = lines[-1] if lines else ""
    attempt = f"check that this works as the same user: {shlex.join(route.command('version'))}"
    if "not found" in last or "sudo:" in last:
        return GpusnapError(
            f"gpusnap does not run on {route.to}: {last}",
            hint="install gpusnap there; --remote-command sets how to run it, such as 'sudo -n gpusnap'",
            code="GPS-820",
        )
    if last.startswith("gpusnap: "):
        return GpusnapError(f"{route.to}: {last.removeprefix('gpusnap: ')}", hint=attempt, code="GPS-820")
    hint = next((hint for what, hint in _HINTS if any(what in line for line in lines)), attempt)
    return GpusnapError(f"{route.to} cannot be reached: {last or error}", hint=hint, code="GPS-820")


# OpenSSH's messages (ssh(1) has no exit codes for them), and what to do; the first match counts.
_HINTS = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        (
            "its host key is not the one that ssh knows: find out why before you remove the old one with "
            "ssh-keygen -R"
        ),
    ),
    ("Host key verification failed", "log in manually once as the same user, so that ssh knows its host key"),
    ("Permission denied", "check that the user may log in there; --ssh 'ssh -i KEY' names a key"),
    ("Connection refused", "check that sshd is running there, and its port: ssh://HOST:PORT"),
    ("Could not resolve hostname", "check the name, and that this host can resolve it"),
)


def check_command_line(text: str, option: str) -> None:
    """Raise UsageError if an option has an empty command line."""
    try:
        found = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} {text[:80]!r} is not a valid command line: {error}") from error
    if not found:
        raise UsageError(f"{option} is empty", hint="omit it, or name a program")
