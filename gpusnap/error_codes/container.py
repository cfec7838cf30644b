"""GPS-2…: what keeps a container from being checkpointed. Nothing has been changed when these are said."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-201",
        "not-running",
        "Only a running container can be checkpointed. This one was never started, has exited, or was "
        "stopped by a checkpoint.",
        "Start it: `podman start NAME`, `ctr task start`. If a checkpoint stopped it, continue it with "
        "`gpusnap restore NAME` or `podman container restore NAME`; `podman start` would start it from the "
        "beginning, without its memory.",
    ),
    ErrorCode(
        "GPS-202",
        "other-runtime",
        "The container was created with crun or runc, which do not support GPUs. Its GPU memory would not "
        "be in the checkpoint.",
        "Remove the container, and run it again with `podman --runtime gpusnap-runtime run` and the same "
        "options. A container keeps the runtime that it was created with. `gpusnap install --default` "
        "sets it in containers.conf for all new containers. A container without a GPU does not need this: "
        "use `podman container checkpoint`.",
    ),
    ErrorCode(
        "GPS-203",
        "paused",
        "The container is paused, so its processes cannot respond to the GPU's driver. Podman does not "
        "checkpoint paused containers; for other engines, gpusnap thaws a version 2 cgroup that belongs "
        "to the container alone.",
        "Resume it first: `podman unpause NAME`, `ctr task resume ID`. containerd itself pauses "
        "containers for a checkpoint: give the container its own cgroup.",
    ),
    ErrorCode(
        "GPS-204",
        "depends-on-container",
        "The container uses a namespace of another container (`--network container:NAME`, `--pid "
        "container:NAME`) or requires it to run (`--requires`). Podman would stop it, and then refuse to "
        "export its checkpoint.",
        "Run both in a pod: `podman pod create`, then `podman run --pod POD`. Podman exports the checkpoint "
        "of a container in a pod, and restores it into a pod.",
    ),
    ErrorCode(
        "GPS-205",
        "podman-option",
        "The container was created with an option that Podman cannot restore: a secret that is a file, an "
        "overlay or image mount. The checkpoint would succeed, but its restore would fail, because CRIU "
        "does not find the mount.",
        "Create the container without it, as the message says. `--force` makes the checkpoint anyway, for "
        "a Podman that can restore it.",
    ),
    ErrorCode(
        "GPS-206",
        "suspended",
        "Either the container is suspended (`gpusnap suspend`), so its processes have no GPU memory; or "
        "it is not suspended, but only a suspended container can be resumed; or it cannot be suspended, "
        "because none of its processes uses a GPU, its driver suspends only within a checkpoint, or "
        "systemd would end it meanwhile (`WatchdogSec=`).",
        "`gpusnap ps` lists suspended containers. Resume one with `gpusnap resume NAME` instead of "
        "`podman unpause` or `ctr task resume`. A checkpoint leaves a suspended container suspended: "
        "`gpusnap checkpoint NAME`.",
    ),
    ErrorCode(
        "GPS-207",
        "process-stopped",
        "A GPU process is stopped, and a stopped process cannot respond to the GPU's driver. It was sent "
        "SIGSTOP, is being debugged, its container is paused or suspended, or an earlier gpusnap was killed.",
        "If its container is suspended: `gpusnap resume NAME`. If gpusnap was killed: `gpusnap recover`. "
        "Otherwise `kill -CONT PID`, unpause the container, or quit the debugger.",
    ),
    ErrorCode(
        "GPS-208",
        "io-uring",
        "A process uses io_uring, which CRIU cannot dump. Some libraries use it by default: libuv does, "
        "and therefore PyTorch's rendezvous (torchrun) and Node.js.",
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
        "A process has an open TCP connection, and CRIU must be told what to do with it.",
        "Give `--tcp-established` to keep it: the restored container needs the same IP address. Or set "
        "`criu.tcp-close`: a restore closes the connection, and the program has to connect again.",
    ),
    ErrorCode(
        "GPS-211",
        "shared-pid-namespace",
        "Several containers share one PID namespace (`--pid container:…`, a pod with "
        "`shareProcessNamespace`), and a process of one has become a child of the other, or would be "
        "killed with it. CRIU dumps exactly the descendants of a container's first process.",
        "Run each container with its own PID namespace, or all of them in a pod. If the message says that "
        "a process of another container would be killed, checkpoint with `--leave-running`, or stop the "
        "other container first.",
    ),
    ErrorCode(
        "GPS-212",
        "not-a-descendant",
        "`podman exec` or `ctr task exec` started a process in the container. It is not a descendant of "
        "the container's first process, so CRIU does not dump it. If it uses a GPU, the checkpoint is "
        "refused; otherwise the message is a note, and the process is not in the checkpoint.",
        "Start everything that must be in the checkpoint from the container's own command. Stop processes "
        "that were started by exec.",
    ),
    ErrorCode(
        "GPS-213",
        "gpu-file-without-state",
        "A process has a GPU driver file open, but no GPU state of its own. Either it opened the file "
        "itself, to monitor the GPU or to draw on it, or it inherited the file from a GPU process. CRIU "
        "cannot dump the file. gpusnap replaces inherited ones with /dev/null if it can; the message is "
        "then a note and requires no action, because CUDA does not work in such a process anyway.",
        "Stop monitoring programs during the checkpoint. Start workers with spawn or forkserver instead "
        'of fork (`multiprocessing_context="spawn"` for a DataLoader). With CRIU\'s plugin: set '
        '`nvidia.driver = "native"`.',
    ),
    ErrorCode(
        "GPS-214",
        "nccl",
        "The ranks of a job share GPU memory through NCCL. The driver would hang, or would suspend the "
        "processes but fail to restore them.",
        "Start the job with the variables in the message; `NCCL_P2P_DISABLE=1`, `NCCL_CUMEM_ENABLE=0` and "
        "`NCCL_NVLS_ENABLE=0` are sufficient in most cases. They must be in the environment before NCCL "
        "starts. If you are sure that nothing is shared: `gpusnap checkpoint --force`, or "
        "`nvidia.allow-nccl`. See docs/settings.md#nccl.",
    ),
    ErrorCode(
        "GPS-215",
        "cuda-ipc",
        "A process has GPU memory of another process open through CUDA IPC, as torch.multiprocessing does "
        "with CUDA tensors. Drivers before 610 suspend such processes and cannot restore them.",
        "Share through host memory instead (`tensor.cpu()` before it is sent), or use NVIDIA driver 610 "
        "or later. To checkpoint anyway: `gpusnap checkpoint --force`, or `nvidia.allow-nccl`.",
    ),
    ErrorCode(
        "GPS-216",
        "not-enough-memory",
        "While a process is suspended, its GPU memory is in RAM, and there is not enough RAM. The message "
        "says which limit applies: that of this host, of the container, of the cgroup in which gpusnap "
        "itself runs (the session or unit of Podman or containerd), or `suspend.ram`. It is also given if "
        "files in RAM would not last, or could be swapped.",
        "This host: free some memory, or checkpoint fewer containers at once. The container: raise its "
        "limit (`podman update --memory`). gpusnap's own cgroup: raise the limit of that session or unit. "
        "If the GPU memory only passes through RAM, a lower `memory.ceiling` is enough.",
    ),
    ErrorCode(
        "GPS-217",
        "device-access",
        "The container may no longer open the device nodes of its GPUs. Its processes can still use those "
        "that they have open, but the GPU's driver must open them again to restore GPU state. `podman "
        "update` removes the access (crun rewrites the device rules of the container's cgroup without "
        "those of --device), and so can `systemctl daemon-reload`. gpusnap has the runtime write the "
        "rules again, and reports it; it is an error only if that does not help.",
        "For a running container: restart it (`podman restart`) at a convenient time to restore the "
        "access. For a suspended one: `gpusnap checkpoint` makes a checkpoint of it from RAM, for a new "
        "container. To prevent it after daemon-reload: `nvidia-ctk system create-dev-char-symlinks "
        "--create-all`, see the documentation of NVIDIA's container toolkit.",
    ),
    ErrorCode(
        "GPS-218",
        "not-left-stopped",
        "`gpusnap checkpoint` keeps a container with --rm frozen after its dump, and removes it only when "
        "its checkpoint is stored. That is not possible for this container, as the message says. So the dump "
        "ends it, as with Podman alone.",
        "Nothing, if Podman is not killed between the dump and the end of `gpusnap checkpoint`: it would "
        "remove the container together with its checkpoint.",
    ),
    ErrorCode(
        "GPS-219",
        "shared-gpus",
        "Another process uses a GPU of a job of several ranks (NCCL), and the job is to run on after its "
        "checkpoint. NVIDIA's driver does not interrupt the kernels of a process that it has restored. A "
        "kernel that waits for another rank for more than 4 s would keep the other process from the GPU, "
        "and the driver would then end the rank (Xid 109).",
        "Stop the other process, or make the checkpoint without `--leave-running` and restore the job on "
        "GPUs of its own. If no rank ever waits so long: `gpusnap checkpoint --force`, or "
        "`nvidia.allow-nccl`. See docs/gpus.md#gpus-that-are-shared.",
    ),
    ErrorCode(
        "GPS-220",
        "removed-by-service",
        "Podman removes a container with --rm as soon as it has ended, with its checkpoint. Podman's API "
        "service, which works for `podman --remote` and for other programs, exports the checkpoint to a "
        "temporary file and removes that when it has sent it, or failed to. If the connection broke, the "
        "disk was full or the service ended, the container would be lost.",
        "`gpusnap checkpoint` on the container's host: it removes the container only when its checkpoint is "
        "stored. Or leave it running (`--leave-running`, in the API `leaveRunning=true`), and remove it when "
        "you have the archive: what it does in between is not in the checkpoint. See "
        "docs/podman.md#through-podmans-api-service.",
    ),
    ErrorCode(
        "GPS-224",
        "started-anew-by-systemd",
        "A unit of systemd runs the container, and has `Restart=always` or `Restart=on-failure`. When a "
        "checkpoint ends the container, systemd takes that for a failure, and starts it anew, from the "
        "beginning. A restore is refused while that one runs, which may also write to the same volumes.",
        "Add `RestartPreventExitStatus=137` to the unit, in `[Service]`: 137 is the end by SIGKILL, "
        "also if the kernel kills the container for lack of memory. Or run `gpusnap checkpoint "
        "--leave-running NAME`, then `systemctl stop UNIT`. Stop the unit before a restore.",
    ),
    ErrorCode(
        "GPS-225",
        "does-not-stop",
        "A thread of the container cannot be stopped in time, or the kernel does not report in time what "
        "a process has in memory or open. The thread is blocked in the kernel, usually on a disk, a "
        "network file system or a file system in user space (FUSE).",
        "Try again later. `/proc/PID/stack` shows what it waits for, `dmesg` may show why. If the server "
        "of a file system in user space has stopped, kill it or unmount the file system. If the message "
        "says so, run `gpusnap recover` afterwards.",
    ),
    ErrorCode(
        "GPS-226",
        "traced",
        "gpusnap and CRIU stop and read processes with ptrace, which was refused for a process of the "
        "container: a debugger (gdb, strace) traces it, or gpusnap is not permitted to use ptrace.",
        "Quit the debugger. Run gpusnap as root; SELinux, AppArmor, Yama or seccomp may have to permit "
        "ptrace.",
    ),
    ErrorCode(
        "GPS-227",
        "vfork",
        "A process waits in vfork for a child that is about to execute a program. CRIU cannot stop it "
        "during that time. It takes milliseconds, unless the child is stopped or blocked.",
        "Try again. If the message says that the child is stopped, let it continue (`kill -CONT PID`), or "
        "kill it.",
    ),
    ErrorCode(
        "GPS-229",
        "code-changes",
        "gpusnap makes a few system calls inside a stopped process, to move its GPU memory. This process "
        "entered another system call instead: its program modifies its own code, or it is under attack. "
        "The call was not made.",
        "Do not trust the program. Ordinary programs do not do that.",
    ),
    ErrorCode(
        "GPS-240",
        "command-in-container",
        "A command that the container specifies with `io.gpusnap.pre-checkpoint`, `post-restore`, "
        "`pre-suspend` or `post-resume` failed, or did not finish in time. Before a checkpoint: nothing "
        "was checkpointed, and the command for afterwards was run to undo it. After a restore: the "
        "container is running.",
        "The end of the message is the command's output. Run it manually with `podman exec`. The "
        "annotation `io.gpusnap.hook-timeout` sets its time limit; see docs/engines.md.",
    ),
    ErrorCode(
        "GPS-231",
        "container-unreadable",
        "The runtime's state of the container, or its bundle's config.json, does not follow the OCI "
        "specification. The bundle is damaged, or another program is installed in place of crun or runc.",
        "Run `crun state ID` or `runc state ID` manually. If config.json is damaged, create the container "
        "again.",
    ),
)
