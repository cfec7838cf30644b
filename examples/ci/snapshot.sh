#!/bin/sh
# See that a registry has a snapshot of a service that is warm, and print where: REPOSITORY@sha256:…
#
#   snapshot.sh -r REPOSITORY -i IMAGE -w READY [-o OPTIONS] [-k KEY]... [-t SECONDS] [--] [COMMAND...]
#
#   -r REPOSITORY  in a registry, without a tag; http:// before it for one without TLS
#   -i IMAGE       of the service, by a tag that stays or by digest; pulled if this host does not have it
#   -w READY       a shell command, run in the container, that succeeds once the service is warm
#   -o OPTIONS     of `podman run`, words without spaces in them [--device nvidia.com/gpu=0 --network none]
#   -k KEY         what else the warm state depends on, such as the revision of a model
#   -t SECONDS     how long the service may take to get warm [900]
#   COMMAND        of the service [the image's]
#
# Environment: RUNTIME, the name of gpusnap-runtime in containers.conf [gpusnap-runtime].
#
# The tag is made of all that the warm state depends on: the image's ID, the GPU's driver and model, OPTIONS,
# READY, COMMAND and each KEY. Where the registry has that tag, nothing is started. As root, as Podman asks it
# for checkpoints. The last line of stdout is the result, all else goes to stderr. Nothing is left running.
set -euf

repository= image= ready= options='--device nvidia.com/gpu=0 --network none' keys= seconds=900
runtime=${RUNTIME:-gpusnap-runtime}

die() {
    echo "snapshot.sh: $*" >&2
    exit 1
}

usage() {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

while getopts r:i:w:o:k:t: option; do
    case $option in
    r) repository=$OPTARG ;;
    i) image=$OPTARG ;;
    w) ready=$OPTARG ;;
    o) options=$OPTARG ;;
    k) keys="$keys $OPTARG" ;;
    t) seconds=$OPTARG ;;
    *) usage ;;
    esac
done
shift $((OPTIND - 1))
[ -n "$repository" ] && [ -n "$image" ] && [ -n "$ready" ] || usage
[ "$(id -u)" -eq 0 ] || die "Podman makes checkpoints for root only; run it with sudo"

# Of JSON on stdin, the value that the Python expression $1 takes from `of`. gpusnap needs Python anyway.
json() {
    python3 -c "import json, sys; of = json.load(sys.stdin); print($1)"
}

podman image exists "$image" || podman pull --quiet "$image" >&2
image_id=$(podman image inspect --format '{{.Id}}' "$image")
gpus=$(gpusnap gpus --json | json 'of["driver_version"], sorted({gpu["model"] for gpu in of["gpus"]})')
key=$(printf '%s\n' "$image_id" "$gpus" "$options" "$ready" "$keys" "$@" | sha256sum | cut -c 1-20)
tag=$repository:warm-$key

found=0
snapshot=$(gpusnap inspect --json "$tag") || found=$?
if [ "$found" -eq 0 ]; then
    echo "snapshot.sh: $tag is there" >&2
    digest=$(printf '%s\n' "$snapshot" | json 'of["artifact"]["digest"]')
    printf '%s\n' "$repository@$digest"
    exit
fi
# 3: there is no such reference. Anything else, such as a registry that does not answer, is a failure.
[ "$found" -eq 3 ] || exit "$found"

service=warm-$key-$$
trap 'podman rm --force --time 0 "$service" >/dev/null 2>&1 || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# shellcheck disable=SC2086  # OPTIONS are words.
podman --runtime "$runtime" run --detach --name "$service" $options "$image" "$@" >&2
begin=$(date +%s)
until podman exec "$service" sh -c "$ready" >/dev/null 2>&1; do
    state=$(podman container inspect --format '{{.State.Status}}' "$service")
    if [ "$state" != running ] || [ $(($(date +%s) - begin)) -ge "$seconds" ]; then
        podman logs --tail 50 "$service" >&2
        [ "$state" = running ] || die "the service has ended before it was warm; its last lines are above"
        die "the service is not warm after $seconds s; its last lines are above, and -t gives it more time"
    fi
    sleep 1
done
echo "snapshot.sh: warm after $(($(date +%s) - begin)) s" >&2

made=$(gpusnap checkpoint "$service" --to "$tag" --json)
digest=$(printf '%s\n' "$made" | json 'of["pushed"]["digest"]')
printf '%s\n' "$repository@$digest"
