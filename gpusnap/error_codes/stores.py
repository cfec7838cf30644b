"""GPS-7… and GPS-8…: stores and registries."""

from __future__ import annotations

from gpusnap.error_codes.entry import ErrorCode

CODES = (
    ErrorCode(
        "GPS-701",
        "not-in-store",
        "Nothing in the store has that name or digest. It was removed, is in another store, or was never "
        "kept there.",
        "`gpusnap ls` lists this host's store, `gpusnap ls oci:DIR` another one. `gpusnap checkpoint` or "
        "`gpusnap pull` puts a checkpoint there.",
    ),
    ErrorCode(
        "GPS-703",
        "store-busy",
        "Another gpusnap is at work in the store and has what is needed here, such as its lock or the same "
        "checkpoint, or has just removed it.",
        "Wait until it is done, and run the command again. `fuser` on the path in the message shows which "
        "process has it.",
    ),
    ErrorCode(
        "GPS-704",
        "store-unusable",
        "The directory cannot be used as a store. It is an image layout that another program made, its file "
        "system has no hard links, or it cannot be written.",
        "Set `store.path`, or name a directory as `oci:DIR`, on one file system with hard links: ext4, XFS, "
        "Btrfs or tmpfs. Name a layout of another program as a source only: `gpusnap push oci:DIR …`.",
    ),
    ErrorCode(
        "GPS-705",
        "gc-refused",
        "`gpusnap gc` removes what nothing names. A manifest in the store cannot be read, so it cannot be "
        "told what it names, and nothing was removed.",
        "`gpusnap verify` finds what is broken, `gpusnap rm` removes it. Then run `gpusnap gc` again.",
    ),
    ErrorCode(
        "GPS-710",
        "not-pushed",
        "The checkpoint was made and is in this host's store; only the push to the registry failed or was "
        "interrupted. Nothing is lost.",
        "Correct what the message says, and run the `gpusnap push` at its end. It continues where it "
        "stopped.",
    ),
    ErrorCode(
        "GPS-801",
        "not-allowed",
        "The registry wants a user's name and password and has none, or does not accept those that it got, "
        "or the user may not do this. Or the file or the program that keeps the credentials cannot be read.",
        "Log in: `podman login REGISTRY`. The message names the file in which the credentials were found; "
        "see containers-auth.json(5). `gpusnap doctor` shows the files that are read.",
    ),
    ErrorCode(
        "GPS-802",
        "not-in-registry",
        "The registry does not have the repository, the tag or the blob. Many registries say the same if "
        "you may not see it.",
        "Check the name and the tag, and log in with `podman login` if it is private.",
    ),
    ErrorCode(
        "GPS-803",
        "unreachable",
        "The registry did not answer, or broke off, in several attempts. The message begins with the reason "
        "of the last one.",
        "Run the same command again; a transfer continues where it stopped. If it stays so, check the name "
        "of the host, the network, and the proxy (HTTPS_PROXY, NO_PROXY). If the registry asks to be left "
        "alone for a time, wait for it.",
    ),
    ErrorCode(
        "GPS-804",
        "plain-http",
        "The registry does not speak TLS. Plain HTTP shows everything to the network, passwords too, so it "
        "has to be asked for. Or it speaks TLS, and plain HTTP was asked for.",
        "Give `--plain-http`, or `http://` before the reference, also in `store.pull-from`; or leave that "
        "out. A registry may be marked as `insecure` in registries.conf as well.",
    ),
    ErrorCode(
        "GPS-805",
        "certificate",
        "The registry's certificate is not trusted, or a certificate or key for it on this host is not in "
        "PEM.",
        "Put the certificate of the registry's CA at /etc/containers/certs.d/HOST/ca.crt, or among those of "
        "the system. A client's certificate and key are HOST/client.cert and HOST/client.key. All of them "
        "in PEM (`-----BEGIN …`).",
    ),
    ErrorCode(
        "GPS-806",
        "rejected",
        "The registry refuses the request. Its own words are in brackets: a quota, a name or an artifact "
        "type that it does not allow, a size.",
        "Act on these words; the registry's log may say more. `gpusnap push --format podman` makes an "
        "ordinary image, for registries that take nothing else.",
    ),
    ErrorCode(
        "GPS-807",
        "reference",
        "The name of something in a registry is not written as the specification says.",
        "Write it as `registry.example/team/app:tag` or `…@sha256:…`, with the registry first: a host with "
        "a dot or a port, or localhost. Names are of lower-case letters, digits, and single . _ - / between "
        "them.",
    ),
    ErrorCode(
        "GPS-808",
        "registry-at-fault",
        "The registry, or a proxy in front of it, does not keep to the OCI distribution specification. Or "
        "what answers there is no registry, but a web server or a log-in page.",
        "Check the host and the port of the reference, and whether a proxy or a portal answers in the "
        "registry's place (`curl -i https://HOST/v2/`). Else look into its log, update it, or use another "
        "registry.",
    ),
    ErrorCode(
        "GPS-809",
        "token-without-tls",
        "The registry sends gpusnap to an address without TLS, such as that of its token service. No "
        "password is sent over plain HTTP to anybody but the registry that it was asked for.",
        "Correct the registry's configuration: its external address, and that of its token service, have to "
        "be https. For tests, ask the registry itself with `--plain-http`, and have its token service on "
        "the same host.",
    ),
    ErrorCode(
        "GPS-812",
        "referrers-full",
        "The registry keeps no list of what refers to a checkpoint (signatures and the like), so the list "
        "is a document under the tag sha256-…, and that is full.",
        "Remove signatures and the like that nobody needs, with oras or the registry's own tools.",
    ),
    ErrorCode(
        "GPS-813",
        "registries-conf",
        "The registries.conf of this host (containers-registries.conf(5)), or a file in registries.conf.d, "
        "blocks the registry, or cannot be read or understood.",
        "Correct the file that the message names, or ask who keeps it. Podman and skopeo read the same "
        "files.",
    ),
)
