"""What the answers of a registry say, and whether it is a registry that gives them.

A web server, a log-in page or a proxy may answer everything with 200. So an answer is believed for what only
a registry says in it: the digest, or the size, that was asked for. Registries leave out much: some send the
reader of a blob on to a store of objects, which has no Docker-Content-Digest, others have no Content-Length,
and some give an empty answer the type text/html. What speaks for no registry is a web page in the place of
content, or a status that the distribution-spec does not have there.
"""

from __future__ import annotations

import re

from gpusnap.oci.base.errors import NotARegistry
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.layout.digests import PREFIX
from gpusnap.oci.registry.http import Answer, host_of
from gpusnap.oci.registry.responses import printable

_LENGTH = compile_later(r"[0-9]{1,18}", re.ASCII)
_PAGES = ("text/html", "application/xhtml+xml")


def length(answer: Answer) -> int | None:
    """What an answer says of its length; None where that is no number, or one as no body has."""
    text = answer.header("Content-Length")
    return int(text) if _LENGTH.fullmatch(text) else None


def media_type(header: str) -> str:
    """A Content-Type without its parameters."""
    return header.partition(";")[0].strip()


def digest(answer: Answer) -> str:
    """The digest that it says its content has; "" where it says none that is read here."""
    told = answer.header("Docker-Content-Digest")
    return told if told.startswith(PREFIX) else ""


def has(answer: Answer, wanted: str, size: int | None, what: str) -> bool:
    """Whether an answer to HEAD, of status 200, means that the blob `wanted` is there, whole.

    size: of the blob, None where nobody knows. what: says what was asked. Raises NotARegistry for a web page.
    """
    told = digest(answer)
    if told:
        return told == wanted
    check_no_page(answer, what)
    return size is None or length(answer) in (None, size)


def check_no_page(answer: Answer, what: str) -> None:
    """Raise NotARegistry for a web page, which no registry gives for content; `what` says what was asked."""
    kind = media_type(answer.header("Content-Type")).lower()
    if kind in _PAGES and not digest(answer):
        raise no_registry(host_of(answer.url), f"it returned a web page ({kind})", what)


def no_registry(host: str, how: str, what: str) -> NotARegistry:
    """The error for a host that may be anything else; `how` says by what that is seen."""
    return NotARegistry(f"{printable(host)} does not respond as a registry does: {how}; {what}")
