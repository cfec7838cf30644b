#!/bin/sh
# Make the tree that goes to /opt/gpusnap on each node, of gpusnap's wheel and what pip finds for it.
#
#   tree.sh WHEELS TREE
#
#   WHEELS   a folder with one wheel of gpusnap, and with those of its dependencies where there is no network
#   TREE     is made: bin/, lib/python3.X for each Python that a node may have, version
#
# The node's own Python runs it: /usr/bin/python3, 3.11 or later. Nothing of the node's is changed by it.
set -eu

wheels=$1 tree=$2
mkdir -p "$tree/bin" "$tree/share"
wheel=$(ls "$wheels"/gpusnap-*.whl)

for python in ${PYTHONS:-3.11 3.12 3.13}; do
    # Not this machine's Python is meant, so pip may only unpack wheels, and runs nothing of theirs.
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-compile \
        --only-binary :all: --implementation cp --python-version "$python" --find-links "$wheels" \
        --target "$tree/lib/python$python" "$wheel"
    rm -rf "$tree/lib/python$python/bin"
done

program() {
    cat >"$tree/bin/$1" <<END
#!/usr/bin/python3 -I
import sys

sys.path.insert(0, "/opt/gpusnap/lib/python%d.%d" % sys.version_info[:2])
from $2 import main

sys.exit(main())
END
    chmod 755 "$tree/bin/$1"
}
program gpusnap gpusnap.cli.entry
program gpusnap-runtime gpusnap.runtime_shim.shim.entry
program gpusnap-hook gpusnap.hooks.main

# By its content: the same wheels make the same version, and a node that has it is left alone.
(cd "$tree" && find bin lib -type f -print0 | sort -z | xargs -0 sha256sum) | sha256sum | cut -c 1-16 >"$tree/version"
