"""What is done inside another process, by ptrace(2).

arch            registers and numbers of system calls of this architecture
calls           the calls of ptrace(2)
tracee          a thread of another process in our hands, and how it is let go
tracer          the thread of ours that traces, and answers stops
remote_syscall  system calls inside another process
populate        large mappings that are populated for the thread which makes them
neutralise      descriptors and mappings replaced in place
positions       where the threads of a process stand: within fork, malloc, stdio or the loader
"""
