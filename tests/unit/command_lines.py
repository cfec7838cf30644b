"""Command lines as they come in, without the program's name: for the tests of entry, argv and launcher."""

from __future__ import annotations

ID = "3f1b9c2d4e5f60718293a4b5c6d7e8f90112233445566778899aabbccddeeff0"
BUNDLE = f"/var/lib/containers/storage/overlay-containers/{ID}/userdata"
RUN = f"/run/containers/storage/overlay-containers/{ID}/userdata"
SHIM = f"/run/containerd/io.containerd.runtime.v2.task/k8s.io/{ID}"

_CONTAINERD = f"--root /run/containerd/runc/k8s.io --log {SHIM}/log.json --log-format json --systemd-cgroup"
# Podman gives conmon each word by itself: --runtime-arg --log --runtime-arg=<path>.
_CONMON = f"--log-format=json --log {RUN}/oci-log"

PODMAN_CHECKPOINT = f"checkpoint --image-path {BUNDLE}/checkpoint --work-path {BUNDLE}"
PODMAN_LEAVE_RUNNING = (
    f"{PODMAN_CHECKPOINT} --leave-running --tcp-established --file-locks --leave-running {ID}".split()
)
PODMAN_PRE_CHECKPOINT = (
    f"checkpoint --image-path {BUNDLE}/pre-checkpoint --work-path {BUNDLE} "
    f"--leave-running --pre-dump {ID}".split()
)
PODMAN_WITH_PREVIOUS = f"{PODMAN_CHECKPOINT} --parent-path ../pre-checkpoint {ID}".split()
CONMON_RESTORE = (
    f"--systemd-cgroup {_CONMON} restore --bundle {BUNDLE} --pid-file {RUN}/pidfile --detach "
    f"--image-path {BUNDLE}/checkpoint --work-path {BUNDLE} --tcp-established --file-locks {ID}".split()
)
CONMON_RESTORE_ALL = (
    f"{_CONMON} restore --bundle {BUNDLE} --pid-file {RUN}/pidfile --no-pivot --no-new-keyring --detach "
    f"--image-path {BUNDLE}/checkpoint --work-path {BUNDLE} --preserve-fds 0 --tcp-established "
    f"--console-socket /tmp/conmon-term.ABC123 {ID}".split()
)
CONMON_RESTORE_POD = (
    f"restore --bundle {BUNDLE} --pid-file {RUN}/pidfile --detach --image-path {BUNDLE}/checkpoint "
    f"--work-path {BUNDLE} --lsm-mount-context=system_u:object_r:container_file_t:s0:c1,c2 "
    f"--lsm-profile=selinux:system_u:system_r:container_t:s0:c1,c2 {ID}".split()
)
CONMON_TCP_CLOSE = [*CONMON_RESTORE[:-1], "--tcp-close", ID]
CONTAINERD_CHECKPOINT = (
    f"{_CONTAINERD} checkpoint --image-path /run/ckpt/img --work-path {SHIM}/criu-work --tcp-established "
    f"--ext-unix-sk --shell-job --file-locks --leave-running {ID}".split()
)
CONTAINERD_EMPTY_NS = [*CONTAINERD_CHECKPOINT[:-1], "--empty-ns", "network", ID]
CONTAINERD_RESTORE = (
    f"{_CONTAINERD} restore --image-path /run/ckpt/img --work-path {SHIM}/work --detach "
    f"--pid-file {SHIM}/init.pid --console-socket /tmp/pty1/pty.sock --no-pivot -no-subreaper "
    f"--bundle {SHIM} {ID}".split()
)
CRIO_CHECKPOINT = (
    f"--root=/run/crun checkpoint --file-locks --image-path {BUNDLE}/checkpoint --work-path {BUNDLE} "
    f"--leave-running {ID}".split()
)
CRIO_RESTORE = (
    f"--root=/run/crun --systemd-cgroup restore --bundle {BUNDLE} --pid-file {RUN}/pidfile --detach "
    f"--image-path {BUNDLE}/checkpoint --work-path {BUNDLE} --lsm-profile selinux:l --lsm-mount-context c "
    f"{ID}".split()
)

OURS = {
    "podman leave-running": PODMAN_LEAVE_RUNNING,
    "podman pre-checkpoint": PODMAN_PRE_CHECKPOINT,
    "podman with-previous": PODMAN_WITH_PREVIOUS,
    "conmon restore": CONMON_RESTORE,
    "conmon restore, every option": CONMON_RESTORE_ALL,
    "conmon restore --pod": CONMON_RESTORE_POD,
    "conmon restore --tcp-close": CONMON_TCP_CLOSE,
    "containerd checkpoint": CONTAINERD_CHECKPOINT,
    "containerd checkpoint --empty-ns": CONTAINERD_EMPTY_NS,
    "containerd restore": CONTAINERD_RESTORE,
    "cri-o checkpoint": CRIO_CHECKPOINT,
    "cri-o restore": CRIO_RESTORE,
    "after --": ["--debug", "--", "checkpoint", "x"],
    "value that looks like a command": ["--root", "state", "checkpoint", "x"],
    "value that looks like an option": ["--log", "--debug", "restore", "x"],
    "one dash": ["-root=/r", "-log", "/l", "-debug", "checkpoint", "x"],
    "unknown global option": ["--shiny", "checkpoint", "x"],
    "unknown global option with a value": ["--shiny", "7", "checkpoint", "x"],
    "flag with a value": ["--debug=true", "restore", "x"],
    "no help": ["--help=false", "restore", "x"],
}

PASS = {
    "nothing": [],
    "state": ["state", ID],
    "podman kill": ["kill", "--all", ID, "9"],
    "podman delete": ["delete", "--force", ID],
    "conmon create": f"--systemd-cgroup {_CONMON} create -b {BUNDLE} --pid-file {RUN}/pidfile {ID}".split(),
    "containerd state": [*_CONTAINERD.split(), "state", ID],
    "containerd delete": [*_CONTAINERD.split(), "delete", "--force", ID],
    "containerd exec": [*_CONTAINERD.split(), "exec", "--process", "/p", "--detach", ID],
    "exec of a checkpoint": ["exec", ID, "checkpoint", "--help"],
    "container named restore": ["--log", "checkpoint", "kill", "restore"],
    "features": ["features"],
    "help": ["--help"],
    "help before a command": ["--debug", "-h", "checkpoint", "x"],
    "usage": ["--usage", "restore", "x"],
    "question mark": ["-?"],
    "help command": ["help", "checkpoint"],
    "missing value": ["--debug", "--root"],
    "options only": ["--debug", "--root", "/r"],
    "end of options": ["--"],
    "end of options, command": ["--", "state", "x"],
    "empty word": ["", "checkpoint"],
    "dash": ["-", "checkpoint"],
    "empty value": ["--root=", "--log", "", "state", "x"],
}

VERSION = {
    "--version": ["--version"],
    "-v": ["-v"],
    "-V": ["-V"],
    "-version": ["-version"],
    "after another option": ["--root", "/r", "--version"],
    "before a command": ["-v", "checkpoint", "x"],
}

UNCOMMON = {
    "abbreviated": ["--sys", "state", "x"],
    "unknown option": ["--shiny", "state", "x"],
    "unknown option and value": ["--shiny", "7", "state", "x"],
    "unknown option with =": ["--shiny=7", "state", "x"],
    "flag with =": ["--systemd-cgroup=true", "state", "x"],
    "help with =": ["--help=true", "state", "x"],
    "three dashes": ["---root", "state", "x"],
}
"""PASS, too, with options that neither crun nor runc has, or in a form that engines do not use."""
