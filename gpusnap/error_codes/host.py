"""GPS-0…: gpusnap itself, this host, and what a killed gpusnap left."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-001",
        "internal-error",
        "gpusnap met an unexpected condition. The message ends with the file and the line of gpusnap's code.",
        "Report it with the complete message and the file that `gpusnap report` writes. If the message "
        "ends with an error of the kernel, such as a full disk, that may be the only cause.",
    ),
    ErrorCode(
        "GPS-002",
        "part-missing",
        "A file of gpusnap, its Python or a Python package that it needs is missing or cannot be read, "
        "for example after an upgrade of Python, or an upgrade that was not completed. Containers still "
        "start and stop, but none is checkpointed or restored, because gpusnap cannot determine whether "
        "it uses a GPU.",
        "Install gpusnap again, with pipx or your distribution's package. `gpusnap doctor` checks that all "
        "parts are there and that the engines find them.",
    ),
    ErrorCode(
        "GPS-003",
        "no-thread",
        "The kernel did not let gpusnap start a thread or a process, because a limit was reached: that of "
        "the user, the session, the systemd unit or the cgroup in which gpusnap runs.",
        "Raise the limit: `ulimit -u`, `pids.max` of the cgroup, `TasksMax=` of the unit. `dmesg` names the "
        "cgroup whose limit was reached.",
    ),
    ErrorCode(
        "GPS-004",
        "proc-unreadable",
        "The kernel has no memory or no file descriptors left for gpusnap to read a file or a directory "
        "in /proc. gpusnap does not treat that as a process that has exited.",
        "Free memory, or raise the limit on open files (`ulimit -n`, `LimitNOFILE=` of a unit) and try "
        "again.",
    ),
    ErrorCode(
        "GPS-005",
        "not-root",
        "The files of the system, of the engines and below /run/gpusnap belong to root, but gpusnap was "
        "not run as root. Or the file system is read-only, or SELinux or AppArmor denies access.",
        "Run it as root, with `sudo`. `gpusnap install --dry-run` shows what would be changed, without root.",
    ),
    ErrorCode(
        "GPS-007",
        "disk-full",
        "A file system does not have the space that a checkpoint needs, or a quota or the file size limit "
        "(`ulimit -f`) does not allow it. gpusnap checks the space before it begins; /run is in RAM, and "
        "is small.",
        "Free some space: `gpusnap prune --gc` and `gpusnap rm --gc` in a store, `podman rm` for "
        "containers that a checkpoint stopped, old archives. Podman keeps the images below "
        "/var/lib/containers before it packs them; `gpusnap checkpoint` into a store does not pack.",
    ),
    ErrorCode(
        "GPS-020",
        "at-work",
        "Another gpusnap, or a Podman, runtime or CRIU that a killed gpusnap started, is working on the same "
        "container. Two at once would damage each other's work.",
        "Wait until it has finished. If the message names processes of a killed gpusnap, wait for them or "
        "kill them, then run `gpusnap recover`.",
    ),
    ErrorCode(
        "GPS-021",
        "checkpoint-cut-off",
        "gpusnap was killed during a checkpoint. Processes of the container are stopped, and their GPU "
        "memory is in RAM or in files. Nothing is lost. As a note, it means that gpusnap has already "
        "resumed them.",
        "Run `gpusnap recover`, which resumes the processes. `gpusnap recover --list` shows what it would "
        "do.",
    ),
    ErrorCode(
        "GPS-022",
        "restore-cut-off",
        "gpusnap was killed during a restore, and an incomplete container is left. The checkpoint is "
        "unharmed. As a note, it means that gpusnap has already removed that container.",
        "Run `gpusnap recover`, which removes the incomplete container, then restore it again. If the "
        "message says why the container cannot be removed, correct that first.",
    ),
    ErrorCode(
        "GPS-023",
        "journal-unreadable",
        "The records of a killed gpusnap below /run/gpusnap cannot be parsed. They were written by "
        "another version of gpusnap, or were modified. They are kept, and `gpusnap recover` repairs other "
        "containers in spite of them.",
        "Run `gpusnap recover` with the version that wrote them. If that is not available, stop the "
        "container and restore it from a checkpoint, then remove the file that the message names.",
    ),
    ErrorCode(
        "GPS-025",
        "process-does-not-end",
        "A process was killed but does not exit. It is blocked in the kernel, usually on a disk, a "
        "network file system or the GPU's driver.",
        "`/proc/PID/stack` shows what it waits for, and `dmesg` may show why. When it has exited, run "
        "`gpusnap recover`. Otherwise only a restart of the host helps.",
    ),
    ErrorCode(
        "GPS-026",
        "gpu-memory-lost",
        "The GPU memory of a stopped process cannot be restored: its file below /run/gpusnap was removed, "
        "the process was modified in the meantime, or the driver has discarded its state.",
        "Kill the process, and restore its container from a checkpoint.",
    ),
    ErrorCode(
        "GPS-027",
        "memory-not-given-back",
        "gpusnap could not return the GPU memory that it holds for a process, or could not remove its "
        "temporary copy below /run/gpusnap. Until then it uses RAM, and the container may be paused.",
        "Free some memory, then run `gpusnap recover`. If only temporary files are left, remove them from "
        "/run/gpusnap/stage.",
    ),
    ErrorCode(
        "GPS-030",
        "container-replaced",
        "`gpusnap recover` was asked to kill a container that Podman does not know, but the runtime now "
        "has another one with the same ID. It was not touched.",
        "`crun list` or `runc list` shows it. Stop it with the runtime if it is not needed.",
    ),
    ErrorCode(
        "GPS-031",
        "images-not-mounted",
        "gpusnap was killed during a checkpoint, and the directory with CRIU's images is now empty or does "
        "not exist. Its file system may not be mounted, or another one in its place, and then the "
        "checkpoint may be complete. So `gpusnap recover` keeps the GPU memory in the store.",
        "Mount the file system, then run `gpusnap recover` again. If the images were removed, and the "
        "checkpoint is not needed: create the directory, put any file into it (`mkdir -p DIR && touch "
        "DIR/removed`), and run it again. `gpusnap recover` then removes the GPU memory of the checkpoint.",
    ),
)
