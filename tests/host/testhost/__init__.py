"""The test host: a tree of Debian 13 or of sid, built once, and a throw-away machine of namespaces around it.

    report      messages and the one exception that reaches the user
    kernel      system calls that Python 3.11's standard library lacks
    recipe      what goes into the tree of each suite, and the digest that names it
    cache       where trees live, and the locks that guard them
    packages    what this machine must have installed, and where it gets packages from
    build       makes a tree
    cgroups     the control groups of one run
    runs        a record of each run, so that a killed one is cleared by the next
    namespaces  one command as the child of an init in namespaces of its own
    rootfs      the root that this command sees
    enter       all of that, in order
    cli         the command line

Standard library only: this runs before anything else is installed.
"""
