"""GPS-2…: what keeps a container from being checkpointed. Nothing has been changed when these are said."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-201",
        "not-running",
        "Only a running container can be checkpointed. This one was never started, has ended, or was ended "
        "by a checkpoint.",
        "Start it: `podman start NAME`, `ctr task start`. A container that a checkpoint ended is restored "
        "by `podman container restore NAME`; `podman start` would begin it anew, without its memory.",
    ),
    ErrorCode(
        "GPS-202",
        "other-runtime",
        "The container was created with crun or runc, which do not know GPUs. Its GPU memory would not be "
        "in the checkpoint.",
        "Remove the container, and run it anew by `podman --runtime gpusnap-runtime run` with the options "
        "that it had. A container keeps the runtime that it was created with. `gpusnap install --default` "
        "writes it to containers.conf, so that each new one has it. A container without a GPU needs none of "
        "this: `podman container checkpoint` checkpoints it.",
    ),
    ErrorCode(
        "GPS-203",
        "paused",
        "The container is paused, so its processes cannot answer the GPU's driver. Podman checkpoints no "
        "paused container; for others, gpusnap thaws a cgroup (version 2) that belongs to the container "
        "alone.",
        "Resume it first: `podman unpause NAME`, `ctr task resume ID`. containerd pauses containers by "
        "itself: give the container a cgroup of its own.",
    ),
    ErrorCode(
        "GPS-204",
        "depends-on-container",
        "The container uses a namespace of another one (`--network container:NAME`, `--pid container:NAME`) "
        "or needs it to run (`--requires`). Podman would end it, and then refuse to export its checkpoint.",
        "Run both in a pod: `podman pod create`, then `podman run --pod POD`. Podman exports the checkpoint "
        "of a container in a pod, and restores it into a pod.",
    ),
    ErrorCode(
        "GPS-205",
        "podman-option",
        "The container was created with an option that Podman does not restore: a secret that is a file, an "
        "overlay or image mount. The checkpoint could be made, and its restore would fail, as CRIU does not "
        "find the mount.",
        "Create the container without it, as the message says. `--force` makes the checkpoint all the same, "
        "for a Podman that can restore it.",
    ),
    ErrorCode(
        "GPS-206",
        "suspended",
        "The container is suspended (`gpusnap suspend`), so that its processes have no GPU memory, or it is "
        "not, and only a suspended container can be resumed. Or it cannot be suspended: no process of it "
        "uses a GPU, or its driver suspends only within a checkpoint.",
        "`gpusnap ps` shows which containers are suspended. Resume one with `gpusnap resume NAME` instead of "
        "`podman unpause` or `ctr task resume`. A checkpoint leaves a suspended container suspended: "
        "`gpusnap checkpoint NAME`.",
    ),
    ErrorCode(
        "GPS-207",
        "process-stopped",
        "A GPU process is stopped, and a stopped process cannot answer the GPU's driver. It was sent "
        "SIGSTOP, a debugger holds it, its container is paused, or an earlier gpusnap was killed.",
        "Let it continue: `kill -CONT PID`, or end the debugger. After a killed gpusnap: `gpusnap recover`, "
        "or `gpusnap resume PID`.",
    ),
    ErrorCode(
        "GPS-208",
        "io-uring",
        "A process uses io_uring, and CRIU cannot dump it. Libraries use it without being asked: libuv "
        "does, and so PyTorch's rendezvous (torchrun) and Node.js.",
        "Start the program without it: `USE_LIBUV=0` for PyTorch's rendezvous, `UV_USE_IO_URING=0` for "
        "libuv.",
    ),
    ErrorCode(
        "GPS-209",
        "socket-protocol",
        "A process has a socket of a protocol that this CRIU cannot dump on this kernel. On Linux "
        "6.16 and later, CRIU before 4.2 dumps only Unix and netlink sockets. No CRIU dumps MPTCP, which "
        "Go's servers use by default.",
        "Install CRIU 4.2 or later: Debian sid has it, and <https://criu.org/Packages> lists other packages. "
        "For MPTCP, start the program without it: `GODEBUG=multipathtcp=0` for Go.",
    ),
    ErrorCode(
        "GPS-210",
        "tcp-connection",
        "A process has an open TCP connection, and CRIU has to be told what to do with it.",
        "Give `--tcp-established` to keep it: the restored container needs the same IP address. Or set "
        "`criu.tcp-close`: a restore closes the connection, and the program has to connect again.",
    ),
    ErrorCode(
        "GPS-211",
        "shared-pid-namespace",
        "Several containers share one PID namespace (`--pid container:…`, a pod with "
        "`shareProcessNamespace`), and a process of one has become a child of the other, or would be killed "
        "with it. CRIU dumps the descendants of a container's first process, no more and no fewer.",
        "Run the containers with a PID namespace each, or all in a pod. If the message says that a process "
        "of another container would be killed, checkpoint with `--leave-running`, or end the other one "
        "first.",
    ),
    ErrorCode(
        "GPS-212",
        "not-a-descendant",
        "`podman exec` or `ctr task exec` started a process in the container. It is not a descendant of the "
        "container's first process, so CRIU does not dump it. If it uses a GPU, the checkpoint is refused; "
        "otherwise it is a note, and the process is not in the checkpoint.",
        "Start what has to be in the checkpoint from the container's own command. End what was started by "
        "exec.",
    ),
    ErrorCode(
        "GPS-213",
        "gpu-file-without-state",
        "A process has a file of the GPU's driver open, and no GPU state of its own. Either it opened the "
        "file by itself, to watch the GPU or to draw on it, or it inherited the file from a GPU process. "
        "CRIU cannot dump the file. gpusnap replaces inherited ones by /dev/null if it can: then it is a "
        "note, and nothing has to be done, because CUDA does not work in such a process in any case.",
        "End a monitor for the time of the checkpoint. Start workers with spawn or forkserver instead of "
        'fork (`multiprocessing_context="spawn"` for a DataLoader). With CRIU\'s plugin: set `nvidia.driver '
        '= "native"`.',
    ),
    ErrorCode(
        "GPS-214",
        "nccl",
        "The ranks of a job share GPU memory through NCCL. The driver would hang, or it would suspend the "
        "processes and then be unable to restore them.",
        "Start the job with the variables that the message names; `NCCL_P2P_DISABLE=1`, "
        "`NCCL_CUMEM_ENABLE=0` and `NCCL_NVLS_ENABLE=0` are enough in most cases. They have to be in the "
        "environment before NCCL starts. If you know that nothing is shared: `gpusnap checkpoint --force`, "
        "or `nvidia.allow-nccl`. See docs/settings.md#nccl.",
    ),
    ErrorCode(
        "GPS-215",
        "cuda-ipc",
        "A process has GPU memory of another process open through CUDA IPC, as torch.multiprocessing does "
        "with CUDA tensors. Drivers before 610 suspend such processes and cannot restore them.",
        "Share through host memory instead (`tensor.cpu()` before it is sent), or use NVIDIA driver 610 or "
        "later. If you know better: `gpusnap checkpoint --force`, or `nvidia.allow-nccl`.",
    ),
    ErrorCode(
        "GPS-216",
        "not-enough-memory",
        "While a process is suspended its GPU memory is in RAM, and there is not enough of it. The message "
        "says which limit is meant: that of this host, that of the container, or that of the cgroup that "
        "gpusnap itself runs in (the session or unit of Podman or containerd).",
        "This host: free some memory, or checkpoint fewer containers at a time. The container: raise its "
        "limit (`podman update --memory`). gpusnap's own cgroup: raise the limit of that session or unit. "
        "Where the GPU memory only passes through RAM, a lower `memory.ceiling` is enough.",
    ),
    ErrorCode(
        "GPS-217",
        "device-access",
        "The container may not open the device nodes of its GPUs any more. Its processes go on with those "
        "that they have open, but the GPU's driver has to open them again when it restores GPU state. "
        "`podman update` takes them away (crun writes the rules of the container's cgroup anew, without what "
        "--device gave), and so can `systemctl daemon-reload`. gpusnap has the runtime write the rules once "
        "more, and says so; an error is where that does not help.",
        "For a container that runs: start it again (`podman restart`) at a moment that suits it, and it has "
        "its device nodes. For one that is suspended: `gpusnap checkpoint` makes a checkpoint of it from RAM "
        "for a new container. Against daemon-reload: `nvidia-ctk system "
        "create-dev-char-symlinks --create-all`, as NVIDIA's documentation of its container toolkit says.",
    ),
    ErrorCode(
        "GPS-225",
        "does-not-stop",
        "A thread of the container cannot be stopped in time, or the kernel does not say in time what a "
        "process of it has in memory or open. It waits in the kernel, most often for a disk, a network file "
        "system or a file system in user space (FUSE).",
        "Try again later. `/proc/PID/stack` says what it waits for, `dmesg` why that may not answer. If the "
        "server of a file system in user space has stopped, end it or unmount that. If the message says so, "
        "run `gpusnap recover` afterwards.",
    ),
    ErrorCode(
        "GPS-226",
        "traced",
        "gpusnap and CRIU stop and read processes by ptrace, and that was refused for a process of the "
        "container: a debugger (gdb, strace) traces it, or gpusnap may not use ptrace.",
        "End the debugger. Run gpusnap as root; SELinux, AppArmor, Yama or seccomp around gpusnap may have "
        "to allow ptrace.",
    ),
    ErrorCode(
        "GPS-227",
        "vfork",
        "A process waits in vfork for a child that is about to start a program. CRIU cannot stop it "
        "meanwhile. That takes milliseconds, unless the child is stopped or waits for something.",
        "Try again. If the message says that the child is stopped, let it continue (`kill -CONT PID`), or "
        "end it.",
    ),
    ErrorCode(
        "GPS-229",
        "code-changes",
        "gpusnap makes a few system calls inside a stopped process, to move its GPU memory. This process "
        "entered another system call instead: its program changes its own code while it is worked on, or an "
        "attacker does. The call was not made.",
        "Do not trust the program. An ordinary program does not do that.",
    ),
    ErrorCode(
        "GPS-240",
        "command-in-container",
        "A command that the container names with `io.gpusnap.pre-checkpoint`, `post-restore`, `pre-suspend` "
        "or `post-resume` failed, or did not end in time. Before a checkpoint, nothing was checkpointed, and "
        "the command after it was run to undo it. After a restore, the container runs.",
        "The end of the message is what the command said. Run it by hand with `podman exec`. The annotation "
        "`io.gpusnap.hook-timeout` sets how long it may take; see docs/engines.md.",
    ),
    ErrorCode(
        "GPS-231",
        "container-unreadable",
        "The runtime's answer on the container, or its bundle's config.json, is not what the OCI "
        "specification says. The bundle is damaged, or another program stands in the place of crun or runc.",
        "Run `crun state ID` or `runc state ID` by hand. If config.json is damaged, create the container "
        "again.",
    ),
)
