"""What docs/errors.md says at its beginning, of the kernel's reasons, and of parts of messages."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["INTRODUCTION", "PARTS", "REASONS", "SAYS_ALL"]

INTRODUCTION = """
Every failure is one sentence on stderr, and in the log that Podman or containerd asked for:

    gpusnap: process 4711 (python3) uses io_uring, which CRIU cannot dump; start it without … [GPS-208]

It says what failed, with what and why; most messages then say, after a semicolon, what to do. A code in
brackets at the end refers to a section of this page, which has the cause and the cure. `gpusnap explain
GPS-208` prints the same, and `gpusnap explain` lists the codes. In JSON, the code is a separate member,
`code`: in the log, in `gpusnap doctor --json` and in `gpusnap plan --json`. Podman rewords some messages of a
runtime; the code stays.

Search this page for the code, or for some words of the message. `<…>` stands for a value. A message after `…`
appears only as part of a longer one.
[troubleshooting.md](troubleshooting.md) has the most common problems, and CRIU's messages.

- **Which errors have a code**: those that this page explains in more detail than the message. Messages
  with the same cause and cure share a code: all that report damage have GPS-601. The others are
  [at the end of this page](#messages-without-a-code): they say what to do, or end with the underlying
  error.
- **Notes** (`gpusnap: note: …`) are not errors: the command succeeded. Some also have a code.
- **Codes do not change**: a code keeps its meaning and its name in later versions, and numbers are not
  reused. The first digit is the area of the error.
- **Afterwards**: unless its section says otherwise, a failed checkpoint leaves the container running as
  before, and a failed restore leaves no container and an unharmed checkpoint. The exit codes of
  `gpusnap` are in [commands.md](commands.md#exit-codes); `gpusnap-runtime` exits with 1, or with
  the exit code of crun or runc.
"""

PARTS: Mapping[str, str] = {
    "_Misfit": "GPS-401",
    "_Unfit": "GPS-410",
    "_NotCached": "GPS-514",
    "HeaderFault": "GPS-601",
    "Broken": "GPS-803",
}
"""What is only a part of a message, by what makes it in the source, and the code of the whole message."""

SAYS_ALL = frozenset(
    {
        "the driver's mount <path> cannot be passed to CRIU: its path contains blanks or quotes",
        "<container> is not a container ID",
        "<key> is not a container ID",
        "the proxy <host> from the environment cannot be used: <name>",
        "<name> is not a valid name: use up to <longest_name> letters and digits, with single - . _ : @ / + "
        "between them",
        "<name> is not a valid name: it looks like a digest; add another letter",
        "the index of <path> would have <number> bytes, but at most <document_limit> are allowed; remove "
        "some of its checkpoints",
        "a later checkpoint of <name> was not completed: gpusnap recover <name> names it",
        "the checkpoint <word> <fault>, so no rule applies to it and it is kept; run gpusnap prune again "
        "when it can be read",
    }
)
"""Messages that have neither code nor hint nor a reason at their end, and need none."""

REASONS: Mapping[str, str] = {
    "it does not exist": "Check the path, and that its file system is mounted on this host.",
    "access is refused": (
        "Run it as root. If it already runs as root, SELinux or AppArmor denies it: see `dmesg` or the audit "
        "log."
    ),
    "it is not allowed": (
        "Run it as root, with all capabilities. The container or unit in which gpusnap runs may lack some."
    ),
    "it is a symbolic link, which is not followed": "Name the path that the link leads to.",
    "No space left on device": "Free some space: `gpusnap rm`, `gpusnap gc`, `podman rm`, old archives.",
    "Disk quota exceeded": "Raise the quota, or free some space there.",
    "File too large": "Raise the limit on the size of files (`ulimit -f`), or use another file system.",
    "Read-only file system": "Mount it writable, or name another directory.",
    "Input/output error": "The disk or the network behind that path fails: see `dmesg`.",
    "Too many open files": "Raise the limit: `ulimit -n`, `LimitNOFILE=` of a unit.",
    "Cannot allocate memory": "Free memory, or raise the memory limit of gpusnap's unit or container.",
    "Is a directory": "Name a file.",
    "Not a directory": "A part of the path is a file: name another.",
    "Device or resource busy": "Another program uses it: stop that program, then try again.",
    "No such process": "The process has exited; see its own log.",
    "Invalid argument": (
        "The kernel or the file system does not know the call. gpusnap needs Linux 5.2 or later."
    ),
    "Text file busy": "The program is being written: try again.",
    "Exec format error": "The program is not for this machine.",
}
"""The kernel's words, as the two functions `reason` give them, and what most often helps."""
