#!/usr/bin/python3
"""Checkpoint a container of a pod by this node's kubelet, and push the archive to a registry as an image.

    checkpoint.py --namespace NS --pod POD --container NAME --to REF [--timeout SECONDS] [--keep]

Environment:
    KUBELET    its address [https://127.0.0.1:10250]
    TOKEN      a file with the token of a service account that may `create` `nodes/checkpoint`
    CA         a file with the certificates that kubelet's is checked by; empty: it is not checked, which is
               only for an address that nobody but this node's root answers at
    REGISTRY_AUTH_FILE   credentials, as `podman login` and Kubernetes' dockerconfigjson secrets have them

The container runs on. Exit code 0 once the registry has the image; the archive is then removed from the node,
unless --keep is given. (https://kubernetes.io/docs/reference/node/kubelet-checkpoint-api)
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request

_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_LARGEST = 1 << 20
# kubelet takes a longer time than its runtimeRequestTimeout from the request, and gives up by itself.
_GRACE = 30.0


def request(args: argparse.Namespace) -> urllib.request.Request:
    """kubelet's request for a checkpoint. Raises OSError where the token cannot be read."""
    kubelet = os.environ.get("KUBELET", "https://127.0.0.1:10250").rstrip("/")
    path = "/".join(urllib.parse.quote(part, safe="") for part in (args.namespace, args.pod, args.container))
    with open(os.environ.get("TOKEN", f"{_ACCOUNT}/token"), encoding="ascii") as file:
        token = file.read().strip()
    return urllib.request.Request(
        f"{kubelet}/checkpoint/{path}?timeout={args.timeout}",
        method="POST",
        headers={"Authorization": f"Bearer {token}"},
    )


def trusted() -> ssl.SSLContext:
    """How kubelet's certificate is checked. Raises OSError where the file of the CA cannot be read."""
    ca = os.environ.get("CA", f"{_ACCOUNT}/ca.crt")
    context = ssl.create_default_context(cafile=ca or None)
    if not ca:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def checkpoint(args: argparse.Namespace) -> str:
    """The path of the archive that kubelet had made.

    Raises OSError; ValueError, KeyError, TypeError for an answer without a path; HTTPException for one that
    is not HTTP.
    """
    try:
        with urllib.request.urlopen(
            request(args), timeout=args.timeout + _GRACE, context=trusted()
        ) as answer:
            (path,) = json.loads(answer.read(_LARGEST))["items"]
    except urllib.error.HTTPError as error:
        said = error.read(_LARGEST).decode(errors="replace").strip()
        raise OSError(f"kubelet answers {error.code} {error.reason}: {said}") from error
    if not isinstance(path, str) or not path.startswith("/"):
        raise ValueError(f"{path!r} is no path")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for option in ("namespace", "pod", "container", "to"):
        parser.add_argument(f"--{option}", required=True)
    parser.add_argument("--timeout", type=int, default=600)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    try:
        path = checkpoint(args)
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        said = " ".join(str(error).split())
        print(
            f"checkpoint.py: there is no checkpoint of {args.namespace}/{args.pod}: {said}", file=sys.stderr
        )
        return 1
    print(f"checkpoint.py: kubelet wrote {path}", file=sys.stderr)
    why = ""
    try:
        failed = subprocess.run(["gpusnap", "push", path, args.to, "--format", "cri"], check=False).returncode
    except OSError as error:
        failed, why = 1, f": gpusnap cannot be run: {error.strerror}"
    if failed:
        print(f"checkpoint.py: {path} was not pushed, and stays on this node{why}", file=sys.stderr)
        return 1
    try:
        if not args.keep:
            os.unlink(path)
    except OSError as error:
        print(
            f"checkpoint.py: {path} was pushed, but cannot be removed from this node: {error.strerror}",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
