"""The real runtime, crun or runc: where it is, its version and its features."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import RuntimeFailed
from gpusnap.runtime_shim.runtime import child_process
from gpusnap.runtime_shim.runtime import find as locate

Kind = Literal["crun", "runc", "other"]

_DEADLINE = 30.0
_VERSION_LINE = compile_later(r"(?P<name>\S+) version (?P<version>\S+)")


@dataclass(frozen=True, slots=True)
class RealRuntime:
    """A runtime's program, according to its --version."""

    path: Path
    kind: Kind
    version: tuple[int, ...]
    """(1, 1, 15) for 1.1.15+ds1; empty if it does not say it."""
    line: str = ""
    """The first line of --version, e.g. "crun version 1.21", for manifest and messages."""
    features: frozenset[str] = frozenset()
    """crun's build features without the plus: {"SYSTEMD", "CRIU", …}; runc reports none."""

    @property
    def version_text(self) -> str:
        """Dotted: 1.1.15; empty if it does not say it."""
        return ".".join(map(str, self.version))

    @property
    def name(self) -> str:
        """Kind and version for messages: "crun 1.21"; another runtime by its program's name."""
        kind = self.path.name if self.kind == "other" else self.kind
        return f"{kind} {self.version_text}".strip()

    @property
    def has_criu(self) -> bool:
        """Whether it was built with checkpoint and restore: Debian 12's crun was not."""
        return self.kind != "crun" or "CRIU" in self.features


def find(name_or_path: str | None = None, *, root: str | None = None) -> Path:
    """Find the real runtime from the setting `runtime`, or else crun or runc; see locate.find."""
    return Path(locate.find(name_or_path or None, root=root))


def identify(path: Path) -> RealRuntime:
    """Ask a runtime what it is (2 ms for crun, 20 ms for runc). Raises RuntimeFailed."""
    done = child_process.run([str(path), "--version"], env=locate.environment(), seconds=_DEADLINE)
    if done.code:
        said = (done.err.strip().splitlines() or ["nothing"])[-1]
        raise RuntimeFailed(
            f"{path} --version failed with exit code {done.code} and printed: {said}",
            hint=f"set runtime in {locate.SETTINGS_FILE} to one that runs here",
            exit_code=done.code,
            code="GPS-114",
        )
    return parse_version(path, done.out)


def parse_version(path: Path, text: str) -> RealRuntime:
    """Parse the output of --version.

    Sources: crun src/crun.c print_version ("crun version 1.21", …, "+SYSTEMD +CRIU"), runc main.go
    ("runc version 1.1.15+ds1"). A release candidate counts as its release; an invalid number counts as
    unknown.
    """
    lines = text.strip().splitlines() or [""]
    match = _VERSION_LINE.match(lines[0])
    kind: Kind = "other"
    version: tuple[int, ...] = ()
    if match:
        # One by one, because mypy narrows to a Literal only by comparison.
        kind = "crun" if match["name"] == "crun" else "runc" if match["name"] == "runc" else "other"
        numbers = re.match(r"v?(\d{1,9}(?:\.\d{1,9})*)", match["version"])
        version = tuple(map(int, numbers[1].split("."))) if numbers else ()
    features = {word[1:] for line in lines[1:] for word in line.split() if re.fullmatch(r"\+[A-Z]\S*", word)}
    return RealRuntime(Path(path), kind, version, lines[0].strip(), frozenset(features))
