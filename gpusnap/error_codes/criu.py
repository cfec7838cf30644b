"""GPS-5…: CRIU and the runtime, while a checkpoint is made or restored."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-501",
        "dump-failed",
        "crun or runc had CRIU dump the container, and CRIU failed. Its first error follows `CRIU says:`, "
        "and then the path of the log. The container continues as before.",
        "See docs/troubleshooting.md for common CRIU errors. `criu check --all` shows what this kernel "
        "lacks.",
    ),
    ErrorCode(
        "GPS-502",
        "restore-failed",
        "crun or runc had CRIU restore the container, and CRIU failed. Its first error follows `CRIU "
        "says:`, and then the path of the log. The checkpoint is unharmed, and no container is left.",
        "See docs/troubleshooting.md for common CRIU errors. A restore needs the same files, mounts and "
        "(for open TCP connections) IP address as at the checkpoint.",
    ),
    ErrorCode(
        "GPS-503",
        "no-images",
        "The runtime reported success, but there are no images. A wrapper is installed in its place, or "
        "it did not call CRIU.",
        "Run `criu check`, and check which program `runtime` in /etc/gpusnap/gpusnap.toml names.",
    ),
    ErrorCode(
        "GPS-504",
        "failed-after-dump",
        "A note, not an error: the checkpoint is complete. The runtime failed after the dump, for example "
        "when removing the container.",
        "Check whether the container still exists (`podman ps --all`), and remove it if it is not needed.",
    ),
    ErrorCode(
        "GPS-506",
        "plugin-missing",
        "The GPU state is saved by a CRIU plugin (always for AMD GPUs, for NVIDIA's if `nvidia.driver` "
        "says so), but the plugin, or the program that it runs, is not installed on this host.",
        "Install it, or set `nvidia.libdir` or `amd.libdir` to the directory that has the plugin, and "
        "`nvidia.cuda-checkpoint` to the program, in /etc/gpusnap/gpusnap.toml. `gpusnap doctor` checks it.",
    ),
    ErrorCode(
        "GPS-508",
        "container-exists",
        "A container with that name or ID already exists. Usually it is the one that the checkpoint "
        "stopped, which Podman keeps until it is removed. If Podman was killed during a restore, Podman "
        "may not know the container.",
        "If a killed checkpoint stopped it, continue it with `podman container restore NAME`. Remove it "
        "(`podman rm NAME`) only if `gpusnap ls` shows its checkpoint with a name. Or give the restored one "
        "another name (`--name`). If no engine knows it: `gpusnap recover ID` kills it.",
    ),
    ErrorCode(
        "GPS-509",
        "ended-at-once",
        "The container, or a GPU process in it, was restored and exited immediately. Its program cannot "
        "handle a change: a closed connection, a missing file, a clock that advanced.",
        "The program's own log says why (`podman logs NAME`). The checkpoint is unharmed.",
    ),
    ErrorCode(
        "GPS-511",
        "process-ended-by-itself",
        "A note, not an error: the container is running. One of its processes exited during the restore. "
        "It was killed, or its standard output was a pipe that nothing reads any more, as left by `podman "
        "exec`.",
        "None, if the process is not needed. Its own log may say more. Start what must survive from the "
        "container's own command.",
    ),
    ErrorCode(
        "GPS-512",
        "memory-not-written",
        "The disk failed, or its file system did not respond in time, while GPU memory was being written "
        "or read. If a checkpoint failed, the container continues, and nothing remains of the checkpoint; "
        "if a restore failed, the checkpoint is unchanged; if a resume or a spill failed, the container "
        "stays suspended, and its memory where it was.",
        "The end of the message is the underlying error; see docs/errors.md#reasons. For a full disk: "
        "`gpusnap rm`, `gpusnap gc`.",
    ),
    ErrorCode(
        "GPS-513",
        "region-not-copied",
        "gpusnap writes GPU memory while the driver copies it to RAM. The driver omitted a part of it, or "
        "the RAM cannot be freed afterwards.",
        'Set `memory.pages` to "criu": then CRIU writes the memory, which takes longer. Please report it '
        "with the version of the driver.",
    ),
    ErrorCode(
        "GPS-514",
        "not-kept",
        "A note, not an error: the checkpoint is complete. The chunks of its GPU memory could not be kept "
        "for the next checkpoint of the container, which will write all of them again. The directory for "
        "the chunks must be on the same file system as the images, belong to root, and have free space.",
        "Set `memory.keep-folder` to a directory next to the images, or `memory.keep` to false. See "
        "docs/settings.md#the-next-checkpoint-of-a-container.",
    ),
    ErrorCode(
        "GPS-515",
        "no-manifest-yet",
        "CRIU finished the dump, but gpusnap could not complete the checkpoint: images could not be read "
        "again or flushed to disk, or the manifest could not be renamed. Without a manifest, it is not a "
        "checkpoint.",
        "Correct the cause at the end of the message. If the container has stopped, `gpusnap recover` "
        "completes the checkpoint; if it continues, checkpoint it again. See `dmesg` if the disk fails.",
    ),
    ErrorCode(
        "GPS-516",
        "address-missing",
        "The checkpoint has open TCP connections, but the network of the new container does not have the "
        "local address of one of them, so CRIU cannot bind it. For an IPv6 address it is a note: the "
        "kernel may still be checking whether another host uses the address.",
        "Give the network that address (`--network` with the old name and `--ip`, or the same host), or "
        "restore with `--tcp-close`, which closes the connections.",
    ),
    ErrorCode(
        "GPS-517",
        "pycriu-missing",
        "gpusnap reads CRIU's images with CRIU's own Python package, pycriu. It is not installed on this "
        "host, or it is incompatible with this host's protobuf.",
        "Install your distribution's package (`python3-pycriu` on Debian and Ubuntu, `python3-criu` on "
        "Fedora), or CRIU from source. `gpusnap doctor` checks it. pycriu is not on PyPI.",
    ),
    ErrorCode(
        "GPS-518",
        "volume",
        "A volume of the container cannot be restored as it was. Podman lacks one whose files are not in "
        "the checkpoint, because it was made with `--ignore-volumes`; or gpusnap was killed while it "
        "filled one from a checkpoint. Nothing was changed.",
        "Create the missing volume, or give `--ignore-volumes` to start with an empty one. Remove one that "
        "lacks files (`podman volume rm`): the next restore makes it again.",
    ),
    ErrorCode(
        "GPS-519",
        "port-in-use",
        "The container publishes a port of the host, or listens on one in a shared network, and another "
        "program already listens there. Often it is the first copy of the same container.",
        "Give the restored container other ports (`--publish HOST-PORT:CONTAINER-PORT`), or stop the "
        "program that listens there; `ss --listening --processes` shows it. `--publish` has no effect for "
        "a container in the host's network (`podman run --network host`): a second copy needs its own "
        "network.",
    ),
    ErrorCode(
        "GPS-520",
        "address-in-use",
        "The container had its own IP address, and another container uses that address now.",
        "Restore with `--ignore-static-ip` to give the container another address. Open TCP connections "
        "need the old address: to keep them, stop the other container.",
    ),
    ErrorCode(
        "GPS-521",
        "volume-as-it-is",
        "Podman still has a named volume of the container, so the restored container uses it as it is: "
        "gpusnap does not overwrite its files. The processes are not aware of changes since the "
        "checkpoint.",
        "None, if its files are only read, or if nothing has written to them since. To restore the files "
        "of the checkpoint instead: stop the containers that use the volume, remove it (`podman volume "
        "rm`), and restore again.",
    ),
    ErrorCode(
        "GPS-522",
        "pod",
        "Podman restores a container that was in a pod only into a pod, and one that was not in a pod "
        "only outside pods. Without `--pod`, gpusnap uses the pod that the container was in, if Podman "
        "still has it.",
        "Create a pod that shares the same namespaces as the first one (`podman pod create --share …`), "
        "and restore with `--pod POD`.",
    ),
    ErrorCode(
        "GPS-523",
        "memory-not-copied",
        "While CRIU waited, gpusnap could not write the memory of the restored processes: the container's "
        "memory limit or the host has no room for it, a process was ended meanwhile, or the images "
        "contradict one another. The incomplete container was removed; no process has run. The checkpoint "
        "is unharmed.",
        "Raise the container's memory limit, or free memory, and restore again. With "
        "`memory.parallel-restore = false`, CRIU restores all memory itself.",
    ),
    ErrorCode(
        "GPS-524",
        "stopped-by-a-signal",
        "A signal (SIGSTOP) had stopped CRIU, the runtime, or the program that CRIU runs for gpusnap. In a "
        "checkpoint, gpusnap lets it go on after 10 seconds, and says so as a note. In a restore, gpusnap "
        "ends it: the incomplete container was removed, and the checkpoint is unharmed.",
        "Find out what sends SIGSTOP to these processes, such as a script that stops processes by their "
        "names. After a failed restore, try again.",
    ),
    ErrorCode(
        "GPS-525",
        "open-files-not-on-disk",
        "A note, not an error: the checkpoint is complete. A file that a process of the container has open, "
        "or its name, may still be in the page cache only, because its disk fails, or its file system did "
        "not take it in time. If the host crashes before the kernel has written it, the file is gone or "
        "shorter, and CRIU does not restore the checkpoint.",
        "Run `sync -f FILE` on this host; if that fails, see `dmesg`. Then checkpoint the container again.",
    ),
    ErrorCode(
        "GPS-526",
        "cgroup-in-use",
        "Another container runs in the cgroup that the restored one would get, or is being restored into "
        "it. `ctr container restore` gives a container the cgroup of the checkpointed one, also under "
        "another name. Two containers in one cgroup are paused together, and some commands that end one of "
        "them end both: `ctr task rm --force`, and with crun each removal, also that of a restore that "
        "failed. Nothing was changed.",
        "Remove the container that runs there, then restore. Of two restores at the same time, start one "
        "when the other has ended.",
    ),
    ErrorCode(
        "GPS-527",
        "shared-memory-in-use",
        "The container shares /dev/shm with the host (`--ipc=host`), with its pod or with another container, "
        "and a process of it had a file there open. Now there is another file of this name, which a running "
        "process uses. gpusnap does not replace it: that process would go on with a file that the restored "
        "container does not see. Nothing was restored.",
        "`fuser -v FILE` shows who uses it. End that program, or restore the container on another host, or "
        "in another pod. If both exchange data by the file, they cannot be restored one by one. See "
        "docs/podman.md#shared-memory.",
    ),
    ErrorCode(
        "GPS-528",
        "file-changed",
        "A process of the container had a file open for writing, and the file has another size than at the "
        "checkpoint, so CRIU does not restore the process. The file is in a volume or in a directory of the "
        "host, which a checkpoint does not contain: the container, or somebody else, has written to it "
        "since. Nothing was changed. Files that are open for appending only, as most logs are, may grow.",
        "If the file has grown, the message has the command that cuts it to its size at the checkpoint. What "
        "was written since is lost with that, so copy the file first if you need it; the restored program "
        "writes on from there. The setting `criu.cut-files`, or the container's annotation "
        "`io.gpusnap.criu.cut-files=true`, has gpusnap do it. If the file is shorter, put it back as it was. "
        "To have no such file, let the program open its logs for appending, or close its files in time.",
    ),
    ErrorCode(
        "GPS-529",
        "file-cut",
        "A note, not an error: the container is restored. With `--leave-running`, the engine reads the "
        "container's changed files after it has continued. A file that a process had open for writing was "
        "longer by then than the process knows, and too large to be copied while the container was stopped; "
        "it was cut to its size at the dump. With `criu.cut-files`, so are files in volumes and directories "
        "of the host. Podman does not pass this note on.",
        "Nothing, for a file that is only written to at its end. A program that also changes a file before "
        "its end, such as a database, may find newer data there: checkpoint it without `--leave-running`, "
        "or keep the file in a volume and restore that together with the memory. See "
        "docs/podman.md#volumes.",
    ),
    ErrorCode(
        "GPS-530",
        "file-may-be-newer",
        "A note, not an error: the checkpoint is made. With `--leave-running`, the engine reads the "
        "container's changed files after it has continued. While the container is stopped, gpusnap copies "
        "those that a process has open for writing, the smallest first, up to `criu.ghost-limit` in all. "
        "The file in the note did not fit, so the checkpoint may have it as it was some moments later.",
        "Nothing, for a file that is only written to at its end, such as a log or a download. For a "
        "database, raise `criu.ghost-limit` above the size of the file: the container is stopped for about "
        "1 s per GiB longer. Or checkpoint it without `--leave-running`.",
    ),
    ErrorCode(
        "GPS-531",
        "pod-not-running",
        "The container is in a pod of Podman's and shares namespaces with it, which end when the pod is "
        "stopped. The pod's infra container has them, and does not run. Nothing was restored, and the "
        "checkpoint is unharmed.",
        "Start the infra container alone, as the message says, then restore again; the container then joins "
        "the pod's new namespaces. `podman pod start` also starts the pod's other containers, and this one "
        "from the beginning. From a store or an archive, a restore starts the infra container itself.",
    ),
)
