"""Digests in the image spec's format: "sha256:" and 64 hex digits (image-spec, descriptor.md, Digests)."""

from __future__ import annotations

import hashlib
import re

from gpusnap.oci.base.errors import DigestError
from gpusnap.oci.base.patterns import compile_later

PREFIX = "sha256:"

# descriptor.md: algorithm components of [a-z0-9]+ between [+._-], a colon, then [a-zA-Z0-9=_-]+.
_GRAMMAR = compile_later(r"[a-z0-9]+(?:[+._-][a-z0-9]+)*:[a-zA-Z0-9=_-]+", re.ASCII)
_SHA256 = compile_later(r"sha256:[a-f0-9]{64}", re.ASCII)
_LONGEST = 512


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of `data`. From 2 KiB on, hashlib lets other threads run meanwhile."""
    return PREFIX + hashlib.sha256(data).hexdigest()


def check_digest(text: object) -> str:
    """Return `text` as a digest of any algorithm. Raises DigestError if the grammar does not allow it."""
    if not isinstance(text, str) or len(text) > _LONGEST or not _GRAMMAR.fullmatch(text):
        raise DigestError(f"{str(text)[:80]!r} is not a digest")
    if text.startswith(PREFIX) and not _SHA256.fullmatch(text):
        raise DigestError(f"{text[:80]!r} is not a sha256 digest")
    return text


def get_hex(digest: str) -> str:
    """Return the hex digits of a sha256 digest, which name its blob. Raises DigestError for any other."""
    if not _SHA256.fullmatch(digest):
        raise DigestError(f"{digest[:80]!r} is not a sha256 digest")
    return digest.removeprefix(PREFIX)
