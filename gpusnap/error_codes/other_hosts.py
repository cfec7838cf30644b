"""GPS-82…: other hosts, which `gpusnap migrate` moves containers to."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-820",
        "other-host-not-reached",
        "The other host cannot be reached by ssh, gpusnap does not run there, the connection ended or was "
        "silent for 30 seconds, or the other host made no progress for as long as `--patience` allows. If "
        "the container had been stopped, the message says where it is; if not, it was not touched and "
        "continues to run.",
        "Check that `ssh HOST gpusnap version` works as the same user. `--remote-command 'sudo -n "
        "gpusnap'` runs it there as root, and `--ssh 'ssh -i KEY'` passes options to ssh. Then run the "
        "same command again.",
    ),
    ErrorCode(
        "GPS-821",
        "other-host-not-understood",
        "The other host did not respond in gpusnap's protocol: its gpusnap has another version, or the "
        "shell there prints something when it starts.",
        "Install the same version of gpusnap on both hosts. Check that `ssh HOST true` prints nothing.",
    ),
    ErrorCode(
        "GPS-822",
        "other-host-refuses",
        "The other host cannot accept the container: its gpusnap is older, its architecture differs, it "
        "has a container of that name, or Podman there cannot get the image. Nothing was changed.",
        "Do what the message says; `--name` gives the container another name there. `gpusnap migrate "
        "--dry-run` checks it again.",
    ),
    ErrorCode(
        "GPS-823",
        "migration-unsettled",
        "The connection broke, or gpusnap was killed, while the other host restored the container, and it "
        "is unknown whether the restore succeeded. The container stays stopped on this host, because it "
        "may be running on the other one. Without a connection, the other host removes it automatically, "
        "unless it had been confirmed. Or gpusnap was killed before that, and the newest checkpoint is one "
        "that was sent ahead while the container ran on.",
        "Run `gpusnap recover`, which asks the other host: it removes what is left here, or prints the "
        "command that continues the container here. If that host cannot be reached, check there with "
        "`podman ps`; if the container does not run there, `gpusnap restore --not-migrated` continues it.",
    ),
    ErrorCode(
        "GPS-824",
        "migration-failed",
        "The container was not migrated. It runs on this host again, or, if the message says that it cannot "
        "be restored here either, its checkpoint is in the store.",
        "The message ends with the cause: correct that. What was sent to the other host stays in the "
        "store there, so the next attempt sends less.",
    ),
)
