"""`gpusnap doctor`: what decides whether checkpointing works on this host, or in one container.

    check.py      what a check finds, and how one is asked without a failure of its own stopping the rest
    sources.py    files below a root, other programs: all that the checks read
    kernel, criu, engines, gpus, cdi, room, site   the host, one family of checks a module
    host.py       all of them, in order
    subject.py    which container is meant, by Podman or containerd
    gpu_use, files, sockets, mounts, duration      one container
    container.py  all of them, in order

A check reads and says. It changes nothing, locks and suspends no process, and opens no file for writing, but
for the disk's speed, which is measured on a file without a name. Each takes the root of what it reads, so
that it can be shown a recorded tree.
"""
