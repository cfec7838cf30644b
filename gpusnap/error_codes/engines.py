"""GPS-9…: Podman, containerd, CRI-O and the OCI hooks."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-901",
        "engine-not-run",
        "Podman, or containerd's client ctr, cannot be started or cannot reach its service.",
        "Install it, and check that it is in PATH. For containerd: check that it is running, that "
        "`CONTAINERD_ADDRESS` names its socket, and that you may use it (root).",
    ),
    ErrorCode(
        "GPS-902",
        "podman-killed",
        "Podman, or the gpusnap-runtime that it started, was killed while it was working, for example "
        "because the host ran out of memory. The runtime may continue and complete the operation.",
        "Run `gpusnap recover`, which reports the state of the container and try again. `dmesg` shows "
        "whether the kernel killed it for lack of memory.",
    ),
    ErrorCode(
        "GPS-903",
        "containerd-failed",
        "containerd cannot export or import the image of a checkpoint. Its own message is at the end.",
        "`ctr images check` shows which images are complete. Check that containerd is running, and its "
        "log (`journalctl -u containerd`).",
    ),
    ErrorCode(
        "GPS-904",
        "containerd-name",
        "The checkpoint, or its base image, would get a name that another image in containerd already has.",
        "Give the checkpoint another name (`--to containerd:IMAGE`), or rename or remove the other image "
        "with `ctr images tag` and `ctr images rm`.",
    ),
    ErrorCode(
        "GPS-906",
        "containerd-without-memory",
        "A containerd checkpoint contains CRIU's images only if it was made with `--task`. If containerd "
        "has an earlier checkpoint of the same container, it omits or mixes them.",
        "Remove the earlier checkpoint (`ctr images rm --sync`), and make a new one with `ctr container "
        "checkpoint --task`.",
    ),
    ErrorCode(
        "GPS-907",
        "podman-export",
        "Podman's archive of the checkpoint is incomplete. The container continues, or can be restored "
        "from Podman's own storage. With `--leave-running` that happens if a file of the container becomes "
        "shorter while Podman reads it: Podman omits all later files, and reports success.",
        "If the container has stopped: `podman container restore NAME`. Then try again, without "
        "`--leave-running` if the container often truncates its files. If the error persists, report it "
        "with the versions of Podman and gpusnap.",
    ),
    ErrorCode(
        "GPS-908",
        "hook",
        "A gpusnap OCI hook received input that does not follow the specification, or could not save its "
        "record. The container starts or stops anyway, without the hook's work: finding GPUs, and passing "
        "CRIU its configuration.",
        "Correct what the message names, and start the container again. See docs/hooks.md.",
    ),
    ErrorCode(
        "GPS-909",
        "cleanup-would-restart",
        "A checkpoint has ended the container, and Podman was killed before it cleaned up. Podman refuses "
        "to restore the container until it has cleaned up. But cleaning up applies the restart policy, which "
        "would start the program from the beginning, without its memory. So gpusnap does not clean up. "
        "Nothing is lost.",
        "Run the commands in the message: `podman update --restart=no NAME` turns the policy off, `podman "
        "container cleanup NAME` cleans up, and `podman container restore NAME` continues the container. "
        "Then set the policy again, for example `podman update --restart=always NAME`.",
    ),
)
