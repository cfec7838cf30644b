"""GPS-5…: CRIU and the runtime, while a checkpoint is made or restored."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-501",
        "dump-failed",
        "crun or runc had CRIU dump the container, and CRIU failed. Its first error stands after `CRIU "
        "says:`, and then the log that has the rest. The container continues as before.",
        "See docs/troubleshooting.md, which has the errors of CRIU that people meet most. `criu check "
        "--all` tells what this kernel lacks.",
    ),
    ErrorCode(
        "GPS-502",
        "restore-failed",
        "crun or runc had CRIU restore the container, and CRIU failed. Its first error stands after `CRIU "
        "says:`, and then the log that has the rest. The checkpoint is unharmed, and no container is left.",
        "See docs/troubleshooting.md, which has the errors of CRIU that people meet most. A restore needs "
        "the same files, mounts and IP address (for open TCP connections) as the checkpoint had.",
    ),
    ErrorCode(
        "GPS-503",
        "no-images",
        "The runtime said that it made a checkpoint, and there are no images. A wrapper stands in its "
        "place, or it did not call CRIU.",
        "Run `criu check`, and see which program `runtime` in /etc/gpusnap/gpusnap.toml names.",
    ),
    ErrorCode(
        "GPS-504",
        "failed-after-dump",
        "A note, no error: the checkpoint is whole. The runtime failed in what it does after the dump, such "
        "as removing the container.",
        "See whether the container is gone (`podman ps --all`), and remove it if it is not wanted.",
    ),
    ErrorCode(
        "GPS-506",
        "plugin-missing",
        "The GPU state is saved by a plugin of CRIU (for AMD's GPUs always, for NVIDIA's if `nvidia.driver` "
        "says so), and the plugin, or the program that it runs, is not on this host.",
        "Install it, or set `nvidia.libdir` or `amd.libdir` to the directory that has the plugin, and "
        "`nvidia.cuda-checkpoint` to the program, in /etc/gpusnap/gpusnap.toml. `gpusnap doctor` checks it.",
    ),
    ErrorCode(
        "GPS-508",
        "container-exists",
        "There is a container of that name or ID already. Most often it is the one that the checkpoint "
        "ended, which Podman keeps until it is removed. If Podman was killed during a restore, it may be "
        "one that Podman does not know.",
        "Remove it (`podman rm NAME`), or give the restored one another name (`--name`). One that no engine "
        "knows: `gpusnap recover ID` ends it.",
    ),
    ErrorCode(
        "GPS-509",
        "ended-at-once",
        "The container, or a GPU process in it, was restored and ended as soon as it ran again. Its program "
        "found something that it does not bear: a closed connection, a file that is gone, a clock that went "
        "on.",
        "The program's own log says why (`podman logs NAME`). The checkpoint is unharmed.",
    ),
    ErrorCode(
        "GPS-511",
        "process-ended-by-itself",
        "A note, no error: the container runs. One of its processes ended by itself during the restore. "
        "Somebody ended it, or its standard output was a pipe that nobody reads any more, as `podman exec` "
        "leaves one.",
        "Nothing, if the process is not needed. Its own log may say more. Start what has to survive from "
        "the container's own command.",
    ),
    ErrorCode(
        "GPS-512",
        "memory-not-written",
        "The disk failed while the GPUs' memory was written or read. If a checkpoint failed, the container "
        "continues, and nothing is left of the checkpoint; if a restore failed, the checkpoint is as it "
        "was.",
        "The end of the message is the underlying error; docs/errors.md#reasons says what to do about it. "
        "For a full disk: `gpusnap rm`, `gpusnap gc`.",
    ),
    ErrorCode(
        "GPS-513",
        "region-not-copied",
        "gpusnap writes GPU memory while the driver copies it to RAM. The driver left a part of it out, or "
        "the RAM cannot be freed afterwards.",
        'Set `memory.pages` to "criu": CRIU writes the memory then, which takes longer. Please report it '
        "with the version of the driver.",
    ),
    ErrorCode(
        "GPS-514",
        "not-kept",
        "A note, no error: the checkpoint is whole. The chunks of its GPU memory could not be kept for the "
        "next checkpoint of the container, which will write all of it again. The directory for it has to be "
        "on the file system of the images, to belong to root, and to have room.",
        "Set `memory.keep-folder` to a directory beside the images, or `memory.keep` to false. See "
        "docs/settings.md#the-next-checkpoint-of-a-container.",
    ),
    ErrorCode(
        "GPS-515",
        "no-manifest-yet",
        "CRIU had finished the dump, and gpusnap could not complete the checkpoint: images could not be "
        "read again or brought to disk, or the manifest could not get its name. Without a manifest, it is "
        "no checkpoint.",
        "Correct what the end of the message names. If the container has ended, `gpusnap recover` completes "
        "the checkpoint; if it continues, checkpoint it again. See `dmesg` if the disk fails.",
    ),
    ErrorCode(
        "GPS-516",
        "address-missing",
        "The checkpoint has open TCP connections, and the network that the container would get does not "
        "have the local address of one of them, so CRIU could not bind it. For an address of IPv6 it is a "
        "note: the kernel may still be checking whether another host has it.",
        "Give the network that address (`--network` with the old name and `--ip`, or the same host), or "
        "restore with `--tcp-close`, which closes the connections.",
    ),
    ErrorCode(
        "GPS-517",
        "pycriu-missing",
        "gpusnap reads CRIU's images by CRIU's own Python package, pycriu. It is not on this host, or it and "
        "the protobuf of this host do not fit each other.",
        "Install your distribution's package (`python3-pycriu` on Debian and Ubuntu, `python3-criu` on "
        "Fedora), or CRIU from its source. `gpusnap doctor` checks it. No package on PyPI has it.",
    ),
    ErrorCode(
        "GPS-518",
        "volume",
        "A named volume of the container cannot be restored as it was. Podman has some of the container's "
        "volumes already and lacks others, or lacks one whose files the checkpoint does not have, because it "
        "was made with `--ignore-volumes`. Nothing was changed.",
        "To restore all files from the checkpoint, remove the volumes that are there (`podman volume rm`). "
        "To use volumes as they are, and to begin with empty ones where there is none, give "
        "`--ignore-volumes`.",
    ),
    ErrorCode(
        "GPS-519",
        "port-in-use",
        "The container publishes a port of the host, or listens on one in a network that it shares, and "
        "something listens there already. Often it is the first copy of the same container.",
        "Give the restored container other ports (`--publish HOST-PORT:CONTAINER-PORT`), or end what listens "
        "there; `ss --listening --processes` shows it. `--publish` changes nothing for a container in the "
        "host's network (`podman run --network host`): a second copy needs a network of its own.",
    ),
    ErrorCode(
        "GPS-520",
        "address-in-use",
        "The container had an IP address of its own, and another container has that address now.",
        "Restore with `--ignore-static-ip`, and the container gets another address. Open TCP connections "
        "need the old address: to keep them, end the other container.",
    ),
    ErrorCode(
        "GPS-521",
        "volume-as-it-is",
        "Podman still has a named volume of the container, so the restored container uses it as it is: "
        "gpusnap replaces no file in it. What was written to it since the checkpoint, the processes do not "
        "know of.",
        "Nothing, if its files are only read, or if nobody has written to them since. To have the files of "
        "the checkpoint instead: end the containers that use it, remove it (`podman volume rm`), and restore "
        "again.",
    ),
    ErrorCode(
        "GPS-522",
        "pod",
        "Podman restores a container that was in a pod only into a pod, and one that was in none into none. "
        "Without `--pod`, gpusnap takes the pod that the container was in, if Podman still has it.",
        "Make a pod that shares the same namespaces as the first one did (`podman pod create --share …`), "
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
)
