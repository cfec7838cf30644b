# The Debian package in a clean tree, on a user's way from the installation to its end: sh deb.sh DIST SRC
#
# SRC is a checkout with softgpu built, which stands in for NVIDIA's driver.
set -eu
dist=$1 src=$2
. "$(dirname "$0")/listing.sh"

step() { echo "== $*"; }
fail() { echo "FAILED: $*" >&2; exit 1; }
refused() { if "$@" >/tmp/said 2>&1; then fail "it went through: $*"; fi; cat /tmp/said; }
# The workload writes a line for each tick, with "ok" where every byte on its GPU is right.
ticks() { podman logs "$1" 2>/dev/null | grep -c ' ok' || true; }
goes_on() {
    before=$(ticks "$1") end=$(($(date +%s) + 60))
    until [ "$(ticks "$1")" -gt $((before + 3)) ]; do
        [ "$(date +%s)" -lt $end ] || fail "$1 does not go on: $(podman logs "$1" 2>&1 | tail -3)"
    done
    if podman logs "$1" 2>&1 | grep -q BAD; then fail "wrong bytes"; fi
}

step "a host with Podman and a driver"
apt-get -q update >/dev/null
apt-get -q install -y --no-install-recommends podman crun netavark nftables docker-registry python3 >/dev/null 2>&1
cp "$src"/tests/host/files/etc/containers/* /etc/containers/
python3 -c "
import sys; sys.path[:0] = ['$src/tests/host']
import gpuhost
gpuhost.install('$src/softgpu/build', '''driver 580.95.05
cuda 13.0
gpu uuid=GPU-11111111-2222-3333-4444-000000000000 minor=0 cc=9.0 memory=2GiB name=Soft H100
gpu uuid=GPU-11111111-2222-3333-4444-000000000001 minor=1 cc=9.0 memory=2GiB name=Soft H100
''')"
cp "$src"/softgpu/build/bin/gpuwork /usr/local/bin/

podman load -q -i /base.tar
listing >/tmp/before

step "apt installs it, with what it needs, and no engine is changed"
apt-get -q install -y --no-install-recommends "$dist"/gpusnap_*.deb 2>&1 | grep -E '^(Setting up|E:|W:)' || true
dpkg -s gpusnap | grep -q '^Status: install ok installed'
gpusnap --version
gpusnap-runtime --version | grep gpusnap-runtime
command -v criu >/dev/null || fail "no criu"
test ! -e /etc/containers/containers.conf.d/90-gpusnap.conf
test ! -e /etc/gpusnap
test -s /usr/share/man/man1/gpusnap.1.gz || grep -rq path-exclude /etc/dpkg/dpkg.cfg.d || fail "no man page"
bash -c 'source /usr/share/bash-completion/completions/gpusnap && complete -p gpusnap'

step "gpusnap install, and again"
gpusnap gpus
gpusnap install --podman --dry-run >/dev/null
gpusnap install --podman
if gpusnap install --podman | grep -v unchanged | grep /; then fail "the second time it changed something"; fi
gpusnap doctor || true

step "run, checkpoint, restore on another GPU"
podman --runtime gpusnap-runtime run -d --name server --device nvidia.com/gpu=0 \
    -v /usr/local/bin/gpuwork:/gpuwork:ro localhost/base /gpuwork --tick 30
goes_on server
gpusnap checkpoint server --name warm
podman rm server >/dev/null
gpusnap ls

step "push, pull"
cat >/tmp/registry.yml <<X
version: 0.1
storage: {filesystem: {rootdirectory: /tmp/registry}}
http: {addr: "127.0.0.1:15000"}
X
docker-registry serve /tmp/registry.yml >/tmp/registry.log 2>&1 &
registry=$!
end=$(($(date +%s) + 30))
until python3 -c "import urllib.request as u; u.urlopen('http://127.0.0.1:15000/v2/')" 2>/dev/null; do
    [ "$(date +%s)" -lt $end ] || fail "the registry does not start: $(tail -3 /tmp/registry.log)"
done
gpusnap push warm http://127.0.0.1:15000/team/server:warm
gpusnap rm warm
gpusnap gc
gpusnap pull http://127.0.0.1:15000/team/server:warm
gpusnap restore http://127.0.0.1:15000/team/server:warm --gpu-map 0=1 --name server
kill $registry
goes_on server

step "as long as the container is there, neither gpusnap nor its package goes"
refused gpusnap uninstall | grep server
refused apt-get -q remove -y gpusnap | grep server
test -e /etc/containers/containers.conf.d/90-gpusnap.conf
podman rm --force --time 0 server >/dev/null

step "the end"
rm -r /var/lib/gpusnap
apt-get -q purge -y gpusnap >/dev/null
test ! -e /etc/gpusnap || fail "/etc/gpusnap is left: $(ls -A /etc/gpusnap)"
test ! -e /usr/lib/gpusnap || fail "/usr/lib/gpusnap is left"
# Of what it brought nothing stays for its being recommended by something else.
apt-get -q autoremove -y --purge -o APT::AutoRemove::RecommendsImportant=false \
    -o APT::AutoRemove::SuggestsImportant=false >/dev/null
listing >/tmp/after
same /tmp/before /tmp/after
echo "== all is well"
