"""A registry's refusals as our errors: every status, and nothing of its text that harms."""

from __future__ import annotations

import email.utils
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.oci.base.errors import NotInRegistry, RegistryError, Rejected, Unauthorized
from gpusnap.oci.registry.refusals import is_worth_retrying, make_refusal, parse_retry_after, printable

WHAT = "r.example/a rejected the blob sha256:12"


def body(code: object, message: object) -> bytes:
    return json.dumps({"errors": [{"code": code, "message": message}]}).encode()


@pytest.mark.parametrize("status", range(400, 600))
def test_each_status(status: int) -> None:
    """Each status is worth another attempt, or is one kind of error."""
    again = status in (408, 429) or (status >= 500 and status != 501)
    assert is_worth_retrying(status) == again
    kinds: dict[int, type[RegistryError]] = {401: Unauthorized, 403: Unauthorized, 404: NotInRegistry}
    found = make_refusal(status, b"", WHAT)
    assert type(found) is kinds.get(status, Rejected)
    assert f"status {status}" in str(found)
    assert str(found).startswith(WHAT)
    assert getattr(found, "status", status) == status


def test_its_own_words() -> None:
    """The registry's code and message are shown, and the code can be asked for."""
    found = make_refusal(400, body("DIGEST_INVALID", "provided digest did not match"), WHAT)
    assert isinstance(found, Rejected)
    assert (found.says, found.code) == ("DIGEST_INVALID", "GPS-806")
    assert str(found) == f"{WHAT}: DIGEST_INVALID: provided digest did not match"
    assert "(DENIED: requested access" in str(make_refusal(403, body("DENIED", "requested access"), WHAT))


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>", b"[]", b"{}", b'{"errors":[]}', b'{"errors":[3]}', b'{"errors":{"0":1}}', b"[" * 99999],
)
def test_bodies_that_say_nothing(content: bytes) -> None:
    """Any body will do."""
    assert "status 400" in str(make_refusal(400, content, WHAT))


def test_words_that_podman_takes_for_its_own() -> None:
    """Registries like to say "permission denied"."""
    found = str(make_refusal(403, body("DENIED", "Permission Denied: No such file or directory"), WHAT))
    assert "access is refused: it does not exist" in found


@given(st.text(max_size=500) | st.integers() | st.lists(st.text()))
def test_printable(text: object) -> None:
    """What is shown of any text is one short printable line."""
    shown = printable(text, 100)
    assert len(shown) <= 100
    assert shown.isprintable()


def test_retry_after() -> None:
    """Seconds or a date; anything else, and a date that has passed, is no wait."""
    assert parse_retry_after("7") == 7
    assert parse_retry_after("  0 ") == 0
    ahead = parse_retry_after(email.utils.formatdate(time.time() + 60, usegmt=True))
    assert 50 < ahead <= 60
    for text in ("", "soon", "-3", "1e9", "9" * 99, "Thu, 01 Jan 1970 00:00:00 GMT", "Thu, 99 Foo 9999"):
        assert parse_retry_after(text) == 0
    for clock in (-3600, 0, 3600):  # of the registry: 20 s are 20 s
        now, then = (email.utils.formatdate(time.time() + clock + wait, usegmt=True) for wait in (0, 20))
        assert parse_retry_after(then, now) in (19, 20, 21)
    assert 50 < parse_retry_after(email.utils.formatdate(time.time() + 60, usegmt=True), "soon") <= 60
