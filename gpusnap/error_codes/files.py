"""GPS-6…: the files of a checkpoint: manifests, images, archives."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-601",
        "damaged",
        "A file of the checkpoint is truncated, has changed since it was written, is missing, or does not "
        "follow its format. gpusnap checks every file before it uses it, and restores nothing that is "
        "damaged. Or the file was not written by gpusnap.",
        "`gpusnap verify` lists all damage. Use another copy of the checkpoint: from the host that made "
        "it, or from a registry with `gpusnap pull`. If copies are repeatedly damaged, test the disk and "
        "the memory of the host.",
    ),
    ErrorCode(
        "GPS-602",
        "incomplete",
        "The checkpoint has no manifest, or is missing parts. It was interrupted while it was being made "
        "or copied. gpusnap writes the manifest last, when everything else is on disk.",
        "Use another copy. If it was made on this host and gpusnap was killed, `gpusnap recover` "
        "completes it. If the message says that CRIU had finished, you can use the checkpoint at your own "
        "risk: rename `gpusnap/manifest.pending` to `gpusnap/manifest.json`.",
    ),
    ErrorCode(
        "GPS-603",
        "newer-format",
        "The checkpoint has a format that this gpusnap does not support. It was made by a newer version.",
        "Restore it with the gpusnap that made it, or a newer one. See docs/format.md.",
    ),
    ErrorCode(
        "GPS-604",
        "untrusted",
        "The checkpoint contains something that neither gpusnap nor an engine writes: a link that points "
        "outside, a device or a mount that its container did not have, an unexpected file. It was "
        "modified, or it is damaged. gpusnap does not restore such a checkpoint.",
        "Do not restore from it, nor from other copies from the same source. Find out where it comes "
        "from. A device that was created manually inside the container must be added with `--device` "
        "instead.",
    ),
    ErrorCode(
        "GPS-605",
        "not-a-checkpoint",
        "What was named exists and shows no damage, but is something else: an ordinary image, another "
        "file or archive, the checkpoint of a container without a GPU.",
        "Name the output of `gpusnap checkpoint`, `gpusnap pull -o` or `podman container checkpoint "
        "--export`. `gpusnap ls` lists the checkpoints of a store. Decompress a compressed image layout "
        "first (`zstd -d`, `gunzip`).",
    ),
    ErrorCode(
        "GPS-606",
        "image-for-an-engine",
        "The checkpoint is an ordinary image, which an engine restores itself.",
        "Podman's: `gpusnap restore`, or `podman pull` and then `podman container restore IMAGE`. "
        "Kubernetes': use it as the image of a container in a new pod. See docs/kubernetes.md.",
    ),
    ErrorCode(
        "GPS-607",
        "other-engine",
        "The checkpoint was made by another engine than the one that should restore it. Podman, "
        "containerd and Kubernetes store container metadata in different formats.",
        "Restore it with the engine that made it: `gpusnap restore` for Podman's; `gpusnap pull REF --to "
        "containerd:IMAGE` and `ctr container restore --live NAME IMAGE` for containerd's. See "
        "docs/containerd.md.",
    ),
    ErrorCode(
        "GPS-608",
        "half-a-checkpoint",
        "Only half of a checkpoint is here: the GPU memory without the engine's records, or the engine's "
        "archive without the memory, which is in a store (`memory.pages`).",
        "Restore with the engine, from the archive or from its own storage; gpusnap-runtime finds the "
        "memory in the store. `gpusnap checkpoint` without `--to` keeps both together.",
    ),
    ErrorCode(
        "GPS-609",
        "chunk-elsewhere",
        "The memory of the checkpoint is not in the archive, but in the store of the host that made it, "
        "and a part of it is missing from this host's store.",
        "Pull the checkpoint here with `gpusnap pull`, add its repository to `store.pull-from`, or set "
        "`store.path` to the store that it was made in. For one restore: `GPUSNAP_STORE=DIR podman container "
        "restore NAME`. After a killed `gpusnap checkpoint --to oci:DIR`, `gpusnap recover` prints that "
        "command.",
    ),
)
