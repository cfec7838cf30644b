"""`gpusnap doctor`: checks whether checkpointing works on this host, or for one container.

    check.py      the result of a check, and running one so that its own failure does not stop the others
    sources.py    files below a root, other programs: everything that the checks read
    kernel, criu, engines, gpus, cdi, room, site   the host, one family of checks a module
    host.py       all of them, in order
    subject.py    which container is meant, by Podman or containerd
    gpu_use, files, sockets, mounts, duration      one container
    container.py  all of them, in order

A check reads and reports. It changes nothing, locks and suspends no process, and opens no file for writing,
except to measure the disk's speed, on a file without a name. Each takes the root of what it reads, so that it
can be run on a recorded tree.
"""
