"""The options of `checkpoint` and `restore`: which runtime supports which, and what to do if one does not.

There is one table for each command and one for the options before it. command_line.py reads and writes
command lines with these. Sources: crun 1.21 (src/crun.c, checkpoint.c, restore.c) and --help of 1.21 and
1.28; runc 1.1.15 and 1.3.6 (main.go, checkpoint.go, restore.go) and --help of 1.1.5; NEWS and CHANGELOG for
the first version with an option.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from gpusnap.oci.base.dataclass import dataclass, field

Version = tuple[int, ...]


class Takes(enum.Enum):
    """The value of an option."""

    NOTHING = "nothing"
    TEXT = "text"
    NUMBER = "number"
    LIST = "list"
    """Text; the option may be given several times."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one runtime handles an option."""

    since: Version | None
    """The first version that supports it; () if all do, None if none does."""
    drop: bool = False
    """If it is not supported: omit it, because the result is the same without; otherwise refuse."""
    values: Mapping[str, Version] = field(default_factory=dict)
    """Values that were added later than the option, each with its first version."""

    def takes(self, version: Version, value: str = "") -> bool:
        """Whether that version supports the option, with that value; a version that is not known counts as
        new."""
        since = self.values.get(value, self.since)
        return since is not None and self.since is not None and (not version or version >= since)


@dataclass(frozen=True, slots=True)
class Option:
    """One option. Its field in the dataclasses of command_line.py has the same name, with underscores."""

    name: str
    takes: Takes
    crun: Rule
    runc: Rule
    short: str = ""
    choices: tuple[str, ...] = ()
    idle: int | None = None
    """The value that requests nothing."""
    criu: str = ""
    """The option of CRIU that does the same, for the hint if the runtime has none (see criu(8))."""

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    def rule(self, kind: str) -> Rule:
        """Return how a runtime of that kind handles it; an unknown kind gets everything."""
        return {"crun": self.crun, "runc": self.runc}.get(kind, _ALL)


_ALL = Rule(())
_NONE = Rule(None)
_DROP = Rule(None, drop=True)
_FLAG, _TEXT, _NUMBER, _LIST = Takes.NOTHING, Takes.TEXT, Takes.NUMBER, Takes.LIST

_CGROUP_MODES = ("soft", "full", "strict", "ignore")
_NETWORK_LOCKS = ("iptables", "nftables", "skip")

GLOBAL = (
    Option("root", _TEXT, _ALL, _ALL),
    Option("log", _TEXT, _ALL, _ALL),
    Option("log-format", _TEXT, _ALL, _ALL),
    # How much is logged does not change the container.
    Option("log-level", _TEXT, Rule((1, 17), drop=True), _DROP),
    Option("debug", _FLAG, _ALL, _ALL),
    Option("systemd-cgroup", _FLAG, _ALL, _ALL),
    Option("cgroup-manager", _TEXT, _ALL, _NONE, choices=("cgroupfs", "systemd", "disabled")),
    # crun has it for compatibility with runc and without effect, but crun 1.21 used its value for --root by
    # mistake.
    Option("rootless", _TEXT, _DROP, _ALL),
    # runc 1.2 and later ignore it, with a warning, and search CRIU on PATH.
    Option("criu", _TEXT, _NONE, _ALL),
)

# In both commands.
_COMMON = (
    Option("image-path", _TEXT, _ALL, _ALL),
    Option("work-path", _TEXT, _ALL, _ALL),
    Option("tcp-established", _FLAG, _ALL, _ALL),
    Option("ext-unix-sk", _FLAG, _ALL, _ALL),
    Option("shell-job", _FLAG, _ALL, _ALL),
    Option("file-locks", _FLAG, _ALL, _ALL),
    Option(
        "manage-cgroups-mode",
        _TEXT,
        Rule((1, 4, 5)),
        Rule((), values={"ignore": (1, 2)}),
        choices=_CGROUP_MODES,
    ),
    # crun declares it without a value and takes the next word: "--network-lock=skip" is refused there.
    Option("network-lock", _TEXT, Rule((1, 19)), _NONE, choices=_NETWORK_LOCKS, criu="network-lock"),
    Option("lazy-pages", _FLAG, _NONE, _ALL),
    # It frees disk space and does not change what is restored.
    Option("auto-dedup", _FLAG, _DROP, _ALL),
    Option("empty-ns", _LIST, _NONE, _ALL),
)

CHECKPOINT = (
    *_COMMON,
    Option("parent-path", _TEXT, Rule((1, 4, 2)), _ALL),
    Option("pre-dump", _FLAG, Rule((1, 4, 2)), _ALL),
    Option("leave-running", _FLAG, _ALL, _ALL),
    # These two are in CRIU's configuration file as well, see runtime/criu/config.py.
    Option("tcp-skip-in-flight", _FLAG, _DROP, Rule((1, 3), drop=True)),
    Option("link-remap", _FLAG, _DROP, Rule((1, 3), drop=True)),
    Option("status-fd", _NUMBER, _NONE, _ALL, idle=-1),
    Option("page-server", _TEXT, _NONE, _ALL),
)

RESTORE = (
    Option("bundle", _TEXT, _ALL, _ALL, short="b"),
    Option("detach", _FLAG, _ALL, _ALL, short="d"),
    Option("pid-file", _TEXT, _ALL, _ALL),
    Option("console-socket", _TEXT, _ALL, _ALL),
    *_COMMON,
    # gpusnap's own: the GPUs to restore onto.
    Option("gpu-map", _TEXT, _DROP, _DROP),
    # go-runc's type has it; CRIU finds the parent by the link in the image.
    Option("parent-path", _TEXT, _DROP, _DROP),
    # Not in 1.21, in 1.28; merged on 2025-07-24 (crun#1835), which makes it 1.23 by date. A crun that has it
    # overrides CRIU's configuration file; for the others it is in that.
    Option("tcp-close", _FLAG, Rule((1, 23), drop=True), _DROP),
    Option("lsm-profile", _TEXT, Rule((1, 18)), Rule((1, 1)), criu="lsm-profile"),
    Option("lsm-mount-context", _TEXT, Rule((1, 18)), Rule((1, 1)), criu="lsm-mount-context"),
    # containerd always sends it; crun never makes itself a subreaper.
    Option("no-subreaper", _FLAG, _DROP, _ALL),
    # Mounts and keyrings are restored as they were, so there is no root to pivot to and no keyring to make.
    Option("no-pivot", _FLAG, _DROP, _ALL),
    Option("no-new-keyring", _FLAG, _DROP, _DROP),
    # Podman's default is 0, none at all; others cannot be given to a process that CRIU makes.
    Option("preserve-fds", _NUMBER, _NONE, _NONE, idle=0),
)


def table(options: tuple[Option, ...]) -> dict[str, Option]:
    """Return the options by long and by short name."""
    return {name: option for option in options for name in (option.name, option.short) if name}
