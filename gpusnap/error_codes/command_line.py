"""GPS-1…: command lines, settings, and the runtime behind gpusnap-runtime."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-101",
        "runtime-lacks-option",
        "The engine, or who typed the command, asked for an option that the real runtime (crun or runc) "
        "does not have, or that gpusnap does not know. gpusnap does not leave out an option by itself.",
        "Leave it out, or set `runtime` in /etc/gpusnap/gpusnap.toml to the runtime that has it. Many "
        "options can be given to CRIU itself, by `criu.options` in the settings: the message has the line "
        "to add. If crun or runc has the option, report it.",
    ),
    ErrorCode(
        "GPS-102",
        "not-a-checkpoint-name",
        "A word of the command line does not name a checkpoint or a store in the form that the command "
        "takes.",
        "Write a checkpoint as NAME or DIGEST (in this host's store), `oci:DIR:NAME` (in the store in DIR), "
        "`./FILE.tar.zst` (a file needs a / or a . at its beginning), or `HOST/REPOSITORY:TAG` (in a "
        "registry). A store is `oci:DIR`, an image in containerd `containerd:NAMESPACE/IMAGE`, which only "
        "`gpusnap push` and `gpusnap pull --to` take. `gpusnap ls` lists the names.",
    ),
    ErrorCode(
        "GPS-103",
        "file-in-the-way",
        "The file that the checkpoint is to be written to cannot be made: something else has that name, or "
        "its directory is missing or read-only. gpusnap does not replace files.",
        "Name another file, or remove what is there, or make the directory. If somebody made the file while "
        "gpusnap worked, the message says where the checkpoint is kept.",
    ),
    ErrorCode(
        "GPS-111",
        "setting-invalid",
        "The settings file, /etc/gpusnap/gpusnap.toml, or an annotation of the container (`io.gpusnap.…`) "
        "has a key that gpusnap does not know, or a value that the key does not take. Containers run; none "
        "is checkpointed or restored with settings that nobody meant.",
        "Correct the key that the message names. A key below a `[table]` belongs to that table: keys "
        "without one stand above the first. docs/settings.md says what each key takes, and `gpusnap "
        "settings` checks the file.",
    ),
    ErrorCode(
        "GPS-114",
        "no-runtime",
        "gpusnap-runtime stands in front of crun or runc, and none of them can be started: it is not "
        "installed, `runtime` in /etc/gpusnap/gpusnap.toml names something else, or the program does not "
        "run on this host.",
        "Install crun or runc, or set `runtime` to the name or the absolute path of one. `gpusnap settings` "
        "runs it with `--version`.",
    ),
)
