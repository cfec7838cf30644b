"""What docs/errors.md says of kinds of errors, of the kernel's reasons, and at its beginning."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["COPY", "INTRODUCTION", "KINDS", "NAMES", "REASONS", "SENTENCES"]

INTRODUCTION = """
Every failure is one sentence on stderr, and in the log that Podman or containerd asked for. It begins with
`gpusnap:`, says what happened to what, and most say after a semicolon what to do. Here are all of them, by
where they come from, each with what to do. Search this page for some words of yours: what stands in angle
brackets here is filled in there. [troubleshooting.md](troubleshooting.md) has those that people meet most,
and what CRIU says.

Unless its row says otherwise, a checkpoint that failed has left the container running as it was, and a
restore that failed has left no container and an unharmed checkpoint. The exit code behind a kind is that of
`gpusnap`; `gpusnap-runtime` ends with 1, or with what crun or runc ended with.
"""

COPY = "it is damaged, or not gpusnap's: `gpusnap verify` finds what is wrong; take another copy"
# For all errors of a kind that have nothing of their own.
KINDS: Mapping[str, str] = {
    "UsageError": "correct the command line; `--help` shows what there is",
    "SettingsError": (
        "put the key right in /etc/gpusnap/gpusnap.toml, or in the annotation that the sentence names; "
        "[settings.md](settings.md) says what each key takes, and `gpusnap settings` checks the file"
    ),
    "ManifestError": COPY,
    "BlobError": COPY,
    "ChunkError": COPY,
    "LayoutError": COPY,
    "NotACheckpoint": (
        "it is something else, and nothing says that it is damaged: name a checkpoint; `gpusnap ls` shows "
        "which ones a store has"
    ),
    "EngineImage": (
        "Podman's: `gpusnap restore` restores it, and so does `podman container restore IMAGE` once `podman "
        "pull` has brought it. Kubernetes': name it as the image of a container in a new pod"
    ),
    "ArchiveError": COPY,
    "DigestError": ("a digest is sha256: and 64 hexadecimal digits; where you did not type it, " + COPY),
    "CdiError": (
        "the file is passed over, or refused where the restore needs it: put it right, or write it anew "
        "(`nvidia-ctk cdi generate`)"
    ),
    "HookError": (
        "no container fails of it: it goes without what the hook does; put right what the sentence names"
    ),
    "Interrupted": "a signal came, or Ctrl-C; run the command again",
    "Cancelled": "a signal came, or another part of the work failed; run the command again",
    "HeaderFault": ("it is the end of a sentence on an archive: " + COPY),
    "Broken": (
        "it is the reason at the end of a sentence on a registry, after all attempts: run the same command "
        "again, which goes on from where it was"
    ),
    "_Unfit": (
        "it is the reason at the end of a note: the hook is left out, and a program that the container "
        "starts anew may not find the driver's libraries; see [gpus.md](gpus.md#another-driver)"
    ),
    "_Unkept": (
        "it is the reason at the end of a note: the checkpoint is whole, and the next one writes everything; "
        "see [settings.md](settings.md#the-next-checkpoint-of-a-container)"
    ),
}

# What is no class of errors, and what its sentences are.
NAMES: Mapping[str, str] = {
    "_Impossible": (
        "There is no plan, and the restore is refused before anything is touched (exit code 1). Lines with "
        "the reason for each GPU may follow; `gpusnap plan` shows all as a table."
    ),
    "_Misfit": "Why one GPU of this host does not fit, in such a refusal and in `gpusnap plan`.",
    "Sharing": (
        "The second half of `process … (…) …`, by which a checkpoint is refused (exit code 1): the driver "
        "would suspend such processes and could not bring them back. `gpusnap checkpoint --force` and "
        "`nvidia.allow-nccl` override it; see [NCCL](settings.md#nccl)."
    ),
    "_Unfit": "Why one of NVIDIA's hooks was not run again after a restore.",
    "_Unkept": "Why no chunks were kept for the next checkpoint.",
    "HeaderFault": "What is wrong with an entry of an archive, as the end of a sentence.",
    "Broken": "Why an attempt to reach a registry broke, as the end of a sentence.",
    "note": "On stderr, and no error: what was asked for is done.",
}

# Where a class's own docstring is for programmers.
SENTENCES: Mapping[str, str] = {
    "GpusnapError": "What has no kind of its own.",
    "UsageError": (
        "The command line is not right. What click says of options (`No such option`) is not here."
    ),
    "OciError": "What has no kind of its own.",
    "EngineImage": "A checkpoint as an ordinary image, which an engine restores.",
}

# The kernel's words, as the two functions `reason` give them, and what most often helps.
REASONS: Mapping[str, str] = {
    "it does not exist": "see that the path is right, and on a host that has it mounted",
    "access is refused": (
        "run it as root; where that was root, SELinux or AppArmor refuses it: see `dmesg` or the audit log"
    ),
    "it is not allowed": (
        "run it as root, with all capabilities: a container or a unit around gpusnap may have taken some"
    ),
    "it is a link, which is not followed": "give the path that the link leads to",
    "No space left on device": "make room there: `gpusnap rm`, `gpusnap gc`, `podman rm`, old archives",
    "Disk quota exceeded": "raise the quota, or make room there",
    "File too large": "the file system, or the limit on files (`ulimit -f`), takes none that large",
    "Read-only file system": "mount it writable, or name another folder",
    "Input/output error": "the disk or the network behind that path fails: see `dmesg`",
    "Too many open files": "raise the limit (`ulimit -n`, LimitNOFILE= of a unit)",
    "Cannot allocate memory": "free memory, or raise the memory limit of what gpusnap runs in",
    "Is a directory": "name a file",
    "Not a directory": "a part of the path is a file: name another",
    "Device or resource busy": "something else uses it: end that, and try again",
    "No such process": "the process has ended; see its own log",
    "Invalid argument": (
        "the kernel or the file system there does not know the call; see that Linux is 5.2 or later"
    ),
    "Text file busy": "the program is being written: try again",
    "Exec format error": "the program is not for this machine",
}
