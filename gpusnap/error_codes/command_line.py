"""GPS-1…: command lines, settings, and the runtime behind gpusnap-runtime."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-101",
        "runtime-lacks-option",
        "The engine or the user gave an option that the real runtime (crun or runc) does not have, or "
        "that gpusnap does not know. gpusnap never ignores an option.",
        "Omit it, or set `runtime` in /etc/gpusnap/gpusnap.toml to the runtime that has it. Many options "
        "can be passed to CRIU itself, with `criu.options` in the settings: the message shows the line to "
        "add. If crun or runc has the option, report it.",
    ),
    ErrorCode(
        "GPS-102",
        "not-a-checkpoint-name",
        "An argument does not name a checkpoint or a store in the form that the command accepts.",
        "Write a checkpoint as NAME or DIGEST (in this host's store), `oci:DIR:NAME` (in the store in DIR), "
        "`./FILE.tar.zst` (a file needs a / or a . at its beginning), or `HOST/REPOSITORY:TAG` (in a "
        "registry). A store is `oci:DIR`, an image in containerd `containerd:NAMESPACE/IMAGE`, which only "
        "`gpusnap push` and `gpusnap pull --to` take. `gpusnap ls` lists the names.",
    ),
    ErrorCode(
        "GPS-103",
        "file-in-the-way",
        "The output file of the checkpoint cannot be created: something else has that name, or its "
        "directory is missing or read-only. gpusnap does not overwrite files.",
        "Name another file, remove the existing one, or create the directory. If another process created "
        "the file while gpusnap was working, the message says where the checkpoint is kept.",
    ),
    ErrorCode(
        "GPS-111",
        "setting-invalid",
        "The settings file, /etc/gpusnap/gpusnap.toml, or an annotation of the container (`io.gpusnap.…`) "
        "has a key that gpusnap does not know, or an invalid value. Containers still run, but none is "
        "checkpointed or restored with invalid settings.",
        "Correct the key that the message names. A key below a `[table]` belongs to that table: keys "
        "without a table must come first. docs/settings.md describes each key, and `gpusnap settings` "
        "checks the file.",
    ),
    ErrorCode(
        "GPS-114",
        "no-runtime",
        "gpusnap-runtime calls crun or runc, and cannot start either: it is not installed, `runtime` in "
        "/etc/gpusnap/gpusnap.toml names something else, or the program does not run on this host.",
        "Install crun or runc, or set `runtime` to the name or the absolute path of one. `gpusnap settings` "
        "runs it with `--version`.",
    ),
)
