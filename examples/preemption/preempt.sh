#!/bin/sh
# Checkpoint a container before this machine is taken away; for preemption.service.
#
#   preempt.sh -t SECONDS [-o TO] (-f FILE | -u URL | -s) NAME
#
#   -t SECONDS     how long there is from the notice on
#   -o TO          where the checkpoint goes, as gpusnap checkpoint --to [this host's store]
#   -f FILE        the notice is that FILE exists
#   -u URL         the notice is that URL answers with 200, as the metadata of clouds do
#   -s             the notice is SIGUSR1: systemctl kill --signal=USR1 --kill-whom=main preemption.service
#   NAME           of the container
#
# A disk that goes with the machine is no place for the checkpoint: give a registry, or oci:DIR on another one. The
# exit code is that of gpusnap, or 124 if the time was not enough.
set -eu

# systemd's PATH lacks /root/.local/bin, where pipx puts commands for root.
PATH=$PATH:/usr/local/bin:/root/.local/bin

seconds= to= file= url= signal=

usage() {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

while getopts t:o:f:u:s option; do
    case $option in
    t) seconds=$OPTARG ;;
    o) to=$OPTARG ;;
    f) file=$OPTARG ;;
    u) url=$OPTARG ;;
    s) signal=1 ;;
    *) usage ;;
    esac
done
shift $((OPTIND - 1))
[ $# -eq 1 ] && [ "${seconds:-0}" -gt 0 ] || usage
[ -n "$file$url$signal" ] || usage
# Now, and not when the notice comes.
if ! command -v gpusnap >/dev/null; then
    echo "preempt.sh: gpusnap is not found in $PATH" >&2
    exit 1
fi

noticed=
trap 'noticed=1' USR1

is_noticed() {
    [ -z "$noticed" ] || return 0
    [ -z "$file" ] || ! [ -e "$file" ] || return 0
    [ -z "$url" ] || ! curl --silent --fail --max-time 2 --output /dev/null "$url" || return 0
    return 1
}

until is_noticed; do
    # In the background, so that the signal is noticed at once.
    sleep 1 &
    wait $! || true
done
echo "preempt.sh: $1 has $seconds s" >&2
exec timeout --kill-after=5 "$seconds" gpusnap checkpoint "$1" ${to:+--to "$to"}
