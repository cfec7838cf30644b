"""Attempts, waits, redirects, TLS: what is tried again, who sees credentials, whose certificate counts."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
from fake_registry import FakeRegistry, NoAnswer, Say

from gpusnap.oci.base.errors import Cancelled, RegistryError, Unreachable
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.layout.reference import Reference
from gpusnap.oci.registry import client as client_module
from gpusnap.oci.registry.client import Client
from gpusnap.oci.registry.credentials import Credentials
from gpusnap.oci.registry.http import PIECE, Broken
from gpusnap.oci.registry.repository import Repository

DATA = random.Random(1).randbytes(3 << 16)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[FakeRegistry]:
    with FakeRegistry(tmp_path / "registry") as made:
        yield made
        assert made.wrong == []


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


@pytest.mark.parametrize("what", [Say(500), Say(502), Say(503), Say(504), Say(429), Say(408), NoAnswer()])
def test_tried_again(registry: FakeRegistry, what: Say | NoAnswer) -> None:
    """What may go better the next time is tried again, each time after a longer wait."""
    digest = registry.add_blob(DATA)
    registry.rule("HEAD", "", what, times=5)
    assert registry.repository().has_blob(digest)
    assert len(registry.seen) == 6
    assert 7.75 <= sum(registry.waits) <= 15.5


@pytest.mark.parametrize("what", [Say(501), Say(400), Say(403), Say(405), Say(416)])
def test_not_tried_again(registry: FakeRegistry, what: Say) -> None:
    """What will not go better is an error at once."""
    registry.rule("HEAD", "", what, times=5)
    with pytest.raises(RegistryError):
        registry.repository().has_blob(registry.add_blob(DATA))
    assert len(registry.seen) == 1
    assert registry.waits == []


def test_the_last_attempt(registry: FakeRegistry) -> None:
    """After the last one the error says how many there were and what the last one came to."""
    registry.rule("HEAD", "", Say(503), times=99)
    with pytest.raises(Unreachable, match=r"^127[0-9.:]+ answered 503; .* \(3 attempts\)$"):
        registry.repository(attempts=3).has_blob(registry.add_blob(DATA))
    assert len(registry.seen) == 3


def test_nobody_there() -> None:
    """A port that nobody listens on is an error in words."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            Repository(
                Reference(host, "a"), Client(host, plain_http=True, attempts=2, wait=lambda _: None)
            ) as repository,
            pytest.raises(
                Unreachable,
                match=rf"^{host}: nothing listens there .*refused\); .* \(2 attempts\)$",
            ),
        ):
            repository.has_blob("sha256:" + "0" * 64)


def test_nobody_there_and_never_was(registry: FakeRegistry) -> None:
    """A typo costs a second; a registry that has answered before, and is away, has all attempts."""
    waits: list[float] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{taken.getsockname()[1]}"
        client_module._MET.discard(f"http://{host}/v2/")  # another test may have had the port
        for words, attempts in (("2 attempts", 1), ("6 attempts", 5)):
            with (
                Repository(
                    Reference(host, "a"), Client(host, plain_http=True, wait=waits.append)
                ) as repository,
                pytest.raises(Unreachable, match=f"does not report whether it has the blob .*\\({words}\\)$"),
            ):
                repository.has_blob("sha256:" + "0" * 64, pushing=True)
            assert sum(waits) <= 0.5 * 2**attempts
            client_module._MET.add(f"http://{host}/v2/")


@pytest.mark.parametrize(
    "body",
    [b"Client sent an HTTP request to an HTTPS server.", b"The plain HTTP request was sent to HTTPS port"],
)
def test_plain_http_to_tls(registry: FakeRegistry, body: bytes) -> None:
    """A registry that speaks TLS says so in its own way: that is no refusal, and no second attempt helps."""
    for method in ("HEAD", "GET"):
        registry.rule(method, "", Say(400, {"Content-Length": str(len(body))}, body))
    with pytest.raises(Unreachable, match=rf"^{registry.host} speaks TLS, but was asked over plain HTTP; "):
        registry.repository().resolve("v1")
    assert [each.method for each in registry.seen] == ["HEAD", "GET"]


def test_no_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    """That nobody answers for names is another thing than a name that nobody has."""

    def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with (
        Repository(Reference("registry.example", "a"), Client("registry.example", attempts=1)) as repository,
        pytest.raises(Unreachable, match=r"^registry.example: the DNS server does not respond; .*1 attempt"),
    ):
        repository.has_blob("sha256:" + "0" * 64)


def test_a_name_that_nobody_has() -> None:
    """A host that is not known is an error in words."""
    with (
        Repository(
            Reference("nowhere.invalid:1", "a"), Client("nowhere.invalid:1", attempts=1)
        ) as repository,
        pytest.raises(Unreachable, match=r"nowhere.invalid:1: the host name is unknown"),
    ):
        repository.has_blob("sha256:" + "0" * 64)


def test_retry_after(registry: FakeRegistry) -> None:
    """The registry's wait is the shortest one; one of an hour is left to the caller."""
    digest = registry.add_blob(DATA)
    registry.rule("HEAD", "", Say(429, {"Retry-After": "17"}))
    assert registry.repository().has_blob(digest)
    assert sum(registry.waits) == 17
    registry.rule("HEAD", "", Say(503, {"Retry-After": "3600"}))
    with pytest.raises(Unreachable, match="asks to wait 3600 s before the next attempt: try again then"):
        registry.repository().has_blob(digest)
    assert sum(registry.waits) == 17


@pytest.mark.parametrize("clock", [-7200, 7200])
def test_retry_after_by_another_clock(registry: FakeRegistry, clock: float) -> None:
    """A date is one of the registry's clock."""
    digest = registry.add_blob(DATA)
    now = int(time.time()) + clock
    dates = {name: formatdate(at, usegmt=True) for name, at in (("Date", now), ("Retry-After", now + 17))}
    registry.rule("HEAD", "", Say(429, dates))
    assert registry.repository().has_blob(digest)
    assert sum(registry.waits) == 17


def test_waits() -> None:
    """Waits double up to a limit, with jitter; whoever wants an end has it within a second."""
    waits: list[float] = []
    client = Client("r.example", attempts=12, wait=waits.append)

    def attempt() -> None:
        waits.append(0)
        raise Broken("it broke")

    with pytest.raises(Unreachable):
        client.persist(attempt, "it")
    assert max(waits) <= 1
    sums = [0.0]
    for each in waits:
        if each:
            sums[-1] += each
        else:
            sums.append(0.0)
    for at, total in enumerate(sums[1:-1]):
        longest = min(30.0, 0.5 * 2**at)
        assert longest / 2 <= total <= longest
    assert len(sums) == 13

    def check() -> None:
        if len(waits) > 3:
            raise Cancelled("enough")

    waits.clear()
    with pytest.raises(Cancelled):
        client.persist(attempt, "it", check=check)
    assert len(waits) == 4


def test_attempts_that_bring_something() -> None:
    """An attempt that came further than ever by a MiB is not counted; going over old ground is."""
    client = Client("r.example", attempts=2, wait=lambda _: None)
    reached = iter([0, PIECE, 2 * PIECE, 3 * PIECE, 3 * PIECE + 5])
    now = [0, 0]

    def attempt() -> None:
        now[0], now[1] = next(reached), now[1] + 1
        raise Broken("it broke")

    with pytest.raises(Unreachable, match="2 attempts"):
        client.persist(attempt, "it", reached=lambda: now[0])
    assert now[1] == 5


def test_bad_luck() -> None:
    """While other calls go well, there are twice as many attempts."""
    client = Client("r.example", attempts=3, wait=lambda _: None)

    def attempt() -> None:
        client.persist(lambda: None, "another")
        raise Broken("it broke")

    with pytest.raises(Unreachable, match="6 attempts"):
        client.persist(attempt, "it")


def test_another_host_sees_no_credentials(registry: FakeRegistry, layout: Layout, tmp_path: Path) -> None:
    """A blob comes from the object store that the registry names, which gets no password."""
    registry.login, registry.users = "basic", {"someone": "words"}
    digest = registry.add_blob(DATA)
    with FakeRegistry(tmp_path / "registry") as store:
        registry.redirect = f"http://{store.host}/data/"
        repository = registry.repository(credentials=Credentials("someone", "words"))
        repository.fetch_blob(Descriptor("a/b", digest, len(DATA)), layout)
        assert ["authorization" in each.headers for each in store.seen] == [False]
    assert layout.has_blob(digest, len(DATA))


def test_the_same_host_does(registry: FakeRegistry, layout: Layout) -> None:
    """Within the registry, credentials go along."""
    registry.login, registry.users = "basic", {"someone": "words"}
    digest = registry.add_blob(DATA)
    registry.rule("GET", "/blobs/", Say(307, {"Location": f"/v2/other/blobs/{digest}"}), skip=1)
    registry.add_blob(DATA, "other")
    repository = registry.repository(credentials=Credentials("someone", "words"))
    repository.fetch_blob(Descriptor("a/b", digest, len(DATA)), layout)
    assert "authorization" in registry.asked("GET", "other")[0].headers


def test_no_end_of_redirects(registry: FakeRegistry) -> None:
    """A circle ends."""
    registry.rule("HEAD", "", Say(302, {"Location": "?again"}), times=99)
    with pytest.raises(RegistryError, match="more than 5 redirects"):
        registry.repository().has_blob(registry.add_blob(DATA))
    assert len(registry.seen) == 6


@pytest.mark.parametrize("location", ["http://h.example/x", "ftp://h.example/", "", "https://[x/"])
def test_no_way_out_of_tls(location: str) -> None:
    """With TLS, nothing leads to where there is none."""
    client = Client("r.example")
    with pytest.raises(RegistryError, match="an address without TLS, or to no valid address"):
        client.resolve_location("https://r.example/v2/a/blobs/x", location)
    assert client.resolve_location("https://r.example/v2/x", "../y?z=%3D&a") == "https://r.example/y?z=%3D&a"


def test_docker_hub() -> None:
    """Docker Hub's registry is at another host than its references say."""
    assert Client("docker.io").base == "https://registry-1.docker.io/v2/"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and certificate of 127.0.0.1 in one file, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path_factory.mktemp("certificate")
    key, out = folder / "key.pem", folder / "certificate.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    argv = ["openssl", "req", "-x509", *kind, *name, "-keyout", str(key), "-out", str(out)]
    subprocess.run(argv, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_bytes(key.read_bytes() + out.read_bytes())
    return both


def test_tls(tmp_path: Path, certificate: Path) -> None:
    """A certificate must be of a CA that is trusted, and of this host; one attempt is enough to see that."""
    ca = certificate.with_name("certificate.pem")
    with FakeRegistry(tmp_path / "registry", certificate=certificate) as registry:
        digest = registry.add_blob(DATA)
        assert registry.repository(plain_http=False, ca_file=str(ca)).has_blob(digest)
        with pytest.raises(
            Unreachable, match=r"of 127.0.0.1:\d+ is not trusted \(self.signed certificate\): add its CA"
        ):
            registry.repository(plain_http=False).has_blob(digest)
        other = Reference(registry.host.replace("127.0.0.1", "localhost"), "team/app")
        with (
            Repository(
                other, Client(other.registry, ca_file=str(ca), wait=registry.waits.append)
            ) as repository,
            pytest.raises(Unreachable, match=r"of localhost:\d+ is not trusted \([Hh]ostname "),
        ):
            repository.has_blob(digest)
        assert registry.waits == []


def test_plain_http_only_when_said(registry: FakeRegistry) -> None:
    """A registry without TLS is not spoken to, on this host neither, and the message says what to ask for."""
    with pytest.raises(
        Unreachable, match=r"does not speak TLS; plain HTTP, .*, has to be requested explicitly"
    ):
        registry.repository(plain_http=False).has_blob(registry.add_blob(DATA))
    assert registry.waits == []


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_a_ca_file_that_is_none(tmp_path: Path, content: str | None) -> None:
    """A CA file that cannot serve is an error before anything is sent."""
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(
        RegistryError, match=r"the CA file .*ca.pem (cannot be read: it does|contains no cert)"
    ):
        Client("r.example", ca_file=str(path))


@pytest.mark.parametrize(
    "location",
    [
        "https://evil.example\\@r.example/x",
        "https://evil.example\\.r.example/x",
        "https://r.example@evil.example/x",
        "https://someone:words@r.example/x",
        "https://r.example /x",
        "https://r.example\t/x",
        "https://r.example/\x7f",
        "https://r.ex\u00e4mple/x",
        "//evil.example\\@r.example/x",
    ],
)
def test_locations_of_two_meanings(location: str) -> None:
    """Where one parser of URLs may see another host than the next one, nobody goes."""
    client = Client("r.example")
    with pytest.raises(RegistryError, match="an address without TLS, or to no valid address"):
        client.resolve_location("https://r.example/v2/a/blobs/x", location)


def test_a_password_for_another_host(registry: FakeRegistry, tmp_path: Path) -> None:
    """A redirection that seems to lead to the registry itself takes no password elsewhere."""
    registry.login, registry.users = "basic", {"someone": "words"}
    digest = registry.add_blob(DATA)
    with FakeRegistry(tmp_path / "other") as other:
        there = {"Location": f"http://{other.host}\\@{registry.host}/steal"}
        registry.rule("HEAD", "blobs", Say(307, there), skip=1)
        repository = registry.repository(credentials=Credentials("someone", "words"))
        with pytest.raises(RegistryError, match="to no valid address"):
            repository.has_blob(digest)
        assert other.seen == []
