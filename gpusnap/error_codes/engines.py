"""GPS-9…: Podman, containerd, CRI-O and the OCI hooks."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-901",
        "engine-not-run",
        "Podman, or containerd's client ctr, cannot be started or does not reach its service.",
        "Install it, and see that PATH has it. For containerd: see that it runs, that `CONTAINERD_ADDRESS` "
        "names its socket, and that you may use it (root).",
    ),
    ErrorCode(
        "GPS-902",
        "podman-killed",
        "Podman, or the gpusnap-runtime that it had started, was killed at work, for example for want of "
        "memory. The runtime may continue and complete what it began.",
        "Run `gpusnap recover`, which says what has become of the container, and try again. `dmesg` says "
        "whether the kernel killed it for want of memory.",
    ),
    ErrorCode(
        "GPS-903",
        "containerd-failed",
        "containerd does not give or take the image of a checkpoint. Its own words are at the end of the "
        "message.",
        "`ctr images check` shows which images are whole. See that containerd runs, and its log "
        "(`journalctl -u containerd`).",
    ),
    ErrorCode(
        "GPS-904",
        "containerd-name",
        "The checkpoint, or its base image, would get a name in containerd that another image has.",
        "Give the checkpoint another name (`--to containerd:IMAGE`), or rename or remove the other image "
        "with `ctr images tag` and `ctr images rm`.",
    ),
    ErrorCode(
        "GPS-906",
        "containerd-without-memory",
        "A checkpoint of containerd's has CRIU's images only if it was made with `--task`. If containerd "
        "has an earlier checkpoint of the same container, it leaves them out or mixes them.",
        "Remove the earlier checkpoint (`ctr images rm --sync`), and make it again with `ctr container "
        "checkpoint --task`.",
    ),
    ErrorCode(
        "GPS-907",
        "podman-export",
        "Podman's archive of the checkpoint is not whole. The container continues, or can be restored from "
        "Podman's own storage.",
        "If the container has ended: `podman container restore NAME`. Then try again; if it comes again, "
        "report it with the versions of Podman and gpusnap.",
    ),
    ErrorCode(
        "GPS-908",
        "hook",
        "An OCI hook of gpusnap got something that is not as the specification says, or could not keep its "
        "record. The container starts or ends all the same, without what the hook does: finding GPUs, and "
        "telling CRIU of its configuration.",
        "Correct what the message names, and start the container again. See docs/hooks.md.",
    ),
)
