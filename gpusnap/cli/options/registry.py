"""The options for access to a registry, as Podman and skopeo have them.

Their values are in the environment while the command runs, because the runtime, several processes further
down, fetches what a restore needs. A password of --creds is only in a file in this process's memory.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import click

from gpusnap.oci.base.environment import TLS_VERIFY
from gpusnap.runtime_shim.base.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

_AUTH_FILE = "REGISTRY_AUTH_FILE"
_OPTIONS = (
    click.option(
        "--tls-verify",
        is_flag=False,
        flag_value="true",
        type=click.Choice(["true", "false"]),
        help="If false, also use a registry with an untrusted certificate, or without TLS.",
    ),
    click.option(
        "--creds", default="", metavar="USER[:PASSWORD]", help="Log in to the registry as this user."
    ),
    click.option(
        "--authfile",
        default="",
        type=click.Path(),
        metavar="FILE",
        help="Credentials file, as written by podman login. [default: Podman's and Docker's]",
    ),
    click.option(
        "--plain-http", is_flag=True, help="Use plain HTTP, without TLS; same as http:// before REF."
    ),
)


def registry_options(command: F) -> F:
    """Add --plain-http, which the command gets, and --authfile, --creds, --tls-verify, which it does not."""

    @functools.wraps(command)
    def run(*args: Any, authfile: str, creds: str, tls_verify: str | None, **named: Any) -> Any:
        with _set_environment(authfile, creds, tls_verify, named):
            return command(*args, **named)

    made: Any = run
    for option in _OPTIONS:
        made = option(made)
    found: F = made
    return found


@contextmanager
def _set_environment(
    authfile: str, creds: str, tls_verify: str | None, named: Mapping[str, Any]
) -> Iterator[None]:
    """Have the environment say so while the block runs. Raises UsageError."""
    with ExitStack() as stack:
        if authfile and creds:
            raise UsageError("--authfile and --creds cannot be combined", hint="give only one of them")
        if authfile:
            if not os.path.exists(authfile):
                hint = f"podman login --authfile {authfile} REGISTRY creates it"
                raise UsageError(f"there is no file {authfile}", hint=hint)
            stack.enter_context(_set(_AUTH_FILE, os.path.abspath(authfile)))
        if creds:
            stack.enter_context(_set(_AUTH_FILE, stack.enter_context(_login(creds, _registries(named)))))
        if tls_verify is not None:
            stack.enter_context(_set(TLS_VERIFY, tls_verify))
        yield


@contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _login(creds: str, registries: Iterable[str]) -> Iterator[str]:
    """The path of a file with these credentials, which is gone with this process."""
    user, colon, password = creds.partition(":")
    hosts = list(registries)
    if not hosts:
        raise UsageError("--creds applies to a registry, but no argument names one", hint="omit it")
    if not colon:
        if not sys.stdin.isatty():
            raise UsageError("--creds has no password", hint="write USER:PASSWORD, or use --authfile")
        password = click.prompt(f"Password of {user}", hide_input=True, err=True)
    secret = base64.b64encode(f"{user}:{password}".encode()).decode()
    file = os.memfd_create("gpusnap-login", os.MFD_CLOEXEC)
    try:
        os.write(file, json.dumps({"auths": {host: {"auth": secret} for host in hosts}}).encode())
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)


def _registries(named: Mapping[str, Any]) -> Iterator[str]:
    """Yield the registries that arguments of a command name."""
    from gpusnap.checkpoints.locator import registry_or_none

    for value in named.values():
        for word in value if isinstance(value, tuple) else (value,):
            with suppress(UsageError):  # what is wrong with it the command says
                if isinstance(word, str) and (found := registry_or_none(word)) is not None:
                    yield found.reference.registry
