"""What is done inside another process, by ptrace(2): the one place that traces.

arch            registers and numbers of system calls of this architecture
calls           the calls of ptrace(2)
tracee          a thread of another process in our hands, and how it is let go
signal_masks    the signal masks of held threads, in a file for whoever comes after a killed gpusnap
tracer          a thread of ours that traces some threads, and answers their stops, while others are at work
remote_syscall  system calls inside another process
populate        large mappings that are populated for the thread which makes them
neutralise      descriptors and mappings replaced in place
positions       where the threads of a process stand: within fork, malloc, stdio or the loader
"""
