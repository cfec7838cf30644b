#!/bin/sh
# Bring gpusnap to the node whose root is mounted at /host, or take it away again.
#
#   node.sh install [OPTION of `gpusnap install`]...
#   node.sh uninstall
#
# Environment: HOST, where the node's root is [/host]; UNIT, the systemd unit that is restarted once the handler is
# in an engine's configuration, or out of it [containerd or crio, by the configuration]; empty for none. Containers
# go on while an engine restarts.
#
# On the node: /opt/gpusnap, a link to the folder of one version beside it, and what `gpusnap install` says.
# Whatever fails leaves the node as it was, or with what the next run completes.
set -eu

host=${HOST:-/host} image=${IMAGE:-/opt/gpusnap}
# What each engine's configuration had of ours when it was restarted last.
restarted=$host/opt/gpusnap.restarted

say() {
    echo "node.sh: $*" >&2
}

die() {
    say "$@"
    exit 1
}

on_node() {
    chroot "$host" /usr/bin/env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
}

# The files of an engine that have a handler of ours.
configured() {
    { grep -rls gpusnap-runtime "$host/etc/$1" || true; } | sort | xargs -r cat
}

restart() {
    for engine in containerd crio; do
        [ "$(configured $engine)" != "$(cat "$restarted.$engine" 2>/dev/null)" ] || continue
        unit=${UNIT-$engine}
        if [ -n "$unit" ]; then
            say "restarting $unit"
            # systemctl does nothing in what it takes for a chroot; here that is the node's own root.
            on_node SYSTEMD_IGNORE_CHROOT=1 systemctl restart "$unit"
        fi
        configured $engine >"$restarted.$engine"
    done
}

# Whether /opt/gpusnap is a link to a version.
is_link() {
    case $(readlink "$host/opt/gpusnap") in gpusnap-*) ;; *) return 1 ;; esac
}

# Whether a folder, whose name may still end in .new, is one that a node.sh has copied here.
is_ours() {
    [ -d "$1" ] && [ ! -L "$1" ] && [ -f "$1/version" ] || return 1
    name=${1##*/}
    [ "${name%.new}" = "gpusnap-$(cat "$1/version")" ]
}

# Remove our versions but for those named.
clear_versions() {
    for old in "$host"/opt/gpusnap-*; do
        is_ours "$old" || continue
        case " $* " in *" ${old##*/} "*) ;; *) rm -rf "$old" ;; esac
    done
}

check() {
    on_node /usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        die "this node has no /usr/bin/python3 of version 3.11 or later; install its distribution's"
    python=$(on_node /usr/bin/python3 -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    [ -d "$image/lib/$python" ] || die "this image has nothing for the node's $python; see PYTHONS in tree.sh"
    on_node sh -c '[ -s "$(command -v criu)" ]' ||
        die "this node has no criu, without which no container is checkpointed; install its distribution's"
    on_node /usr/bin/python3 -c 'import importlib.util as u, sys; sys.exit(u.find_spec("pycriu") is None)' ||
        die "this node has no pycriu, without which no container is restored; install its distribution's" \
            "python3-pycriu (Fedora: python3-criu)"
}

copy() {
    target=$host/opt/$current
    if [ ! -e "$target" ]; then
        rm -rf "$target.new"
        mkdir -p "$target.new"
        # First: by this it is known to be ours.
        cp "$image/version" "$target.new"
        cp -R "$image/." "$target.new"
        chmod -R u=rwX,go=rX "$target.new"
        # After a loss of power, what has its name is complete: another run would not copy it again.
        sync -f "$target.new"
        mv "$target.new" "$target"
    fi
    rm -f "$host/opt/gpusnap.new"
    ln -s "$current" "$host/opt/gpusnap.new"
    mv -T "$host/opt/gpusnap.new" "$host/opt/gpusnap"
}

install() {
    check
    is_link || { [ ! -L "$host/opt/gpusnap" ] && [ ! -e "$host/opt/gpusnap" ]; } ||
        die "this node has an /opt/gpusnap that is not of node.sh; move it away"
    current=gpusnap-$(cat "$image/version")
    before=$(readlink "$host/opt/gpusnap" || true)
    copy
    on_node /opt/gpusnap/bin/gpusnap install "$@"
    [ -n "$(configured containerd)$(configured crio)" ] ||
        die "the engine's configuration is the node's own and has no handler for gpusnap-runtime; add it as the note says"
    restart
    # What ran until now may be at work still, and after an attempt that failed it is not known which that was.
    [ "$before" = "$current" ] || clear_versions "$current" "$before"
    on_node /opt/gpusnap/bin/gpusnap doctor || say "the doctor found something; the lines above say what to do"
    say "done"
}

uninstall() {
    is_link || {
        say "there is nothing to take away"
        return 0
    }
    # Without it, an uninstall that was interrupted here has come so far.
    if [ -e "$host/opt/gpusnap/bin/gpusnap" ]; then
        on_node /opt/gpusnap/bin/gpusnap uninstall
        restart
    fi
    clear_versions
    # The link is the last: as long as it is there, the next run goes on.
    rm -f "$restarted.containerd" "$restarted.crio" "$host/opt/gpusnap.new" "$host/opt/gpusnap"
    say "done; checkpoints that are in a store or in kubelet's folder are still there"
}

case ${1:-} in
install)
    shift
    install "$@"
    ;;
uninstall) uninstall ;;
*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
