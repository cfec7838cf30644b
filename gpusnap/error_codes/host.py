"""GPS-0…: gpusnap itself, this host, and what a killed gpusnap left."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-001",
        "internal-error",
        "gpusnap met something that it does not foresee. The message ends with the file and the line of "
        'gpusnap\'s code, and "this should have been said better: tell us".',
        "Report it with the whole message and the file that `gpusnap report` writes. If the message ends "
        "with an error of the kernel, such as a full disk, that may be all that is wrong.",
    ),
    ErrorCode(
        "GPS-002",
        "part-missing",
        "A file of gpusnap, its Python or a Python package that it needs is missing or cannot be read, for "
        "example after an upgrade of Python, or an upgrade that was not completed. Containers still start "
        "and stop; none is checkpointed or restored, because gpusnap cannot tell whether it uses a GPU.",
        "Install gpusnap again, with pipx or your distribution's package. `gpusnap doctor` checks that all "
        "parts are there and that the engines find them.",
    ),
    ErrorCode(
        "GPS-003",
        "no-thread",
        "The kernel did not let gpusnap start a thread or a process: a limit is reached. It is that of the "
        "user, of the session, of the systemd unit or of the cgroup that gpusnap runs in.",
        "Raise the limit: `ulimit -u`, `pids.max` of the cgroup, `TasksMax=` of the unit. `dmesg` names the "
        "cgroup whose limit was reached.",
    ),
    ErrorCode(
        "GPS-004",
        "proc-unreadable",
        "The kernel has no memory, or no file descriptor, for gpusnap to read a file or a directory of "
        "/proc. gpusnap does not take that for a process that is gone.",
        "Free memory, or raise the limit on open files (`ulimit -n`, `LimitNOFILE=` of a unit), and try "
        "again.",
    ),
    ErrorCode(
        "GPS-005",
        "not-root",
        "The files of the system, of the engines and below /run/gpusnap belong to root, and gpusnap was not "
        "run as root. Or the file system is read-only, or SELinux or AppArmor refuses it.",
        "Run it as root, with `sudo`. `gpusnap install --dry-run` shows what would be changed, without root.",
    ),
    ErrorCode(
        "GPS-007",
        "disk-full",
        "A file system does not have the room that a checkpoint needs, or a quota or the limit on the size "
        "of files (`ulimit -f`) does not allow it. gpusnap asks for the room before it begins; /run is in "
        "RAM, and is small.",
        "Make room there: `gpusnap prune --gc` and `gpusnap rm --gc` in a store, `podman rm` for containers "
        "that a checkpoint ended, old archives. Podman keeps the images below /var/lib/containers before it "
        "packs them; `gpusnap checkpoint` into a store does not pack.",
    ),
    ErrorCode(
        "GPS-020",
        "at-work",
        "Another gpusnap, or a runtime and CRIU that a killed gpusnap started, is at work on the same "
        "container. Two of them would damage each other's work.",
        "Wait until it is done. If the message names processes of a killed gpusnap, wait for them or kill "
        "them, and then run `gpusnap recover`.",
    ),
    ErrorCode(
        "GPS-021",
        "checkpoint-cut-off",
        "gpusnap was killed during a checkpoint. Processes of the container are stopped, and their GPU "
        "memory is in RAM or in files. Nothing is lost. As a note, it says that gpusnap has resumed them "
        "already.",
        "Run `gpusnap recover`, which resumes the processes. `gpusnap recover --list` shows what it would "
        "do.",
    ),
    ErrorCode(
        "GPS-022",
        "restore-cut-off",
        "gpusnap was killed during a restore, and an incomplete container is left. The checkpoint is "
        "unharmed. As a note, it says that gpusnap has removed that container already.",
        "Run `gpusnap recover`, which removes the incomplete container, and restore it again. If the "
        "message says why the container cannot be removed, correct that first.",
    ),
    ErrorCode(
        "GPS-023",
        "journal-unreadable",
        "The notes of a killed gpusnap below /run/gpusnap cannot be understood. They were written by "
        "another version of gpusnap, or were changed.",
        "Run `gpusnap recover` of the version that wrote them. If it is gone, end the container and restore "
        "it from a checkpoint, then remove the file that the message names.",
    ),
    ErrorCode(
        "GPS-025",
        "process-does-not-end",
        "A process was killed, and does not end. It waits in the kernel, most often for a disk, a network "
        "file system or the GPU's driver.",
        "`/proc/PID/stack` says what it waits for, and `dmesg` may say why that does not answer. When it "
        "has ended, run `gpusnap recover`. Otherwise only a restart of the host helps.",
    ),
    ErrorCode(
        "GPS-026",
        "gpu-memory-lost",
        "The GPU memory of a stopped process cannot be put back: its file below /run/gpusnap was removed, "
        "the process was changed meanwhile, or the driver has given its state up.",
        "Kill the process, and restore its container from a checkpoint.",
    ),
    ErrorCode(
        "GPS-027",
        "memory-not-given-back",
        "gpusnap could not return the GPU memory that it holds for a process, or could not remove what it "
        "staged below /run/gpusnap. Until then it takes RAM, and the container may be paused.",
        "Free some memory, and run `gpusnap recover`. If only staged files are left, remove them from "
        "/run/gpusnap/stage.",
    ),
    ErrorCode(
        "GPS-030",
        "container-replaced",
        "`gpusnap recover` was to end a container that Podman does not know, and the runtime has another "
        "one under the same ID now. It was left alone.",
        "`crun list` or `runc list` shows it. End it with the runtime if it is not wanted.",
    ),
)
