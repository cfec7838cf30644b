#!/bin/sh
# Restore a container at boot, and checkpoint it at shutdown; for server-snapshot.service.
#
#   keep.sh start NAME UNIT     restore NAME from its last shutdown, or else from NAME:warm, if there is such a
#                               checkpoint, or else start UNIT, which makes it anew
#   keep.sh stop NAME           checkpoint NAME; if that fails, stop it
#
# That of a shutdown is restored once: after a crash of the host the container does not start from an old state. It
# stays in the store as NAME:restored until the next one, for a restore by hand. NAME:warm is for a server that has
# no state, such as one of a model. It is restored at each boot for which there is no other; you make it once:
#
#   gpusnap checkpoint --leave-running --name NAME:warm NAME
set -eu

usage() {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

[ $# -ge 2 ] || usage
# systemd's PATH lacks /root/.local/bin, where pipx puts commands for root. Without gpusnap nothing may be started
# anew, or removed: the checkpoint of the last shutdown is there.
PATH=$PATH:/usr/local/bin:/root/.local/bin
if ! command -v gpusnap >/dev/null; then
    echo "keep.sh: gpusnap is not found in $PATH, so $2 is left as it is" >&2
    exit 1
fi
name=$2 tag=$2:shutdown

case $1 in
start)
    [ $# -eq 3 ] || usage
    found=0
    gpusnap inspect --json "$tag" >/dev/null 2>&1 || found=$?
    if [ "$found" -eq 0 ]; then
        podman rm --force --ignore "$name" >/dev/null
        gpusnap tag "$tag" "$name:restored"
        gpusnap rm "$tag"
        if gpusnap restore "$name:restored"; then
            exit 0
        fi
        echo "keep.sh: $name is not restored, for the reason above" >&2
        podman rm --force --ignore "$name" >/dev/null
    fi
    if gpusnap inspect --json "$name:warm" >/dev/null 2>&1; then
        podman rm --force --ignore "$name" >/dev/null
        if gpusnap restore "$name:warm"; then
            exit 0
        fi
        echo "keep.sh: $name is not restored from $name:warm, for the reason above, and starts anew" >&2
        podman rm --force --ignore "$name" >/dev/null
    fi
    exec systemctl start "$3"
    ;;
stop)
    [ "$(podman container inspect --format '{{.State.Running}}' "$name" 2>/dev/null)" = true ] || exit 0
    if ! gpusnap checkpoint "$name" --name "$tag"; then
        echo "keep.sh: $name is not checkpointed, for the reason above, and is stopped" >&2
        podman stop "$name"
    fi
    podman rm --ignore "$name" >/dev/null
    ;;
*) usage ;;
esac
