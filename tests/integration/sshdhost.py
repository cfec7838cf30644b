"""A real sshd on the second host, with keys of its own: what `gpusnap migrate` meets between two machines."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from otherhost import FOLDER
from support import good, run, until

_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
PidFile none
AuthorizedKeysFile {folder}/authorized
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PrintMotd no
"""


@dataclass(frozen=True)
class Sshd:
    """Where it listens, and how it is reached."""

    folder: Path
    port: int
    pid: int

    @property
    def to(self) -> str:
        return f"ssh://root@127.0.0.1:{self.port}"

    def client(self, *, key: str = "key", known: str = "known") -> str:
        """A command line of ssh that reads nothing of the user's."""
        options = {
            "UserKnownHostsFile": self.folder / known,
            "GlobalKnownHostsFile": "none",
            "IdentitiesOnly": "yes",
            "StrictHostKeyChecking": "yes",
        }
        words = [f"-o {name}={value}" for name, value in options.items()]
        return " ".join(["ssh -F none", f"-i {self.folder / key}", *words])

    def write(self, name: str, content: str) -> None:
        (self.folder / name).write_text(content)

    def sessions(self) -> list[int]:
        """The processes of sshd's that serve a connection: a monitor and its child each."""
        monitors = children(self.pid)
        inner = (each for monitor in monitors for each in children(monitor))
        return [*monitors, *(each for each in inner if _comm(each).startswith("sshd"))]


def children(pid: int) -> list[int]:
    """The processes that one has started and that have not ended."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            state, parent = (each / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(each.name))
    return found


def _comm(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


@contextmanager
def sshd() -> Iterator[Sshd]:
    """One on the second host, which has been started, until the block ends."""
    folder = FOLDER / "sshd"
    folder.mkdir(mode=0o700)
    for name in ("host", "other-host", "key", "other-key"):
        good(run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name))
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "config").write_text(_CONFIG.format(port=port, folder=folder))
    (folder / "authorized").write_text((folder / "key.pub").read_text())
    for known, host in (("known", "host"), ("wrong-known", "other-host")):
        (folder / known).write_text(f"[127.0.0.1]:{port} {(folder / host).with_suffix('.pub').read_text()}")
    (folder / "none-known").touch()
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd(8): its directory for privilege separation
    holder = (FOLDER / "holder").read_text()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["nsenter", "--mount", "--target", holder, "/usr/sbin/sshd", "-D", "-e", "-f", folder / "config"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"]},
        )
    try:
        until(lambda: _listens(port), "sshd listens")
        yield Sshd(folder, port, process.pid)
    finally:
        process.terminate()
        process.wait(30)


def _listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
