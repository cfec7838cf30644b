"""What a registry's responses mean, and whether it is a registry that responds.

A web server, a log-in page or a proxy may answer everything with 200. So a response is not believed if it
names another digest or another size than was asked for, or is a web page. It need not name them, because
registries omit much: some redirect the reader of a blob to an object store, which has no
Docker-Content-Digest, others have no Content-Length, and some give an empty response the type text/html. A
web page instead of content, or a status that the distribution-spec does not have there, shows that it is no
registry.
"""

from __future__ import annotations

import re

from gpusnap.oci.base.errors import NotARegistry
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.layout.digests import PREFIX
from gpusnap.oci.registry.http import Response, host_of
from gpusnap.oci.registry.refusals import printable

_LENGTH = compile_later(r"[0-9]{1,18}", re.ASCII)
_PAGES = ("text/html", "application/xhtml+xml")


def get_length(response: Response) -> int | None:
    """Return the length that a response declares; None if that is no number, or an impossible one."""
    text = response.header("Content-Length")
    return int(text) if _LENGTH.fullmatch(text) else None


def strip_parameters(header: str) -> str:
    """Return a Content-Type without its parameters."""
    return header.partition(";")[0].strip()


def get_digest(response: Response) -> str:
    """Return the digest that it declares for its content; "" if it declares none that is supported."""
    told = response.header("Docker-Content-Digest")
    return told if told.startswith(PREFIX) else ""


def confirms_blob(response: Response, wanted: str, size: int | None, what: str) -> bool:
    """Whether a response to HEAD, of status 200, means that the blob `wanted` exists completely.

    size: of the blob, None if not known. what: what was asked. Raises NotARegistry for a web page.
    """
    told = get_digest(response)
    if told:
        return told == wanted
    check_no_page(response, what)
    return size is None or get_length(response) in (None, size)


def check_no_page(response: Response, what: str) -> None:
    """Raise NotARegistry for a web page, which no registry returns as content; `what`: what was asked."""
    kind = strip_parameters(response.header("Content-Type")).lower()
    if kind in _PAGES and not get_digest(response):
        raise make_not_registry(host_of(response.url), f"it returned a web page ({kind})", what)


def make_not_registry(host: str, how: str, what: str) -> NotARegistry:
    """The error for a host that may be anything else; `how` says how that was detected."""
    return NotARegistry(f"{printable(host)} does not respond as a registry does: {how}; {what}")
