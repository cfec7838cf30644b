"""A second host in the test host: a mount namespace in which Podman, runtimes and gpusnap have own folders.

`SSH` is a program that runs a command there, as ssh does on another host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from storehost import STORE
from support import Done, good, run

FOLDER = Path("/var/lib/other-host")
SSH = FOLDER / "ssh"
# What a host has for itself; the GPUs are the same for both.
_OWN = (
    "/var/lib/containers",
    "/run/containers",
    "/run/libpod",
    "/run/crun",
    "/run/runc",
    "/run/gpusnap",
    "/var/lib/gpusnap",
)
# The words of ssh before the command: -T, -p PORT, --, HOST.
_PROGRAM = f"""\
#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift 2
echo "$$" >>{FOLDER}/calls
[ ! -e {FOLDER}/first ] || . {FOLDER}/first
exec {sys.executable} {Path(__file__).with_name("cutting_ssh.py")} {FOLDER}/plan -- \\
    nsenter --mount --target="$(cat {FOLDER}/holder)" $*
"""


@dataclass(frozen=True)
class OtherHost:
    """Commands on it."""

    def run(self, *words: str | os.PathLike[str]) -> Done:
        return run("nsenter", "--mount", "--target", (FOLDER / "holder").read_text(), *words)

    def podman(self, *words: str | os.PathLike[str]) -> Done:
        return self.run("podman", "--runtime", "gpusnap-runtime", *words)

    def containers(self) -> list[str]:
        return good(self.podman("ps", "--all", "--format", "{{.Names}} {{.State}}")).splitlines()

    def breaks(self, plan: str) -> None:
        """The next connection does, as cutting_ssh.py has it."""
        (FOLDER / "plan").write_text(plan)

    def calls(self) -> int:
        """How many connections there were."""
        return len((FOLDER / "calls").read_text().splitlines())

    def first(self, script: str) -> None:
        """That runs in the place of ssh, before it goes there."""
        (FOLDER / "first").write_text(script)


@contextmanager
def other_host(also: Sequence[Path] = ()) -> Iterator[OtherHost]:
    """It, with Podman's image of this one, until the block ends. `also`: more directories for itself."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(mode=0o700)
    good(run("mount", "-t", "tmpfs", "-o", "size=2g", "other", str(FOLDER)))
    own = [*_OWN, str(STORE), *map(str, also)]
    binds = ["mount --make-rprivate /"]
    for at, path in enumerate(own):
        Path(path).mkdir(parents=True, exist_ok=True)
        (FOLDER / str(at)).mkdir()
        binds.append(f"mount --bind {FOLDER}/{at} {path}")
    binds += ["mount -t tmpfs shm /dev/shm", f"echo $$ >{FOLDER}/holder", "echo ready", "exec cat"]
    # The namespace lasts as long as somebody is in it: this one, until its stdin ends.
    holder = subprocess.Popen(
        ["unshare", "--mount", "sh", "-ec", "\n".join(binds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    (FOLDER / "holder").write_text((FOLDER / "holder").read_text().strip())
    SSH.write_text(_PROGRAM)
    SSH.chmod(0o755)
    found = OtherHost()
    try:
        image = FOLDER / "base.tar"
        good(run("podman", "save", "--quiet", "--output", image, "localhost/base"))
        good(found.podman("load", "--quiet", "--input", image))
        yield found
    finally:
        (FOLDER / "first").unlink(missing_ok=True)
        for name in good(found.podman("ps", "--all", "--format", "{{.Names}}")).split():
            good(found.podman("rm", "--force", "--time", "0", name))
        holder.stdin.close()
        holder.stdout.close()
        holder.wait(90)
        good(run("umount", "--lazy", str(FOLDER)))
