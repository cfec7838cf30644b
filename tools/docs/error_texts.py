"""What docs/errors.md says at its beginning, of the kernel's reasons, and of parts of messages."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["INTRODUCTION", "PARTS", "REASONS", "SAYS_ALL"]

INTRODUCTION = """
Every failure is one sentence on stderr, and in the log that Podman or containerd asked for:

    gpusnap: process 4711 (python3) uses io_uring, which CRIU cannot dump; start it without … [GPS-208]

It says what happened to what, and most say after a semicolon what to do. A code in brackets at the end leads
to a section of this page, which has the cause and the cure. `gpusnap explain GPS-208` prints the same, and
`gpusnap explain` lists the codes. In JSON, the code is a member of its own, `code`: in the log, in `gpusnap
doctor --json` and in `gpusnap plan --json`. Podman rewords some of what a runtime says; the code stays.

Search this page for the code, or for some words of the message. `<…>` stands for a value. A message after `…`
appears only within a longer one.
[troubleshooting.md](troubleshooting.md) has what people meet most, and what CRIU says.

- **Which errors have a code**: those of which this page says more than the message does. Messages
  with the same cause and cure share a code, whatever they say: all that find damage have GPS-601. The others
  stand [at the end of this page](#messages-without-a-code): they say what to do, or end with the underlying
  error.
- **Notes** (`gpusnap: note: …`) are no errors: what was asked for is done. Some have a code, too.
- **Codes do not change**: a code keeps its meaning and its name in later versions, and no number is used
  again. The first digit says what the error is about.
- **Afterwards**: unless its section says otherwise, a checkpoint that failed has left the container running
  as it was, and a restore that failed has left no container and an unharmed checkpoint. The exit codes of
  `gpusnap` are in [commands.md](commands.md#exit-codes); `gpusnap-runtime` ends with 1, or with what crun or
  runc ended with.
"""

PARTS: Mapping[str, str] = {
    "_Misfit": "GPS-401",
    "_Unfit": "GPS-410",
    "_Unkept": "GPS-514",
    "HeaderFault": "GPS-601",
    "Broken": "GPS-803",
}
"""What is only a part of a message, by what makes it in the source, and the code of the whole message."""

SAYS_ALL = frozenset(
    {
        "the driver's mount <path> cannot be named to CRIU: its path holds blanks or quotes",
        "<container> is no container's ID",
        "<key> is no container's ID",
        "the proxy <host> of the environment cannot be used: <name>",
        "<name> cannot be a name: letters and digits, with single - . _ : @ / + between them, make one, up "
        "to <longest_name> in all",
        "<name> cannot be a name: it looks like a digest; put another letter in it",
        "the index of <path> would have <number> bytes, and <document_limit> are allowed; remove some of "
        "what it names",
    }
)
"""Messages that have neither code nor hint nor a reason at their end, and need none."""

REASONS: Mapping[str, str] = {
    "it does not exist": "See that the path is right, and on a host that has it mounted.",
    "access is refused": (
        "Run it as root. If it did run as root, SELinux or AppArmor refuses it: see `dmesg` or the audit log."
    ),
    "it is not allowed": (
        "Run it as root, with all capabilities. A container or a unit around gpusnap may lack some."
    ),
    "it is a link, which is not followed": "Name the path that the link leads to.",
    "No space left on device": "Make room there: `gpusnap rm`, `gpusnap gc`, `podman rm`, old archives.",
    "Disk quota exceeded": "Raise the quota, or make room there.",
    "File too large": "Raise the limit on the size of files (`ulimit -f`), or use another file system.",
    "Read-only file system": "Mount it writable, or name another directory.",
    "Input/output error": "The disk or the network behind that path fails: see `dmesg`.",
    "Too many open files": "Raise the limit: `ulimit -n`, `LimitNOFILE=` of a unit.",
    "Cannot allocate memory": "Free memory, or raise the memory limit of what gpusnap runs in.",
    "Is a directory": "Name a file.",
    "Not a directory": "A part of the path is a file: name another.",
    "Device or resource busy": "Something else uses it: end that, and try again.",
    "No such process": "The process has ended; see its own log.",
    "Invalid argument": (
        "The kernel or the file system does not know the call. gpusnap needs Linux 5.2 or later."
    ),
    "Text file busy": "The program is being written: try again.",
    "Exec format error": "The program is not for this machine.",
}
"""The kernel's words, as the two functions `reason` give them, and what most often helps."""
