# Sourced: `listing >FILE` prints what an installation may leave, with modes, sizes and targets.
#
# Left out is what others leave: apt's and dpkg's records, caches, what Podman and pip keep.
listing() {
    find /etc /opt /root /usr /var -xdev \
        \( -path /var/cache -o -path /var/log -o -path /var/lib/apt -o -path /var/lib/dpkg -o -path /var/tmp \
           -o -path /var/lib/containers -o -path /root/.cache -o -path /root/.local/state -o -name __pycache__ \) \
        -prune -o -printf '%p %M %l\n' | LC_ALL=C sort
}

# Fails with what differs.
same() {
    diff "$1" "$2" && return
    echo "FAILED: the host is not as it was" >&2
    exit 1
}
