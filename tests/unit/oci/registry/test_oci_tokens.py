"""Being let in: challenges of all shapes, passwords, tokens by scope, and what is said when it fails."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_registry import FakeRegistry, Say
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.oci.base.errors import RegistryError, Unauthorized
from gpusnap.oci.registry.auth import Challenge, Tokens, challenges
from gpusnap.oci.registry.credentials import Credentials
from gpusnap.oci.registry.http import make_pool

WORDS = "the-secret-words"
SOMEONE = Credentials("someone", WORDS, source="/auth.json")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[FakeRegistry]:
    with FakeRegistry(tmp_path / "registry") as made:
        made.users = {"someone": WORDS}
        yield made
        assert made.wrong == []


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ()),
        ("Basic", (Challenge("basic"),)),
        ('Basic realm="a, b=\\"c\\""', (Challenge("basic", {"realm": 'a, b="c"'}),)),
        (
            'Bearer realm="https://t.example/x?y=z",Service=s , scope="repository:a:pull,push"',
            (
                Challenge(
                    "bearer",
                    {"realm": "https://t.example/x?y=z", "service": "s", "scope": "repository:a:pull,push"},
                ),
            ),
        ),
        (
            'Negotiate, Basic realm=x, BEARER realm="y",realm="z"',
            (Challenge("negotiate"), Challenge("basic", {"realm": "x"}), Challenge("bearer", {"realm": "y"})),
        ),
        ('Bearer realm="never ends', (Challenge("bearer"),)),
    ],
)
def test_challenges(text: str, wanted: tuple[Challenge, ...]) -> None:
    """One header holds any number of them, with commas within and between."""
    found = challenges(text)
    assert found[: len(wanted)] == wanted


@given(st.text(st.sampled_from('ab =,"\\\t') | st.characters(), max_size=200))
def test_any_challenge(text: str) -> None:
    """Any header is some challenges, or none."""
    for each in challenges(text):
        assert each.scheme == each.scheme.lower()


def test_a_header_of_blanks() -> None:
    """What a registry may send is read in one pass: tried in all ways, 64 KiB of blanks take minutes."""
    begin = time.process_time()
    for end in ("\x01", "a\x01", 'a="', ", ,"):
        assert challenges(f"Bearer a=b{' ' * 15_000}{end}")[0] == Challenge("bearer", {"a": "b"})
    assert time.process_time() - begin < 5


def test_basic(registry: FakeRegistry) -> None:
    """The password goes along after the registry has asked for it, and from then on at once."""
    registry.login = "basic"
    digest = registry.add_blob(b"data")
    repository = registry.repository(credentials=SOMEONE)
    assert repository.has_blob(digest)
    assert repository.has_blob(digest)
    assert ["authorization" in each.headers for each in registry.seen] == [False, True, True]


@pytest.mark.parametrize("login", ["basic", "bearer"])
def test_a_wrong_password(registry: FakeRegistry, login: str) -> None:
    """It is tried once; the message names where it comes from, and not what it is."""
    registry.login = login
    wrong = Credentials("someone", "other-" + WORDS, source="/auth.json")
    with pytest.raises(
        Unauthorized, match=r"does not accept the credentials of /auth.json: log in again"
    ) as caught:
        registry.repository(credentials=wrong).has_blob(registry.add_blob(b"data"))
    assert WORDS not in str(caught.value)
    assert len(registry.seen) == 2
    assert registry.waits == []


def test_no_password(registry: FakeRegistry) -> None:
    """The message says which registry to log in to."""
    registry.login = "basic"
    with pytest.raises(
        Unauthorized, match=rf"none are known for it: log in first \(podman login {registry.host}"
    ):
        registry.repository().has_blob(registry.add_blob(b"data"))


def test_a_token_for_each_scope(registry: FakeRegistry) -> None:
    """Reading asks for less than writing; each token is fetched once and serves again."""
    registry.login = "bearer"
    digest = registry.add_blob(b"data")
    repository = registry.repository(credentials=SOMEONE)
    for _ in range(3):
        assert repository.has_blob(digest)
    content = json.dumps({"config": {"digest": digest}, "layers": []}).encode()
    for _ in range(2):
        repository.put_manifest(content, "a/b", "v1")
    asked = registry.asked("GET", "^/token")
    assert ["pull%2Cpush" in each.path for each in asked] == [False, True]
    assert all("service=fake" in each.path and "account=someone" in each.path for each in asked)
    # One request was made without; none after that.
    assert len([each for each in registry.seen if "authorization" not in each.headers]) == 1


def test_no_token_needs_no_password(registry: FakeRegistry) -> None:
    """Who has no password asks for a token without one."""
    registry.login, registry.users = "bearer", {}
    assert registry.repository().has_blob(registry.add_blob(b"data"))


def test_an_identity_token(registry: FakeRegistry) -> None:
    """It goes to the token service by POST, and never to the registry."""
    registry.login, registry.identity_token = "bearer", "an-identity"
    repository = registry.repository(credentials=Credentials(identity_token="an-identity"))
    assert repository.has_blob(registry.add_blob(b"data"))
    assert len(registry.asked("POST", "^/token")) == 1
    assert registry.asked("GET", "^/token") == []


def test_a_token_that_is_refused_is_fetched_anew_once(registry: FakeRegistry) -> None:
    """A token that ended before its time costs one more request; one that never serves is an error."""
    registry.login = "bearer"
    digest = registry.add_blob(b"data")
    repository = registry.repository(credentials=SOMEONE)
    assert repository.has_blob(digest)
    registry.tokens.clear()
    assert repository.has_blob(digest)
    assert len(registry.asked("GET", "^/token")) == 2
    challenge = {"WWW-Authenticate": f'Bearer realm="http://{registry.host}/token",service="fake"'}
    registry.rule("HEAD", "blobs", Say(401, challenge), times=99)
    with pytest.raises(Unauthorized, match="access denied"):
        repository.has_blob(digest)
    assert len(registry.asked("HEAD")) == 6


@pytest.mark.parametrize("status", [500, 429])
def test_a_token_service_that_is_busy(registry: FakeRegistry, status: int) -> None:
    """It is asked again, like a registry."""
    registry.login = "bearer"
    registry.rule("GET", "^/token", Say(status), times=2)
    assert registry.repository(credentials=SOMEONE).has_blob(registry.add_blob(b"data"))
    assert len(registry.waits) >= 2


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{}",
        b'{"token":3}',
        b'{"token":""}',
        b'{"token":"a b"}',
        b'{"token":"a\\r\\nX: y"}',
        b"\xff",
    ],
)
def test_a_token_service_that_gives_none(registry: FakeRegistry, answer: bytes) -> None:
    """What is no token is not sent on."""
    registry.login = "bearer"
    registry.rule("GET", "^/token", Say(200, {}, answer))
    with pytest.raises(RegistryError, match="responded without a token"):
        registry.repository(credentials=SOMEONE).has_blob(registry.add_blob(b"data"))


@pytest.mark.parametrize("realm", ["http://127.0.0.1:9/token", "ftp://t.example/", "/token", "https://[", ""])
def test_a_realm_without_tls(registry: FakeRegistry, realm: str) -> None:
    """A registry spoken to with TLS names a token service with TLS; else no password goes there."""
    tokens = Tokens("r.example", make_pool(), credentials=SOMEONE)
    with pytest.raises(Unauthorized, match="names a token service without TLS, which is sent no credentials"):
        tokens.answer_challenge("", f'Bearer realm="{realm}",service="s"', ("repository:a:pull",))


def test_an_unknown_scheme(registry: FakeRegistry) -> None:
    """A way in that is not known here is named as none."""
    registry.rule("HEAD", "", Say(401, {"WWW-Authenticate": "Negotiate"}))
    with pytest.raises(Unauthorized, match="no supported authentication scheme"):
        registry.repository(credentials=SOMEONE).has_blob(registry.add_blob(b"data"))


def test_tokens_end(registry: FakeRegistry) -> None:
    """A token is fetched anew some time before it ends; one without a time serves for a minute."""
    now = [0.0]
    pool = make_pool()
    tokens = Tokens(registry.host, pool, credentials=SOMEONE, plain_http=True, clock=lambda: now[0])
    scopes = ("repository:a:pull",)
    first = tokens.answer_challenge("", f'Bearer realm="http://{registry.host}/token",service="fake"', scopes)
    now[0] = 40
    assert tokens.header(scopes) == first
    now[0] = 46
    assert tokens.header(scopes) != first
    pool.clear()


@pytest.mark.parametrize(
    ("credentials", "refused"),
    [(SOMEONE, True), (Credentials(identity_token="an-identity"), True), (None, False)],
)
def test_a_realm_without_tls_on_another_host(
    registry: FakeRegistry, credentials: Credentials | None, refused: bool
) -> None:
    """Of a registry without TLS only its own host gets a password; another is asked without one."""
    registry.users = {}
    # The same machine, which answers there too; but the registry is known by another name.
    realm = f"http://{registry.host}/token"
    tokens = Tokens("localhost:5000", make_pool(), credentials=credentials, plain_http=True)
    challenge = f'Bearer realm="{realm}",service="fake"'
    if refused:
        with pytest.raises(Unauthorized, match=f"on another host, .* no credentials: {registry.host}"):
            tokens.answer_challenge("", challenge, ("repository:a:pull",))
        assert registry.seen == []
        return
    assert tokens.answer_challenge("", challenge, ("repository:a:pull",)).startswith("Bearer ")
    assert "authorization" not in registry.seen[0].headers


def test_a_realm_without_tls_on_another_port(registry: FakeRegistry) -> None:
    """The registry's own host may have its token service at another port."""
    tokens = Tokens("127.0.0.1:1", make_pool(), credentials=SOMEONE, plain_http=True)
    challenge = f'Bearer realm="http://{registry.host}/token",service="fake"'
    assert tokens.answer_challenge("", challenge, ("repository:a:pull",)).startswith("Bearer ")


@pytest.mark.parametrize(
    "realm", ["https://evil.example\\@t.example/", "https://a:b@t.example/", "https://t /"]
)
def test_a_realm_of_two_meanings(realm: str) -> None:
    """A token service that one may take for another host gets no password."""
    tokens = Tokens("r.example", make_pool(), credentials=SOMEONE)
    # Within quotes a backslash stands for what follows it.
    quoted = realm.replace("\\", "\\\\")
    with pytest.raises(Unauthorized, match="sent no credentials: it has no address"):
        tokens.answer_challenge("", f'Bearer realm="{quoted}",service="s"', ("repository:a:pull",))


def serving(registry: FakeRegistry, seconds: str) -> str:
    """What a token that serves so long is given for."""
    answer = b'{"token":"words","expires_in":%s}' % seconds.encode()
    registry.rule("GET", "^/token", Say(200, {}, answer))
    registry.tokens["words"] = "repository:a:pull"
    pool = make_pool()
    tokens = Tokens(registry.host, pool, plain_http=True)
    challenge = f'Bearer realm="http://{registry.host}/token",service="fake"'
    try:
        return tokens.answer_challenge("", challenge, ("repository:a:pull",))
    finally:
        pool.clear()


@pytest.mark.parametrize("seconds", ["1" + "0" * 400, "-1", "true", '"60"'])
def test_odd_times(registry: FakeRegistry, seconds: str) -> None:
    """However long a token is said to serve, it serves now."""
    assert serving(registry, seconds) == "Bearer words"


@pytest.mark.parametrize("seconds", ["1e999", "NaN", "Infinity"])
def test_times_that_are_no_json(registry: FakeRegistry, seconds: str) -> None:
    """Such an answer is none."""
    with pytest.raises(RegistryError, match="responded without a token"):
        serving(registry, seconds)
