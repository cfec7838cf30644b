"""Work inside another process, by ptrace(2): the only place that traces.

arch            registers and numbers of system calls of this architecture
calls           the calls of ptrace(2)
tracee          a thread of another process that gpusnap holds, and how it is released
signal_masks    the signal masks of held threads, in a file for recovery after a kill
tracer          a thread of gpusnap that traces some threads, and answers their stops, while others work
remote_syscall  system calls inside another process
populate        populates large mappings for the thread that makes them
neutralise      descriptors and mappings replaced in place
positions       where the threads of a process are: within fork, malloc, stdio or the loader
"""
