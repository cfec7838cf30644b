#!/bin/sh
# Start a service from a snapshot, run a command against it, and remove it again.
#
#   run.sh [-w READY] [-t SECONDS] [-g GPU_MAP] SNAPSHOT NAME COMMAND...
#
#   -w READY       a shell command, run in the container, that succeeds once the service answers
#   -t SECONDS     how long it may take until then [60]
#   -g GPU_MAP     which GPU takes which one's place, as `gpusnap restore --gpu-map` has it [by fit]
#   SNAPSHOT       what snapshot.sh has printed
#   NAME           of the container, another for each job on this host
#   COMMAND        the test
#
# COMMAND finds the container's name in the environment, as SERVICE. Each job's container has a network of its
# own, so none needs a port of the host: reach the service from within, by
#
#   podman exec "$SERVICE" ...
#   podman run --rm --network "container:$SERVICE" IMAGE ...      # and then http://127.0.0.1:PORT
#
# Any number of jobs may start from one snapshot at once, as far as GPU memory goes. As root, and so is
# COMMAND, since the container is root's. The exit code is COMMAND's, or 1. The container is removed always.
set -euf

ready=true seconds=60 gpu_map=

die() {
    echo "run.sh: $*" >&2
    exit 1
}

usage() {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

while getopts w:t:g: option; do
    case $option in
    w) ready=$OPTARG ;;
    t) seconds=$OPTARG ;;
    g) gpu_map=$OPTARG ;;
    *) usage ;;
    esac
done
shift $((OPTIND - 1))
[ $# -ge 3 ] || usage
snapshot=$1 SERVICE=$2
shift 2
[ "$(id -u)" -eq 0 ] || die "the restored container is root's; run it with sudo"
! podman container exists "$SERVICE" || die "the container $SERVICE already exists; give each job its own name"

trap 'podman rm --force --time 0 "$SERVICE" >/dev/null 2>&1 || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

gpusnap restore "$snapshot" --name "$SERVICE" ${gpu_map:+--gpu-map "$gpu_map"} >&2
begin=$(date +%s)
until podman exec "$SERVICE" sh -c "$ready" >/dev/null 2>&1; do
    if [ $(($(date +%s) - begin)) -ge "$seconds" ]; then
        podman logs --tail 50 "$SERVICE" >&2
        die "the restored service does not answer within $seconds s; its last lines are above"
    fi
    sleep 1
done

export SERVICE
"$@"
