"""GPS-3… and GPS-4…: the GPU's driver, and the GPUs of a restore."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-301",
        "driver-missing",
        "This host has no GPU driver that gpusnap can use: it is not installed, its kernel module is not "
        "loaded, or the library is only the stub that comes with the CUDA toolkit.",
        "Install the driver and load its module: `modprobe nvidia`, or `modprobe amdgpu` on a kernel with "
        "CONFIG_HSA_AMD. `nvidia-smi` or `rocminfo` must list the GPUs.",
    ),
    ErrorCode(
        "GPS-302",
        "driver-too-old",
        "The driver does not have the calls that suspend and restore a process. NVIDIA's driver has them "
        "since version 570.",
        "Install NVIDIA driver 570 or later, and load its module.",
    ),
    ErrorCode(
        "GPS-303",
        "driver-mismatch",
        "The driver's kernel module and its libraries have different versions, usually after an update of "
        "the driver without a restart.",
        "Reload the kernel module, or restart the host.",
    ),
    ErrorCode(
        "GPS-304",
        "driver-not-ready",
        "The driver, or one of its services, is starting, or did not respond in time.",
        "Try again. Check that nvidia-fabricmanager and nvidia-persistenced are running if this host "
        "needs them. If the error persists, check whether `nvidia-smi` responds, and look for Xid lines "
        "in `dmesg`.",
    ),
    ErrorCode(
        "GPS-305",
        "no-gpu",
        "The driver does not list the requested GPU, or lists none. A device cgroup or MIG may hide it.",
        "`nvidia-smi -L` or `rocminfo` lists the driver's GPUs. Run gpusnap on the host itself, not in a "
        "container.",
    ),
    ErrorCode(
        "GPS-306",
        "gpu-busy",
        "Another process has exclusive use of the GPU (exclusive compute mode), or the GPU's shared "
        "resources are exhausted.",
        "`nvidia-smi` shows which process uses it. Set its compute mode to DEFAULT: `nvidia-smi -c 0`.",
    ),
    ErrorCode(
        "GPS-307",
        "gpu-out-of-memory",
        "During a restore: the GPU does not have as much free memory as the process needs. During a "
        "checkpoint: this host, or the container's limit, does not have enough RAM for the GPU memory.",
        "During a restore: stop the process that uses the GPU (`nvidia-smi` shows it), or choose another "
        "GPU with `--gpu-map`. During a checkpoint: free RAM, or raise the container's limit (`podman "
        "update --memory`). If gpusnap says that the driver cannot restore the process any more, see "
        'docs/gpus.md, "GPUs that are shared".',
    ),
    ErrorCode(
        "GPS-308",
        "hardware-fault",
        "The GPU, its memory (ECC), its link (NVLink, PCIe) or its power failed.",
        "Look for Xid lines in `dmesg`; see NVIDIA's list of Xid errors. The GPU may need a reset "
        "(`nvidia-smi --gpu-reset`) or a repair.",
    ),
    ErrorCode(
        "GPS-309",
        "permission-refused",
        "The driver or the kernel denies this to gpusnap: it is not running as root, or a container or "
        "cgroup limits its devices.",
        "Run gpusnap as root, on the host itself.",
    ),
    ErrorCode(
        "GPS-310",
        "no-gpu-state",
        "The driver has no GPU state of the process. The process has not used its GPU yet, has stopped "
        "using it, or the driver lost the state.",
        "Check with `nvidia-smi` whether the program still uses its GPU. Try again when its use has settled.",
    ),
    ErrorCode(
        "GPS-311",
        "illegal-state",
        "The process is not in the state that this step requires. Another program is suspending it at the "
        "same time, or a killed gpusnap left it suspended.",
        "Stop cuda-checkpoint and CRIU's CUDA plugin, if they are used together with gpusnap. If gpusnap "
        "was killed: `gpusnap recover`.",
    ),
    ErrorCode(
        "GPS-312",
        "lock-timeout",
        "The driver waits until the GPU work of a process stops, which took longer than the deadline. A "
        "kernel runs that long, or the ranks of a job wait for each other.",
        "Raise `nvidia.lock-timeout`, in the settings or as an annotation, or checkpoint when the program "
        "does less GPU work.",
    ),
    ErrorCode(
        "GPS-313",
        "not-supported",
        "The process uses something that the driver cannot suspend, such as managed memory "
        "(`cudaMallocManaged`), or this GPU or driver cannot do it at all. AMD's driver suspends only "
        "through CRIU's plugin.",
        "Start the program without it. NVIDIA's notes for the driver list what is not supported; see "
        "docs/gpus.md, and docs/amd.md for AMD's.",
    ),
    ErrorCode(
        "GPS-314",
        "mps",
        "The process uses its GPU through the Multi-Process Service (MPS), and the driver cannot suspend "
        "such processes.",
        "Stop MPS (`echo quit | nvidia-cuda-mps-control`), and start the program without it.",
    ),
    ErrorCode(
        "GPS-315",
        "invalid-request",
        "The driver refused an argument, for example a UUID that does not belong to one of its GPUs.",
        "Check that the process uses GPUs of this host. Write a UUID as `nvidia-smi -L` does.",
    ),
    ErrorCode(
        "GPS-316",
        "process-ended",
        "The process exited before or during the step.",
        "The program's own output and `dmesg` (out of memory, Xid) may show why it exited. Start the "
        "container again, or restore it from an earlier checkpoint.",
    ),
    ErrorCode(
        "GPS-317",
        "workload-fault",
        "The program's own GPU work had failed earlier: a bad address, an assertion, an illegal "
        "instruction. Its GPU state is lost anyway.",
        "Restart the program, or restore it from an earlier checkpoint.",
    ),
    ErrorCode(
        "GPS-318",
        "driver-failed",
        "The driver failed with an error that gpusnap does not know, or is newer than this gpusnap.",
        "Look for NVRM and Xid lines in `dmesg`. Use a gpusnap that supports the driver's version. If the "
        "error persists, report it with the name of the driver's error.",
    ),
    ErrorCode(
        "GPS-401",
        "no-gpu-fits",
        "A checkpoint is restored onto GPUs of the same model and compute capability, with enough free "
        "memory, one for each GPU of the checkpoint. Too few such GPUs are free on this host. The message "
        "gives the reason for each GPU; `gpusnap plan` shows it as a table. A swap is also refused if the "
        "driver does not report how much memory of a GPU the first container uses (MIG, some virtual GPUs) "
        "and others use it too: the first one would be interrupted, maybe for nothing.",
        "Free a GPU, or restore on a host that has such GPUs. In MIG mode: turn it off (`nvidia-smi -mig "
        "0`), because the driver cannot checkpoint MIG instances. In an exclusive compute mode: set it to "
        "DEFAULT (`nvidia-smi -c 0`). Reserved by another restore or checkpoint: wait for it, or name "
        "another GPU with `--gpu-map`. Not among the GPUs of the new container: give it as many as the "
        "checkpoint has. A swap of unknown sizes: `gpusnap suspend` the first, then `gpusnap resume` the "
        "second. See docs/gpus.md.",
    ),
    ErrorCode(
        "GPS-402",
        "older-driver",
        "The checkpoint was made with a newer driver than this host's. A driver can only restore what the "
        "same or an older version has written.",
        "Update the driver here, or restore on a host that has that driver or a newer one.",
    ),
    ErrorCode(
        "GPS-403",
        "gpu-map",
        "The GPU map (`--gpu-map`, or the setting or annotation `gpu-map`) names a GPU that does not "
        "exist, names one twice, or asks for one that does not fit.",
        "Correct the map: OLD=NEW, with numbers as nvidia-smi shows them or UUIDs, on the left a GPU of the "
        "checkpoint, on the right one of this host. `gpusnap plan --gpu-map MAP` checks it.",
    ),
    ErrorCode(
        "GPS-405",
        "other-driver-files",
        "The container had files of the GPU's driver mounted, or its processes execute code from them. "
        "This host has another version of the driver, and a process cannot change code that it is "
        "executing.",
        "Restore on a host with the same version of the driver, or install it here. See "
        "docs/gpus.md#another-driver.",
    ),
    ErrorCode(
        "GPS-406",
        "same-gpus-needed",
        "CRIU's plugin restores a process only onto its original GPU, and a checkpoint without a list of "
        "its container's device nodes cannot move to other GPUs either.",
        "Restore it on its original GPUs. A checkpoint made with `nvidia.driver = native` can move.",
    ),
    ErrorCode(
        "GPS-409",
        "cdi",
        "A CDI file in /etc/cdi or /var/run/cdi does not follow the specification. It is ignored, with a "
        "note; a restore that needs the file is refused.",
        "Correct the file, or regenerate it: `nvidia-ctk cdi generate`. `gpusnap doctor` checks all of them.",
    ),
    ErrorCode(
        "GPS-410",
        "nvidia-hook",
        "After a restore with another driver, gpusnap runs NVIDIA's CDI hooks again (links, the cache of "
        "ldconfig). One was not run, or failed. The container is running; programs that are started in it "
        "from now on may not find the driver's libraries.",
        "Run `ldconfig` in the container, or restart it. The reason is at the end of the note. See "
        "docs/gpus.md#another-driver.",
    ),
)
