"""Proxies: which request goes through which one, and that it does."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_registry import FakeRegistry

from gpusnap.oci.base.errors import RegistryError, Unreachable
from gpusnap.oci.layout.reference import Reference
from gpusnap.oci.registry.client import Client
from gpusnap.oci.registry.proxies import proxy_for
from gpusnap.oci.registry.repository import Repository

PROXY = "http://proxy.example:3128"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without proxies."""
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_by_the_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scheme has its own; one without a scheme of its own speaks HTTP."""
    assert proxy_for("https://r.example/v2/") == ""
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    assert proxy_for("https://r.example/v2/") == PROXY
    assert proxy_for("http://r.example/v2/") == ""
    monkeypatch.setenv("http_proxy", "proxy.example:3129")
    assert proxy_for("http://r.example/v2/") == "http://proxy.example:3129"


@pytest.mark.parametrize(
    "host",
    [
        "localhost:5000",
        "127.0.0.2",
        "[::1]:5000",
        "r.example",
        "r.example:5000",
        "a.domain.example",
        "other.example:5001",
        "10.1.2.3:5000",
        "[fd00::1]",
    ],
)
def test_what_goes_straight(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """This host, and what NO_PROXY names: hosts, domains, host:port and networks."""
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", "r.example, .domain.example,other.example:5001,10.0.0.0/8,fd00::/8,x/y")
    assert proxy_for(f"https://{host}/v2/") == ""


@pytest.mark.parametrize("host", ["not-r.example", "other.example:5002", "11.1.2.3", "[fe00::1]"])
def test_what_does_not(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """What is only near to that does go through the proxy."""
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", "r.example, .domain.example,other.example:5001,10.0.0.0/8,fd00::/8,x/y")
    assert proxy_for(f"https://{host}/v2/") == PROXY


def test_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go through it, with its user and password for it alone."""
    with FakeRegistry(tmp_path / "proxy") as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://someone:w%40rds@{proxy.host}")
        digest = proxy.add_blob(b"data")
        with Repository(
            Reference("r.example", "team/app"), Client("r.example", plain_http=True)
        ) as repository:
            assert repository.has_blob(digest)
        [seen] = proxy.seen
        assert seen.path == f"http://r.example/v2/team/app/blobs/{digest}"
        assert seen.headers["proxy-authorization"] == "Basic c29tZW9uZTp3QHJkcw=="
        assert "authorization" not in seen.headers


@pytest.mark.parametrize(
    ("proxy", "error", "message"),
    [
        ("socks5://s:words@proxy.example:1080", RegistryError, "the proxy 'proxy.example:1080' from the env"),
        ("http://someone:words@127.0.0.1:1", Unreachable, "r.example through the proxy 127.0.0.1:1: "),
    ],
)
def test_a_proxy_that_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, proxy: str, error: type[Exception], message: str
) -> None:
    """The error names the proxy, and not its password."""
    monkeypatch.setenv("HTTP_PROXY", proxy)
    reference = Reference("r.example", "a")
    with Repository(reference, Client(reference.registry, plain_http=True, attempts=1)) as repository:
        with pytest.raises(error, match=message) as raised:
            repository.has_blob(f"sha256:{0:064}")
        assert "words" not in str(raised.value)
