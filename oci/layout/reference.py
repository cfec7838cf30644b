"""References to something in a registry, such as "registry.example:5000/team/app:v1".

    HOST[:PORT]/NAME[/NAME…][:TAG][@DIGEST]

Names and tags are those of distribution-spec v1.1, "Pulling manifests"; hosts are those of distribution's
grammar (github.com/distribution/reference). Each tool has another default registry, so the host is required,
and must look like one.
"""

from __future__ import annotations

import re

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import DigestError, RegistryError
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.layout.digests import check_digest

PLAIN_HTTP = "http://"
"""Before a reference: its registry is spoken to without TLS."""
TRANSPORT = "docker://"
"""The optional prefix of skopeo and podman before a reference; it has no meaning here."""
LATEST = "latest"
"""The tag of a reference without one."""
# distribution-spec: many clients allow 255 characters for host and name together.
_LONGEST = 255
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = compile_later(rf"{_PART}(?:/{_PART})*", re.ASCII)
_TAG = compile_later(r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}", re.ASCII)
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST = compile_later(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[a-fA-F0-9:.]{{2,45}}\])(?::([0-9]{{1,5}}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reference:
    """A repository of a registry and, unless both are empty, a tag, a digest, or both."""

    registry: str
    """host, host:port or [IPv6 address]:port"""
    repository: str
    tag: str = ""
    digest: str = ""

    @property
    def name(self) -> str:
        """The registry and its repository."""
        return f"{self.registry}/{self.repository}"

    @property
    def wanted(self) -> str:
        """The digest, or else the tag, that a registry is asked for."""
        return self.digest or self.tag or LATEST

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return self.name + tag + (f"@{self.digest}" if self.digest else "")


def parse_plain(text: str) -> tuple[Reference, bool]:
    """Like `parse`, with an optional http:// before it; also return whether it was there: no TLS then."""
    return parse(text.removeprefix(PLAIN_HTTP)), text.startswith(PLAIN_HTTP)


def parse(text: str) -> Reference:
    """Parse a reference, and check its parts. Raises RegistryError."""
    shown = repr(text[:300])
    text = text.removeprefix(TRANSPORT)
    if "://" in text:
        raise RegistryError(
            f"{shown} is not a valid reference: it must begin with its registry, without a scheme",
            code="GPS-807",
        )
    registry, slash, rest = text.partition("/")
    rest, at, digest = rest.partition("@")
    repository, colon, tag = rest.partition(":")
    if not slash or not ("." in registry or ":" in registry or registry == "localhost"):
        raise RegistryError(
            f"{shown} names no registry: a reference begins with the registry's host, "
            "which has a dot or a port or is localhost, such as registry.example/app:v1",
            code="GPS-807",
        )
    port = _HOST.fullmatch(registry)
    if port is None or int(port[1] or 1) not in range(1, 1 << 16):
        raise RegistryError(
            f"{shown} is not a valid reference: {registry[:80]!r} is not a registry host", code="GPS-807"
        )
    try:
        check_repository(repository)
        if colon:
            check_tag(tag)
        if at:
            check_digest(digest)
    except (RegistryError, DigestError) as error:
        raise RegistryError(f"{shown} is not a valid reference: {error}", code="GPS-807") from error
    found = Reference(registry, repository, tag, digest)
    if len(found.name) > _LONGEST:
        raise RegistryError(
            f"{shown} is not a valid reference: host and name have more than {_LONGEST} characters",
            code="GPS-807",
        )
    return found


def check_repository(text: str) -> str:
    """Return `text` as the name of a repository. Raises RegistryError."""
    if len(text) > _LONGEST or not _NAME.fullmatch(text):
        raise RegistryError(
            f"{text[:80]!r} is not a valid repository name: use lower-case letters and digits, with "
            "single . or _ or -, or / between them",
            code="GPS-807",
        )
    return text


def check_tag(text: str) -> str:
    """Return `text` as a tag. Raises RegistryError."""
    if not is_tag(text):
        raise RegistryError(
            f"{text[:80]!r} is not a valid tag: use up to 128 letters, digits, _, . or -, but not . or - "
            "first",
            code="GPS-807",
        )
    return text


def is_tag(text: str) -> bool:
    """Whether a text can be a tag."""
    return _TAG.fullmatch(text) is not None
