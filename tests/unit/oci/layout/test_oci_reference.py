"""References: what is one, what is none, and that nothing is guessed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.oci.base.errors import RegistryError
from gpusnap.oci.layout.reference import Reference, parse

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("registry.example/app", Reference("registry.example", "app")),
        ("registry.example/team/app:v1", Reference("registry.example", "team/app", "v1")),
        ("localhost/app:v1", Reference("localhost", "app", "v1")),
        ("localhost:5000/a/b/c:1", Reference("localhost:5000", "a/b/c", "1")),
        ("h:5000/a", Reference("h:5000", "a")),
        (f"[::1]:5000/a@{DIGEST}", Reference("[::1]:5000", "a", "", DIGEST)),
        (f"[fe80::1]/a:t@{DIGEST}", Reference("[fe80::1]", "a", "t", DIGEST)),
        ("10.0.0.1:443/a-b__c.d_e/f--g:T_1.2-3", Reference("10.0.0.1:443", "a-b__c.d_e/f--g", "T_1.2-3")),
        ("Registry.Example/app:_", Reference("Registry.Example", "app", "_")),
    ],
)
def test_parts(text: str, wanted: Reference) -> None:
    """Each part is found, and together they are the text again."""
    assert parse(text) == wanted
    assert str(parse(text)) == text


def test_a_transport() -> None:
    """As skopeo and podman have it."""
    assert parse("docker://r.example/app:v1") == parse("r.example/app:v1")
    with pytest.raises(RegistryError, match="without a scheme"):
        parse("docker://https://r.example/app:v1")


@pytest.mark.parametrize("text", ["app", "app:v1", "team/app:v1", "library/app", "", "/a", "HOST/app"])
def test_no_registry(text: str) -> None:
    """Without a host that looks like one it is not guessed; the message says what one looks like."""
    with pytest.raises(RegistryError, match=r"names no registry: .* has a dot or a port or is localhost"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("https://r.example/a", "without a scheme"),
        ("r.example/", "not a valid repository name: use"),
        ("r.example/A", "lower-case"),
        ("r.example/a//b", "not a valid repository name: use"),
        ("r.example/a___b", "not a valid repository name: use"),
        ("r.example/a/", "not a valid repository name: use"),
        ("r.example/../a", "not a valid repository name: use"),
        ("r.example/a:", "is not a valid tag"),
        ("r.example/a:.b", "is not a valid tag"),
        ("r.example/a:" + "x" * 129, "is not a valid tag"),
        ("r.example/a:b:c", "is not a valid tag"),
        ("r.example/a@", "is not a digest"),
        ("r.example/a@sha256:12", "is not a sha256 digest"),
        ("r.example:0/a", "is not"),
        ("r.example:65536/a", "is not"),
        ("r.example:/a", "is not"),
        ("user@r.example/a", "is not"),
        ("-r.example/a", "is not"),
        ("::1/a", "is not"),
        ("r.example/" + "a" * 250, "more than 255"),
        ("r.example/a\n", "not a valid repository name: use"),
        ("r.example/a:b\n", "is not a valid tag"),
    ],
)
def test_none(text: str, message: str) -> None:
    """What is no reference is refused in one line that shows it and says why."""
    with pytest.raises(RegistryError, match=message) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


@given(st.text(st.sampled_from("aA0.:/@-_[] \n%é") | st.characters(), max_size=40))
def test_any_text(text: str) -> None:
    """Any text is a reference that prints as itself, or is refused."""
    try:
        found = parse("r.example/" + text)
    except RegistryError:
        return
    assert str(found) == "r.example/" + text
    assert re.fullmatch(r"[\x21-\x7e]+", str(found))
