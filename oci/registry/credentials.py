"""Credentials for a registry, from the files that Podman and Docker keep them in.

The first of these files that has some for the repository is used (containers-auth.json(5); `podman login`,
`skopeo login`, `docker login` write them):

    $REGISTRY_AUTH_FILE, and then no other
    $XDG_RUNTIME_DIR/containers/auth.json
    /run/containers/<uid>/auth.json, which Podman uses if that variable is not set
    $XDG_CONFIG_HOME/containers/auth.json, or ~/.config/containers/auth.json
    $DOCKER_CONFIG/config.json, or ~/.docker/config.json

In a file, `credHelpers` for the registry come first, then `auths` by the longest matching part of
registry/repository, then `credsStore`. A credential helper is a program docker-credential-NAME, called as
docker/docker-credential-helpers describes.

Credentials are never part of a message or a repr; only the name of their file is.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import Unauthorized, reason
from gpusnap.oci.base.files import open_named
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.base.patterns import compile_later

RUN = "/run/containers"
_DEADLINE = 30.0
# Seconds for a killed helper to end.
_KILLED = 1.0
_LARGEST_FILE = 4 << 20
_HELPER = compile_later(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
# The output of a helper on stdout if it has none (docker-credential-helpers, credentials/error.go).
_NOT_THERE = "credentials not found in native keychain"
# The user's name if the secret is an identity token (docker/cli, cli/config/credentials/native_store.go).
_TOKEN_USER = "<token>"
# Docker Hub has several names; the files use the one of its first API.
_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
_HUB_KEY = "https://index.docker.io/v1/"


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """A user's name and password, or an identity token, which a token service accepts instead."""

    username: str = ""
    password: str = ""
    identity_token: str = ""
    source: str = "the given credentials"
    """Their origin, for messages."""

    def __repr__(self) -> str:
        return f"Credentials(source={self.source!r})"


def find(
    registry: str, repository: str, environ: Mapping[str, str] = os.environ, *, deadline: float = _DEADLINE
) -> Credentials | None:
    """Return the credentials for that repository, or None if no file has any.

    deadline: seconds for a credential helper. Raises Unauthorized for a file that cannot be read or parsed,
    and for a helper that is missing or fails.
    """
    for path, needed in list_files(environ):
        content = _read(path, needed)
        if content is None:
            continue
        found = _in_file(content, path, registry, repository, environ, deadline)
        if found is not None:
            return found
    return None


def list_files(environ: Mapping[str, str] = os.environ) -> Iterator[tuple[str, bool]]:
    """Yield the paths in order, each with whether it must exist."""
    if given := environ.get("REGISTRY_AUTH_FILE"):
        yield given, True
        return
    home = environ.get("HOME") or os.path.expanduser("~")
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        yield f"{runtime}/containers/auth.json", False
    yield f"{RUN}/{os.getuid()}/auth.json", False
    yield os.path.join(environ.get("XDG_CONFIG_HOME") or f"{home}/.config", "containers/auth.json"), False
    yield os.path.join(environ.get("DOCKER_CONFIG") or f"{home}/.docker", "config.json"), False


def _read(path: str, needed: bool) -> Mapping[str, object] | None:
    try:
        with open_named(path) as file:
            data = file.read(_LARGEST_FILE)
    except (FileNotFoundError, NotADirectoryError) as error:
        if needed:
            raise Unauthorized(f"REGISTRY_AUTH_FILE names {path}, but {reason(error)}") from error
        return None
    except OSError as error:
        raise Unauthorized(f"the credentials in {path} cannot be read: {reason(error)}") from error
    try:
        content: object = parse_json(data) if data.strip() else {}
    except (ValueError, RecursionError):
        # Not `from` it, because it contains the text.
        raise Unauthorized(f"the credentials file {path} is not JSON: correct or remove it") from None
    if not isinstance(content, dict):
        raise Unauthorized(f"the credentials file {path} contains no JSON object: correct or remove it")
    return content


def _in_file(
    content: Mapping[str, object],
    path: str,
    registry: str,
    repository: str,
    environ: Mapping[str, str],
    deadline: float,
) -> Credentials | None:
    helpers = _table(content.get("credHelpers"))
    hosts = _HUB if registry in _HUB else (registry,)
    for host in hosts:
        if helper := helpers.get(host):
            return _ask(helper, registry, path, environ, deadline)
    auths = {_plain_key(key): entry for key, entry in _table(content.get("auths")).items()}
    for host in hosts:
        for key in _keys(host, repository):
            found = _entry(auths.get(key), path, key)
            if found is not None:
                return found
    store = content.get("credsStore")
    return _ask(store, registry, path, environ, deadline) if store else None


def _keys(registry: str, repository: str) -> Iterator[str]:
    """Yield registry/a/b, registry/a, registry."""
    parts = [registry, *repository.split("/")]
    for count in range(len(parts), 0, -1):
        yield "/".join(parts[:count])


def _plain_key(key: str) -> str:
    """Return a key without the parts that `docker login` adds: a scheme, and the path of an API."""
    for scheme in ("https://", "http://"):
        if key.startswith(scheme):
            return key.removeprefix(scheme).partition("/")[0]
    return key.rstrip("/")


def _entry(entry: object, path: str, key: str) -> Credentials | None:
    """Parse one of the `auths`; None for empty ones, which mean that a helper has them."""
    fields = _table(entry)
    username, password = fields.get("username"), fields.get("password")
    token = fields.get("identitytoken")
    if auth := fields.get("auth"):
        try:
            text = base64.b64decode(str(auth), validate=True).decode()
        except (binascii.Error, ValueError):
            text = ""
        if ":" not in text:
            raise Unauthorized(f"the entry of {key} in {path} is not base64 of user:password: log in again")
        username, _, password = text.partition(":")
        # Docker pads it with zeros.
        password = password.strip("\0")
    if not isinstance(username, str) or not isinstance(password, str):
        username = password = ""
    token = token if isinstance(token, str) else ""
    return Credentials(username, password, token, path) if username or token else None


def _ask(
    name: object, registry: str, path: str, environ: Mapping[str, str], deadline: float
) -> Credentials | None:
    """Return what a credential helper has for the registry."""
    if not isinstance(name, str) or not _HELPER.fullmatch(name):
        raise Unauthorized(f"{path} names an invalid credential helper: {str(name)[:80]!r}")
    program = f"docker-credential-{name}"
    found = shutil.which(program, path=environ.get("PATH", os.defpath))
    if found is None:
        raise Unauthorized(
            f"{path} delegates {registry} to the credential helper {program}, which is not in PATH: "
            "install it"
        )
    server = _HUB_KEY if registry in _HUB else registry
    try:
        code, said = _run([found, "get"], server, environ, deadline)
    except subprocess.TimeoutExpired:
        raise Unauthorized(
            f"{program} returned no credentials for {registry} within {deadline:g} s"
        ) from None
    except OSError as error:
        raise Unauthorized(f"{program} cannot be run: {reason(error)}") from error
    if code:
        if _NOT_THERE in said:
            return None
        raise Unauthorized(f"{program} returned no credentials for {registry}: it exited with status {code}")
    return _parse_helper_answer(said, program, registry)


def _run(argv: Sequence[str], given: str, environ: Mapping[str, str], deadline: float) -> tuple[int, str]:
    """Run a program with an input; return its exit status and its output. Raises TimeoutExpired, OSError.

    Its output is a file in RAM, not a pipe, so that children which it leaves may keep it open. One that does
    not end when it is killed, because it waits for a disk in the kernel, is left behind.
    """
    with _open_memory() as words, _open_memory() as output:
        words.write(given.encode())
        words.seek(0)
        child = subprocess.Popen(
            argv, stdin=words, stdout=output, stderr=subprocess.DEVNULL, env=dict(environ)
        )
        try:
            code = child.wait(deadline)
        except BaseException:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_KILLED)
            if child.returncode is None:
                child.returncode = -signal.SIGKILL  # for its destructor
            raise
        output.seek(0)
        return code, output.read(_LARGEST_FILE).decode(errors="replace")


def _open_memory() -> IO[bytes]:
    return open(os.memfd_create("gpusnap-credentials"), "w+b", buffering=0)


def _parse_helper_answer(text: str, program: str, registry: str) -> Credentials | None:
    try:
        answer = _table(parse_json(text))
    except (ValueError, RecursionError):
        answer = {}
    username, secret = answer.get("Username"), answer.get("Secret")
    if not isinstance(username, str) or not isinstance(secret, str):
        raise Unauthorized(f"{program} returned invalid credentials for {registry}")
    if not secret:
        return None
    if username == _TOKEN_USER:
        return Credentials(identity_token=secret, source=program)
    return Credentials(username, secret, source=program)


def _table(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
