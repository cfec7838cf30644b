# A wheel, and an sdist, by pipx in a clean tree: sh wheel.sh DIST [system]
#
# `system`: the system has pycriu, which the environment does not see, and gpusnap finds all the same.
set -eu
dist=$1
. "$(dirname "$0")/listing.sh"

apt-get -q update >/dev/null
apt-get -q install -y --no-install-recommends pipx crun python3-venv ${2:+python3-pycriu} >/dev/null
mkdir -p /etc/containers /root/.local/bin /root/.local/share
printf '#!/bin/sh\n' >/usr/bin/podman
chmod 755 /usr/bin/podman
PATH=$PATH:/root/.local/bin
listing >/tmp/before

echo "== the wheel"
pipx install "$dist"/gpusnap-*.whl
listing >/tmp/installed
gpusnap --version
gpusnap settings >/dev/null
gpusnap install --podman >/tmp/said 2>&1
cat /tmp/said
if [ "${2:-}" ]; then
    gpusnap doctor --json | grep -A 8 '"pycriu"' | grep "can be decoded"
else
    grep "python3-pycriu" /tmp/said
fi
gpusnap-runtime --version
# The launcher in C, which finds the environment's Python where it needs it.
head -c 4 /usr/local/bin/gpusnap-runtime | tail -c 3
echo
/usr/local/bin/gpusnap-runtime --version | grep gpusnap-runtime
/usr/local/bin/gpusnap-runtime list
grep -r . /etc/containers/containers.conf.d/
gpusnap install --podman | grep unchanged
gpusnap uninstall
listing >/tmp/after
same /tmp/installed /tmp/after
pipx uninstall gpusnap

echo "== the sdist, without a C compiler"
if command -v cc; then echo "there is one, and should not be"; exit 1; fi
pipx install "$dist"/gpusnap-*.tar.gz
gpusnap install --podman 2>&1 | grep "30 ms"
grep /root/.local/ /etc/containers/containers.conf.d/90-gpusnap.conf
gpusnap uninstall
pipx uninstall gpusnap
rmdir --ignore-fail-on-non-empty /root/.local/share/man/man1 /root/.local/share/man 2>/dev/null || true
listing | grep -v '/root/.local/' >/tmp/end
grep -v '/root/.local/' /tmp/before >/tmp/begin
same /tmp/begin /tmp/end
echo "== all is well"
