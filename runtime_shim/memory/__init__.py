"""GPU memory outside CRIU: where it lies in a process, how it is copied and freed there.

machine    registers and numbers of system calls of this architecture
ptrace     the calls of ptrace(2)
tracee     a thread of another process in our hands, and how it is let go
remote     system calls inside another process
regions    the mappings of a process, and which of them are new
copies     many-threaded copies between a process and us
stage      regions in files that a process can have mapped
populate   large mappings that are populated for the thread which makes them
handles    descriptors and mappings replaced in place
"""

from __future__ import annotations

__all__: list[str] = []
