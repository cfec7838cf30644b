"""The names in a checkpoint archive that are read; see podman.py."""

from __future__ import annotations

from gpusnap.runtime_shim.records import manifest

OURS = f"checkpoint/{manifest.FOLDER}"
CONFIG = f"{OURS}/{manifest.NAME}"
BLOBS = f"{OURS}/blobs"
LAYOUT = (f"{OURS}/oci-layout", f"{OURS}/index.json", BLOBS)
# A link in place of one of these would redirect what follows.
FOLDERS = ("checkpoint", OURS, BLOBS, f"{BLOBS}/sha256")
ROOTFS = "rootfs-diff.tar"
FIRST = ("config.dump", "spec.dump")
# Size of one of these; Podman's have some tens of KiB.
LARGEST_DUMP = 16 << 20
# A layout, in the records of an image of containerd's.
IMAGE_FOLDER = "containerd"
IMAGE_BLOBS = f"{IMAGE_FOLDER}/blobs/sha256"
# A temporary archive in a staging directory of a store.
ARCHIVE = "podman.tar"

PIECE = 1 << 20
# A blob up to this size is in memory while it is checked and copied; a chunk has 16 MiB.
SMALL = 32 << 20
