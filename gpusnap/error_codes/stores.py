"""GPS-7… and GPS-8…: stores and registries."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-701",
        "not-in-store",
        "Nothing in the store has that name or digest. It was removed, is in another store, or was never "
        "stored there.",
        "`gpusnap ls` lists this host's store, `gpusnap ls oci:DIR` another one. `gpusnap checkpoint` or "
        "`gpusnap pull` adds a checkpoint.",
    ),
    ErrorCode(
        "GPS-703",
        "store-busy",
        "Another gpusnap is working in the store and holds what is needed here, such as its lock or the "
        "same checkpoint, or has just removed it, or changed its names.",
        "Wait until it has finished, then run the command again. `fuser` on the path in the message shows "
        "which process has it open.",
    ),
    ErrorCode(
        "GPS-704",
        "store-unusable",
        "The directory cannot be used as a store. It is an image layout that another program made, its "
        "file system has no hard links, or it is not writable. A store that is mounted read-only can be "
        "read: `gpusnap restore` and `gpusnap ls` work on it, but nothing can be added or removed.",
        "Remount a store that is read-only (`mount -o remount,rw`). Or set `store.path`, or name a "
        "directory as `oci:DIR`, on one file system with hard links: ext4, XFS, Btrfs or tmpfs. Name a "
        "layout of another program as a source only: `gpusnap push oci:DIR …`.",
    ),
    ErrorCode(
        "GPS-705",
        "gc-refused",
        "`gpusnap gc` removes unreferenced data. A manifest in the store cannot be read, so gpusnap "
        "cannot determine what it refers to, and nothing was removed.",
        "`gpusnap verify` finds the damage, `gpusnap rm` removes the damaged checkpoint. Then run "
        "`gpusnap gc` again.",
    ),
    ErrorCode(
        "GPS-706",
        "memory-needed",
        "A container was stopped by a checkpoint that only Podman's storage describes, or only the export "
        "that a killed `gpusnap checkpoint` left, and this is its only memory. Or Podman does not say "
        "whether there is such a container, or an export cannot be read. Nothing was removed.",
        "Continue the container with the command in the message. If it is not needed any more, remove it "
        "with `podman rm`, or the export, which `gpusnap recover` names. Or remove the memory with `gpusnap "
        "rm --force`.",
    ),
    ErrorCode(
        "GPS-710",
        "not-pushed",
        "The checkpoint was made and is in this host's store; only the push to the registry failed or was "
        "interrupted. Nothing is lost.",
        "Correct the cause in the message, then run the `gpusnap push` at its end. It continues where it "
        "stopped.",
    ),
    ErrorCode(
        "GPS-801",
        "not-allowed",
        "The registry requires a user name and password, but none were given or they were not accepted, "
        "or the user is not authorised. Or the file or the program with the credentials cannot be read.",
        "Log in: `podman login REGISTRY`. The message names the file in which the credentials were found; "
        "see containers-auth.json(5). `gpusnap doctor` shows the files that are read.",
    ),
    ErrorCode(
        "GPS-802",
        "not-in-registry",
        "The registry does not have the repository, the tag or the blob. Many registries give the same "
        "answer if you have no access to it.",
        "Check the name and the tag, and log in with `podman login` if it is private.",
    ),
    ErrorCode(
        "GPS-803",
        "unreachable",
        "The registry did not respond, or the connection broke, in several attempts. The message begins "
        "with the reason of the last one.",
        "Run the same command again; a transfer continues where it stopped. If the error persists, check "
        "the name of the host, the network, and the proxy (HTTPS_PROXY, NO_PROXY). If the registry asks "
        "to wait before the next request, wait.",
    ),
    ErrorCode(
        "GPS-804",
        "plain-http",
        "The registry does not use TLS. Plain HTTP exposes everything to the network, including "
        "passwords, so it has to be requested explicitly. Or it uses TLS, but plain HTTP was requested.",
        "Give `--plain-http`, or `http://` before the reference, also in `store.pull-from`; or omit it. A "
        "registry can also be marked as `insecure` in registries.conf.",
    ),
    ErrorCode(
        "GPS-805",
        "certificate",
        "The registry's certificate is not trusted, or a certificate or key for it on this host is not in "
        "PEM format.",
        "Put the certificate of the registry's CA at /etc/containers/certs.d/HOST/ca.crt, or among the "
        "system's certificates. A client's certificate and key are HOST/client.cert and HOST/client.key. "
        "All of them must be in PEM format (`-----BEGIN …`).",
    ),
    ErrorCode(
        "GPS-806",
        "rejected",
        "The registry refused the request. Its own message is in brackets: a quota, a name or an artifact "
        "type that it does not allow, a size.",
        "Follow that message; the registry's log may say more. `gpusnap push --format podman` makes an "
        "ordinary image, for registries that accept nothing else.",
    ),
    ErrorCode(
        "GPS-807",
        "reference",
        "A registry, repository or tag name does not follow the specification.",
        "Write it as `registry.example/team/app:tag` or `…@sha256:…`, with the registry first: a host "
        "with a dot or a port, or localhost. Names consist of lower-case letters, digits, and single . _ "
        "- / between them.",
    ),
    ErrorCode(
        "GPS-808",
        "registry-at-fault",
        "The registry, or a proxy in front of it, does not follow the OCI distribution specification. Or "
        "the host is not a registry, but a web server or a login page.",
        "Check the host and the port of the reference, and whether a proxy or a portal responds in place "
        "of the registry (`curl -i https://HOST/v2/`). Otherwise check its log, update it, or use another "
        "registry.",
    ),
    ErrorCode(
        "GPS-809",
        "token-without-tls",
        "The registry redirects gpusnap to an address without TLS, such as that of its token service. A "
        "password is sent over plain HTTP only to the registry for which that was requested.",
        "Correct the registry's configuration: its external address, and that of its token service, must "
        "be https. For tests, use the registry itself with `--plain-http`, and have its token service on "
        "the same host.",
    ),
    ErrorCode(
        "GPS-812",
        "referrers-full",
        "The registry has no referrers API, so the list of what refers to a checkpoint (such as "
        "signatures) is stored as a document under the tag sha256-…, and that is full.",
        "Remove signatures and other referrers that are no longer needed, with oras or the registry's own "
        "tools.",
    ),
    ErrorCode(
        "GPS-813",
        "registries-conf",
        "The registries.conf of this host (containers-registries.conf(5)), or a file in registries.conf.d "
        "blocks the registry, or cannot be read or parsed.",
        "Correct the file that the message names, or ask its administrator. Podman and skopeo read the "
        "same files.",
    ),
)
