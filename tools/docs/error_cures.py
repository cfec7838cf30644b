"""What docs/errors.md says to do about a message, where the code has no hint, or where there is more to say.

A key of CURES is a message as `error_messages` finds it: its words as they stand in the code, and in angle
brackets what is filled in, by any name. `python -m tools.docs.error_docs` names the messages that need an
entry.
"""

from __future__ import annotations

from collections.abc import Mapping

from tools.docs.error_kinds import COPY

__all__ = ["CURES"]

_UNTRUSTED = (
    "gpusnap does not write this: somebody changed the archive, or it is damaged. Do not restore from it"
)
_REGISTRY = (
    "the registry, or a proxy before it, does not keep to the specification: look into its log, or try "
    "another"
)
_NAME = "write the reference as registry.example/team/app:tag or …@sha256:…"

CURES: Mapping[str, str] = {
    "the checkpoint has a TCP connection of <local> with <remote>, and the network that the container "
    "gets here does not have the address <local>, or not yet": (
        "a note, no error: the kernel may still be checking whether another host has this address of IPv6. "
        "If the restore fails, give the network the address first, or restore with --tcp-close"
    ),
    "who restored the container is not on file: <sentence>": (
        "a note, no error: the container runs. `gpusnap recover` cannot name it, should Podman be killed "
        "before it hears that it runs. Make room in /run"
    ),
    # What runs without its Podman's knowledge
    "container <container> is another one by now: its init is process <pid>": (
        "`gpusnap recover` was to end a container that its Podman does not know, and the runtime has another "
        "one under that ID: it was left alone. `crun list` or `runc list` shows it"
    ),
    # Processes that a dump leaves out, or that end
    "what exec started in the container is not in its checkpoint: process <names>": (
        "a note, no error: CRIU dumps the container's first process and its descendants. Start from the "
        "container's own command what has to be in the checkpoint"
    ),
    "process <pid> (<name>) ended by itself before its GPU state could be restored; the rest of the "
    "container runs on": "a note, no error: somebody ended it, or a process of the container did",
    "process <pid> (<comm>) ended by itself as soon as it ran again; the rest of the container runs on": (
        "a note, no error: most often its standard output was a pipe that nobody reads any more, as what "
        "`podman exec` started leaves one. Its own log may say more"
    ),
    # gpusnap
    "<path> cannot be written: it is there, and no file": (
        "name another file: a device, a pipe or a socket is not written over"
    ),
    "<path> was made by somebody else meanwhile, and an archive replaces no file": (
        "name another file. What has come from a registry does not come again"
    ),
    "<path> cannot be written: <folder> is no folder": "make the folder first, or name another",
    "<path> cannot be written: <folder> is read-only": "mount it writable, or name a file elsewhere",
    "what Podman exported of <name> has no <missing>": (
        "Podman's archive is not whole. The container ran on, or can be restored from Podman's own storage "
        "(`podman container restore`). Try again; if it comes again, tell us"
    ),
    "the records <digest> hold <name>, which is none of them": _UNTRUSTED,
    "the manifest <digest> has <size> bytes, and <largest> are allowed": _UNTRUSTED,
    "<path> is no checkpoint of a container: it has no <first>": (
        "it is an archive of something else, or was cut short: name what `podman container checkpoint "
        "--export`, `gpusnap checkpoint -o` or `gpusnap pull -o` wrote"
    ),
    "<name> in <path> has <left> bytes, and <limit> are allowed": _UNTRUSTED,
    "nothing is kept in <path>": "`gpusnap checkpoint --to oci:DIR` or `gpusnap pull` keeps something there",
    "what was staged still takes RAM: <reason>; gpusnap recover frees it": "`gpusnap recover`",
    "there is no file <word>": "see the path; a name in this host's store has no / or . at its beginning",
    "the checkpoint is in <store> as <name>, and was not pushed: <said>": (
        "nothing is lost: the checkpoint is in this host's store. Put right what the sentence says, and run "
        "the `gpusnap push` at its end"
    ),
    "Podman has a container <wanted> already": (
        "most often the one that the checkpoint ended, which Podman keeps until `podman rm`. Remove it, or "
        "give the restored one another name: `--name`"
    ),
    # containerd's images
    "<word> has <number> images, and <most_images> are allowed": (
        "name one that holds one checkpoint, as `ctr image export` writes it"
    ),
    "containerd does not take the image: <last>": (
        "containerd's own words follow; see that it runs, and its log"
    ),
    "the records hold <name>, which is none of containerd's": _UNTRUSTED,
    "the link <name> in the records leads out of CRIU's images": _UNTRUSTED,
    # Before a checkpoint
    "process <pid> (<comm>) has a socket of the protocol <name>, which CRIU <criu_version> cannot dump on "
    "this kernel": (
        "install CRIU 4.2 or later: an older one dumps Unix and netlink sockets only from Linux 6.16 on. "
        "For MPTCP: start the program without it (Go: `GODEBUG=multipathtcp=0`)"
    ),
    "process <pid> (<comm>) holds <files> but has no CUDA state of its own, nor did it inherit that handle "
    "from a CUDA process: CRIU cannot dump it": (
        "it opened the file by itself, to watch the GPU or to draw on it. End it for the time of the "
        'checkpoint; start workers with spawn (`multiprocessing_context="spawn"`)'
    ),
    "<size> of GPU memory have to move to RAM, and this host leaves <size>": (
        "while a process is suspended its GPU memory is in RAM. Free some memory, or checkpoint fewer "
        "processes at a time"
    ),
    "<size> of GPU memory have to pass through RAM, and this host leaves <size>": (
        "free some memory, or set `memory.ceiling` lower"
    ),
    "<size> of GPU memory have to move to RAM, and the container's memory limit leaves <size>": (
        "while a process is suspended its GPU memory counts as its own: raise the container's memory limit "
        "(`podman update --memory`)"
    ),
    "<size> of GPU memory have to move to RAM, and the memory limit of gpusnap's own cgroup leaves <size>": (
        "what gpusnap stages counts as its own: raise the limit of the session or unit that runs Podman or "
        "containerd, or set `memory.ceiling` below it"
    ),
    "<size> of GPU memory have to pass through RAM, and the memory limit of gpusnap's own cgroup leaves "
    "<size>": (
        "raise the limit of the session or unit that runs Podman or containerd, or set `memory.ceiling` lower"
    ),
    "the checkpoint needs up to <size> in <folder>, where <size> are free": (
        "Podman keeps the images below /var/lib/containers before it packs them. Make room there, or use "
        "`gpusnap checkpoint`, which does not pack"
    ),
    "<path> is not an OCI configuration": (
        "the container's bundle is damaged, or not one: make the container anew"
    ),
    "process <pid> (<comm>) is stopped, and cannot answer the GPU's driver": (
        "it got SIGSTOP, or a debugger has it, or the container is paused: let it go on. Or gpusnap was "
        "killed: `gpusnap recover`, or `gpusnap resume PID`"
    ),
    # While a checkpoint is made
    "<dump_error>, but only after the dump; the checkpoint is whole": (
        "the runtime complained of what it does after the dump, such as removing the container: see whether "
        "the container is gone"
    ),
    "<name> reported a checkpoint, but wrote no inventory.img to <image_path>": (
        "crun or runc, or a wrapper in its place, did not call CRIU: run `criu check`, and see which program "
        "`runtime` in the settings names"
    ),
    "<name> could not dump container <id>: <said>": (
        "after `CRIU says:` stands CRIU's first error, and then the log that has the rest; "
        "[troubleshooting.md](troubleshooting.md) has those that people meet. The container runs on"
    ),
    "the driver's mount <path> cannot be named to CRIU: its path holds blanks or quotes": (
        "mount the driver's file at a path without blanks and quotes"
    ),
    "<name> could not be run": (
        "gpusnap could not start another process of itself: see the limit on processes (`ulimit -u`, "
        "pids.max), and `dmesg`"
    ),
    "<container> is no container's ID": (
        "gpusnap takes letters, digits and _ . + - in an ID. What asked for it is no engine, or its command "
        "line was changed on the way"
    ),
    "<first>, and <more> more processes failed": (
        "do what the first sentence asks for; the others failed with it"
    ),
    "<first>, and <more> more process failed": (
        "do what the first sentence asks for; the other failed with it"
    ),
    "the GPU memory in <folder>: <error>": (
        "the disk filled up or failed while the GPUs' memory was written. The container runs on, and nothing "
        "is left of the checkpoint"
    ),
    "the GPU memory of container <container> is not kept for its next checkpoint, which will write all of "
    "it again: <why>; set memory.keep-folder to a folder beside the images, or memory.keep to false": (
        "the checkpoint is whole. The folder has to be on the file system of the images, and that must have "
        "room"
    ),
    "1 process holds GPU files that it inherited and never used; replaced by /dev/null: <pids>": (
        "it is a child by fork of a CUDA process, such as a DataLoader worker, and cannot use CUDA in any "
        "case. Nothing is to be done"
    ),
    "<number> processes hold GPU files that they inherited and never used; replaced by /dev/null: <pids>": (
        "they are children by fork of a CUDA process, such as DataLoader workers, and cannot use CUDA in any "
        "case. Nothing is to be done"
    ),
    "the log <path> cannot be written: <reason>": (
        "the engine gave a log that cannot be written; the sentence is on stderr in any case. See the "
        "[reason](#reasons)"
    ),
    # A restore
    "the manifest asks to mount <path>, which is no file of the GPU's driver": _UNTRUSTED,
    "the checkpoint asks to mount <source>, the device of GPU <gpu>, which is not its own": _UNTRUSTED,
    "<name> is no name of an image in <image_path>": _UNTRUSTED,
    "the image of the container's /dev is refused: <name> is a device (<major>:<minor>) that nothing gives "
    "the container": (
        "the archive holds a device that its config.json does not give the container: it was changed, or the "
        "device was made inside the container. Do not restore from it"
    ),
    "the container's processes run <path> of driver <driver_version>, and <why>": (
        "a process cannot change the driver's code that it runs: restore it where the same driver build is "
        "installed; see [gpus.md](gpus.md#another-driver)"
    ),
    "<name> could not restore container <container_id>: <said>": (
        "after `CRIU says:` stands CRIU's first error, and then the log that has the rest. The checkpoint is "
        "unharmed"
    ),
    "NVIDIA's hook <name> did not end within <timeout> s and was killed": (
        "the container runs; a program that it starts anew may not find the driver's libraries. Run "
        "`ldconfig` in it"
    ),
    "NVIDIA's hook <name> failed with exit code <returncode>: <said>": (
        "the container runs; a program that it starts anew may not find the driver's libraries. Run "
        "`ldconfig` in it"
    ),
    "NVIDIA's hook <name> said: <said>": (
        "the hook did its work; what it said may matter to whoever looks after the toolkit"
    ),
    "what was fetched is not kept in the store: <sentence>": (
        "the container runs; the next restore fetches the same again. See the second half"
    ),
    # What the driver answers
    "the GPU driver could not …: its GPU work did not stop in time": (
        "a kernel runs longer than the deadline. Raise `nvidia.lock-timeout`, in the settings or as an "
        "annotation, or checkpoint when the program does less"
    ),
    "the GPU driver could not …: the driver does not support it": (
        "it uses managed memory (`cudaMallocManaged`) or MPS. Start it without them"
    ),
    "the GPU driver could not …: the process is not in the state that this step needs": (
        "cuda-checkpoint or CRIU's CUDA plugin may suspend it at the same time: end them. Or a killed "
        "gpusnap left it: `gpusnap recover`"
    ),
    # Which GPU
    "the checkpoint was made with driver <made>, and this host has <driver_version>, which is older": (
        "update the driver here, or restore on a host that has that driver or a newer one"
    ),
    "<names> of the checkpoint need <number> GPUs of this host, and only <here> fits": (
        "the lines below it say why the others do not; free one of them, or restore elsewhere"
    ),
    "<names> of the checkpoint need <number> GPUs of this host, and only <here> fit": (
        "the lines below it say why the others do not; free some of them, or restore elsewhere"
    ),
    "no GPU of this host fits GPU <index> of the checkpoint (<shown>)": (
        "the lines below it say why for each GPU; free one, or restore on a host that has such a GPU. See "
        "[gpus.md](gpus.md)"
    ),
    "reserved by another restore": "wait for the other restore to end, or name another GPU with `--gpu-map`",
    "in <compute_mode> mode": (
        "in MIG mode: turn it off (`nvidia-smi -mig 0`), the driver cannot checkpoint MIG instances. In a "
        "compute mode: set it to DEFAULT (`nvidia-smi -c 0`)"
    ),
    # The manifest
    "the checkpoint in <image_path> is not complete: it has no gpusnap/manifest.json": (
        "it was cut off before the manifest. Take another copy; or, where the sentence says that CRIU had "
        "finished, rename the pending manifest"
    ),
    # After a gpusnap that was killed
    "an earlier checkpoint was cut off; <recover>": (
        "gpusnap had been killed, and the container was brought back first. Nothing is to be done"
    ),
    "an earlier restore was cut off; <said>": (
        "gpusnap had been killed, and what it had left was taken away first. Nothing is to be done"
    ),
    "container <container> could not be removed: <err>": (
        "the runtime's own words follow. Run `gpusnap recover` again when that is mended"
    ),
    "gpusnap (process <owner>) is still at work on container <container>": (
        "a checkpoint or a restore of it is under way: wait for it"
    ),
    "a restore of container <container> was cut off, and what it left has to be removed": (
        "a checkpoint removes nothing: run `gpusnap recover`, which removes the incomplete container, and "
        "restore it again"
    ),
    "what a killed gpusnap called for container <container> is still at work: process <pids>": (
        "gpusnap was killed; the runtime and CRIU that it had called go on. Wait for them, or kill them, and "
        "run `gpusnap recover` again"
    ),
    # Stores and artifacts
    "the file of a region ends at <offset> instead of <size>": COPY,
    "a chunk size of <chunk_size> bytes is no multiple of <page> up to <largest_chunk>": (
        "set `memory.chunk-size` to such a size"
    ),
    "zstd level <level> is not one from 0 to <highest_level>": "set `memory.level` to one of these",
    "<nbytes> bytes do not fit the <nbytes> bytes that are left of a region": COPY,
    "<name> cannot be a name: letters and digits, with single - . _ : @ / + between them, make one, up to "
    "<longest_name> in all": "give another name",
    "<name> cannot be a name: it looks like a digest; put another letter in it": "give another name",
    "the index of <path> would have <number> bytes, and <document_limit> are allowed; remove some of what "
    "it names": "`gpusnap ls` lists them, `gpusnap rm` removes one",
    "gc removed nothing from <path>, as it cannot tell what is still needed below <digest>: <why>; verify "
    "what it names, and remove what is broken": (
        "`gpusnap verify` finds it, `gpusnap rm` removes it; then run `gpusnap gc` again"
    ),
    "gc removed nothing from <path>, as it cannot tell what is still needed: <why>; verify what it names, "
    "and remove what is broken": (
        "`gpusnap verify` finds it, `gpusnap rm` removes it; then run `gpusnap gc` again"
    ),
    "<what> waited <patience> s for <path>, which another process has; try again later": (
        "another gpusnap is at work on the store: wait for it, and run the command again"
    ),
    "another process is at work on <path>; try again when it is done": (
        "the same checkpoint is being pulled or made by another gpusnap: wait for it"
    ),
    "<digest> cannot be committed: what a <media_type> consists of is not known": (
        "the registry's artifact is of a kind that this gpusnap does not know: use a newer one"
    ),
    "<path> is no staging of the store <path>": "it was removed meanwhile, or by hand: run the command again",
    "<path> is an image layout, but no store: it has no folder <folder>": (
        "another program made the layout. Name it as a source (`gpusnap push oci:DIR …`), and have a store "
        "in a folder of its own"
    ),
    "<name> is no name for a staging: letters, digits and . _ - make one": "this should not be seen: tell us",
    "<path> cannot be a store: no hard link can be made in it (<reason>); have it on one file system with "
    "hard links, such as ext4, XFS, Btrfs or tmpfs": "set `store.path`, or name a folder there as oci:DIR",
    # Registries
    "the CA file <path> holds no certificate in PEM": (
        "put the registry's CA there in PEM (`-----BEGIN CERTIFICATE-----`)"
    ),
    "<stem>.cert and <stem>.key are no certificate and its key in PEM": (
        "put the client's certificate and its key there in PEM; both must belong together"
    ),
    "<host> sends us to where there is no TLS, or no address at all": (
        "a registry that was asked with TLS may not lead to plain HTTP: put its configuration right (the "
        "external address), or ask it with `--plain-http`"
    ),
    "<what>: it sends us on and on, more than <most_redirects> times": _REGISTRY,
    "<shown> is no reference: it begins with its registry, without a scheme": _NAME,
    "<shown> names no registry: a reference begins with the registry's host, which has a dot or a port or "
    "is localhost, such as registry.example/app:v1": _NAME,
    "<shown> is no reference: <registry> is no host of a registry": _NAME,
    "<shown> is no reference: host and name have more than <longest> characters": "give a shorter name",
    "<text> is no name of a repository: these are lower-case letters and digits, with single . or _ or -, "
    "or / between them": _NAME,
    "<text> is no tag: these are up to 128 letters, digits, _, . or -, not . or - first": "give another tag",
    "<what>: it refuses (<each>)": (
        "the registry's own words stand in brackets: a quota, a name that it does not take, an artifact type "
        "that it does not allow; see its log"
    ),
    "<shown> took the manifest <digest> as <told>": _REGISTRY,
    "<shown> took the blob <digest> as <told>": _REGISTRY,
    "<shown> gave another part of <digest> than asked for": _REGISTRY,
    "<registry> names a token service without TLS on another host, which is sent no credentials: <host>": (
        "speak to the registry with TLS, or have its token service on its own host: no password goes over "
        "plain HTTP to anybody else"
    ),
    "<registry> names a token service without TLS, which is sent no credentials: <host>": (
        "the registry is set up so that passwords would go over plain HTTP: have its token service use TLS"
    ),
    "the list of what refers to <subject> would have <number> bytes": (
        "the registry keeps no lists of its own, and the one under the tag sha256-… is full: remove "
        "signatures and the like that nobody needs, with oras or the registry's own tools"
    ),
    "the token service <where> of <registry> answered without a token": _REGISTRY,
    "an address on <host> is none: <name>": _REGISTRY,
    "the proxy <host> of the environment cannot be used: <name>": (
        "HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names it: correct it, or put the registry's host into NO_PROXY"
    ),
    "<host> does not speak TLS: plain HTTP, which shows everything to the network, has to be asked for": (
        "`--plain-http`, or `http://` before the reference; in `store.pull-from`, too"
    ),
    "the certificate of <host> is not trusted (<why>): have its CA among the system's, or as a .crt file "
    "in the registry's folder in <folders>": (
        "put the CA's certificate at /etc/containers/certs.d/HOST/ca.crt"
    ),
}
