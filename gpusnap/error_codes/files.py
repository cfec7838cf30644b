"""GPS-6…: the files of a checkpoint: manifests, images, archives."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-601",
        "damaged",
        "A file of the checkpoint is cut short, has changed since it was written, is missing, or is not "
        "what its format says. gpusnap checks every file before it is used, and restores nothing that is "
        "damaged. Or the file was never one of gpusnap's.",
        "`gpusnap verify` lists all that is damaged. Take another copy of the checkpoint: from the host "
        "that made it, or from a registry with `gpusnap pull`. If copies of it break again and again, test "
        "the disk and the memory of the host.",
    ),
    ErrorCode(
        "GPS-602",
        "incomplete",
        "The checkpoint has no manifest, or not all of its parts. It was cut off while it was made or "
        "copied. gpusnap writes the manifest last, when all else is on disk.",
        "Take another copy. If it was made on this host and gpusnap was killed, `gpusnap recover` completes "
        "it. If the message says that CRIU had finished, the checkpoint can be used at your own risk: "
        "rename `gpusnap/manifest.pending` to `gpusnap/manifest.json`.",
    ),
    ErrorCode(
        "GPS-603",
        "newer-format",
        "The checkpoint has a format that this gpusnap does not know. It was made by a newer one.",
        "Restore it with the gpusnap that made it, or a newer one. See docs/format.md.",
    ),
    ErrorCode(
        "GPS-604",
        "untrusted",
        "The checkpoint holds something that neither gpusnap nor an engine writes: a link that leads out of "
        "it, a device or a mount that its container did not have, a file under a name that has no place "
        "there. Somebody changed it, or it is damaged. gpusnap grants such a checkpoint nothing.",
        "Do not restore from it, and do not restore from other copies of the same source. Find out where it "
        "comes from. A device that was made inside the container by hand has to be given by `--device` "
        "instead.",
    ),
    ErrorCode(
        "GPS-605",
        "not-a-checkpoint",
        "What was named exists, is whole as far as is known, and is something else: an ordinary image, "
        "another archive, the checkpoint of a container without a GPU.",
        "Name what `gpusnap checkpoint`, `gpusnap pull -o` or `podman container checkpoint --export` wrote. "
        "`gpusnap ls` lists the checkpoints of a store. Decompress a compressed image layout first (`zstd "
        "-d`, `gunzip`).",
    ),
    ErrorCode(
        "GPS-606",
        "image-for-an-engine",
        "The checkpoint is in the form of an ordinary image, which an engine restores by itself.",
        "Podman's: `gpusnap restore`, or `podman pull` and then `podman container restore IMAGE`. "
        "Kubernetes': name it as the image of a container in a new pod. See docs/kubernetes.md.",
    ),
    ErrorCode(
        "GPS-607",
        "other-engine",
        "The checkpoint was made by another engine than the one that is to restore it. Podman, containerd "
        "and Kubernetes keep what they know of a container in formats of their own.",
        "Restore it with the engine that made it: `gpusnap restore` for Podman's; `gpusnap pull REF --to "
        "containerd:IMAGE` and `ctr container restore --live NAME IMAGE` for containerd's. See "
        "docs/containerd.md.",
    ),
    ErrorCode(
        "GPS-608",
        "half-a-checkpoint",
        "Only one half of a checkpoint is here: the GPUs' memory without the engine's records, or the "
        "engine's archive without the memory, which went to a store (`memory.pages`).",
        "Restore with the engine from the archive or from its own storage; gpusnap-runtime finds the memory "
        "in the store. `gpusnap checkpoint` without `--to` keeps both together.",
    ),
    ErrorCode(
        "GPS-609",
        "chunk-elsewhere",
        "The memory of the checkpoint is not in the archive, but in the store of the host that made it, and "
        "this host's store lacks a part of it.",
        "Pull the checkpoint here with `gpusnap pull`, name its repository in `store.pull-from`, or set "
        "`store.path` to the store that it was made in.",
    ),
)
