"""`gpusnap doctor`: checks whether checkpointing works on this host, or for one container.

    base/check.py        the result of a check, and running one so that its failure does not stop the others
    base/sources.py      files below a root, other programs: everything that the checks read
    base/subject.py      which container is meant, by Podman or containerd
    host_checks/         checks of the host, one family of checks a module
    host.py              all of them, in order
    container_checks/    checks of one container
    container.py         all of them, in order

A check reads and reports. It changes nothing, locks and suspends no process, and opens no file for writing,
except to measure the disk's speed, on a file without a name. Each takes the root of what it reads, so that it
can be run on a recorded tree.
"""
