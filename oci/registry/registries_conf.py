"""The configuration of registries on a host, in the files of containers-registries.conf(5), version 2.

    $CONTAINERS_REGISTRIES_CONF, or else ~/.config/containers/registries.conf, or else
    /etc/containers/registries.conf
    /etc/containers/registries.conf.d/*.conf and then ~/.config/containers/registries.conf.d/*.conf,
    which replace a [[registry]] of the same prefix

Only [[registry]] is used, by the longest matching prefix: blocked, insecure, location and its mirrors. Names
without a registry (short-name aliases, unqualified-search-registries) are not supported by gpusnap.
"""

from __future__ import annotations

import glob
import os
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.errors import RegistryError, reason
from gpusnap.oci.base.files import exists, open_named
from gpusnap.oci.layout.reference import Reference, parse

FOLDER = "/etc/containers"
_NAME = "registries.conf"
_LARGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host that is asked for a repository."""

    reference: Reference
    insecure: bool = False
    """Whether its certificate may be untrusted, or it may have no TLS at all."""


def endpoints(
    reference: Reference, *, mirrors: bool = True, environ: Mapping[str, str] = os.environ
) -> tuple[Endpoint, ...]:
    """Return where something can be fetched, in order: its mirrors, if wanted, and the registry itself.

    Raises RegistryError if it is blocked, or a file cannot be read or parsed.
    """
    best: tuple[int, dict[str, Any]] | None = None
    for entry in _entries(environ):
        length = _match_length(entry, reference.name)
        if length > (best[0] if best is not None else 0):
            best = length, entry
    if best is None:
        return (Endpoint(reference),)
    length, entry = best
    if entry.get("blocked"):
        raise RegistryError(
            f"{reference.name} is blocked on this host, by [[registry]] {_prefix(entry)} in {entry['']}",
            code="GPS-813",
        )
    found: list[Endpoint] = []
    for mirror in entry.get("mirror", ()) if mirrors else ():
        only = mirror.get("pull-from-mirror") or (
            "digest-only" if entry.get("mirror-by-digest-only") else "all"
        )
        if only == "all" or only == ("digest-only" if reference.digest else "tag-only"):
            found.append(_replace_prefix(reference, length, mirror, entry))
    return (*found, _replace_prefix(reference, length, entry, entry))


def _replace_prefix(
    reference: Reference, length: int, to: Mapping[str, Any], entry: Mapping[str, Any]
) -> Endpoint:
    """Return a reference with the first `length` characters of its name replaced by a location."""
    found, location = reference, to.get("location") or ""
    if location:
        try:
            named = parse(location + reference.name[length:])
        except RegistryError as error:
            raise RegistryError(
                f"a location in {entry['']} cannot be used: {error}", code="GPS-813"
            ) from error
        found = replace(reference, registry=named.registry, repository=named.repository)
    return Endpoint(found, bool(to.get("insecure")))


def _prefix(entry: Mapping[str, Any]) -> str:
    return str(entry.get("prefix") or entry.get("location") or "")


def _match_length(entry: Mapping[str, Any], name: str) -> int:
    """Return how many characters of a name an entry matches; 0 for none."""
    prefix = _prefix(entry)
    if prefix.startswith("*."):
        host = name.partition("/")[0]
        return len(host) if host.endswith(prefix[1:]) and len(host) > len(prefix) - 1 else 0
    if prefix and name.startswith(prefix) and name[len(prefix) : len(prefix) + 1] in ("", "/", ":"):
        return len(prefix)
    return 0


def _entries(environ: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield all [[registry]], each with its file under ""; of two with one prefix the later one."""
    found: dict[str, dict[str, Any]] = {}
    for path, needed in _files(environ):
        for entry in _read(path, needed):
            found[_prefix(entry)] = {**entry, "": path}
    yield from found.values()


def _files(environ: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield the paths in order, each with whether it must exist."""
    own = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config/containers")
    if given := environ.get("CONTAINERS_REGISTRIES_CONF"):
        yield given, True
    else:
        user = os.path.join(own, _NAME)
        try:
            there = exists(user)
        except OSError as error:  # a registry may be blocked there
            raise RegistryError(f"{user} cannot be read: {reason(error)}", code="GPS-813") from error
        yield user if there else os.path.join(FOLDER, _NAME), False
    for folder in (FOLDER, own):
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), f"{_NAME}.d", "*.conf"))):
            yield path, False


def _read(path: str, needed: bool) -> list[dict[str, Any]]:
    try:
        with open_named(path) as file:
            data = file.read(_LARGEST)
    except FileNotFoundError as error:
        if needed:
            raise RegistryError(
                f"CONTAINERS_REGISTRIES_CONF names {path}: {reason(error)}", code="GPS-813"
            ) from error
        return []
    except OSError as error:
        raise RegistryError(f"{path} cannot be read: {reason(error)}", code="GPS-813") from error
    try:
        value = tomllib.loads(data.decode()).get("registry", [])
    except (ValueError, RecursionError) as error:
        raise RegistryError(f"{path} is not TOML: {error}", code="GPS-813") from error
    if not isinstance(value, list) or not all(_is_entry(each) for each in value):
        raise RegistryError(f"{path} has a [[registry]] that cannot be parsed", code="GPS-813")
    return value


def _is_entry(value: object) -> bool:
    if not isinstance(value, dict) or not _has_types(value) or not _prefix(value):
        return False
    mirrors = value.get("mirror", [])
    return isinstance(mirrors, list) and all(
        isinstance(each, dict) and _has_types(each) and each.get("location") for each in mirrors
    )


def _has_types(entry: Mapping[str, Any]) -> bool:
    """Whether the values that are used have the right types."""
    texts = ("prefix", "location", "pull-from-mirror")
    flags = ("insecure", "blocked", "mirror-by-digest-only")
    return all(isinstance(entry.get(key, ""), str) for key in texts) and all(
        isinstance(entry.get(key, False), bool) for key in flags
    )
