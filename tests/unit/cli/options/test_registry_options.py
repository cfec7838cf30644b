"""How a registry is spoken to: --tls-verify, --creds, --authfile, and registries.conf."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_registry import FakeRegistry, Rule, Say
from kept_checkpoints import an_archive

from gpusnap.cli import main as cli
from gpusnap.oci.base.environment import TLS_VERIFY
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError


@pytest.fixture(autouse=True)
def archive(host_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint; this host has no registries.conf."""
    (tmp_path / "registries.conf").touch()
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(tmp_path / "registries.conf"))
    monkeypatch.delenv(TLS_VERIFY, raising=False)
    return an_archive(tmp_path)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[FakeRegistry]:
    with FakeRegistry(tmp_path / "registry") as found:
        yield found


@pytest.fixture
def with_tls(tmp_path: Path) -> Iterator[FakeRegistry]:
    """One whose certificate nobody trusts."""
    pem = tmp_path / "both.pem"
    made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=x")
    subprocess.run([*made, "-keyout", pem, "-out", f"{pem}.crt"], check=True, capture_output=True)
    pem.write_bytes(pem.read_bytes() + Path(f"{pem}.crt").read_bytes())
    with FakeRegistry(tmp_path / "registry", certificate=pem) as found:
        yield found


def ran(*words: str) -> Result:
    return CliRunner().invoke(cli.command, words, catch_exceptions=False)


def test_without_tls(registry: FakeRegistry, archive: str) -> None:
    """A registry without TLS is spoken to where nobody has to verify any; true is what holds without it."""
    ref = f"{registry.host}/team/app:v1"
    for words in ((), ("--tls-verify=true",), ("--tls-verify",)):
        with pytest.raises(GpusnapError, match="does not speak TLS"):
            ran("push", archive, ref, *words)
    assert ran("push", archive, ref, "--tls-verify=false").exit_code == 0
    for command in ("inspect", "verify", "pull", "ls"):
        word = ref.rpartition(":")[0] if command == "ls" else ref
        assert ran(command, "--tls-verify=false", word).exit_code == 0
    assert TLS_VERIFY not in os.environ


def test_a_certificate_that_is_not_trusted(with_tls: FakeRegistry, archive: str) -> None:
    """It is taken without a look at it, and TLS is spoken all the same."""
    ref = f"{with_tls.host}/team/app:v1"
    with pytest.raises(GpusnapError, match="is not trusted"):
        ran("push", archive, ref)
    assert ran("push", archive, ref, "--tls-verify=false").exit_code == 0


def test_creds(registry: FakeRegistry, archive: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are for the registries of the command line, and nowhere else afterwards."""
    registry.login, registry.users = "basic", {"me": "secret:1"}
    ref = f"http://{registry.host}/team/app:v1"
    with pytest.raises(GpusnapError):
        ran("push", archive, ref)
    before = os.environ["REGISTRY_AUTH_FILE"]
    assert ran("push", archive, ref, "--creds", "me:secret:1").exit_code == 0
    with pytest.raises(GpusnapError, match="does not accept"):
        ran("inspect", ref, "--creds", "me:other")
    assert os.environ["REGISTRY_AUTH_FILE"] == before
    assert registry.wrong == []


def test_authfile(registry: FakeRegistry, archive: str, tmp_path: Path) -> None:
    """That file, and no other."""
    registry.login, registry.users = "basic", {"me": "secret"}
    auth = base64.b64encode(b"me:secret").decode()
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
    ref = f"http://{registry.host}/team/app:v1"
    assert ran("push", archive, ref, "--authfile", str(path)).exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--authfile", "/none"], "there is no file /none"),
        (["--creds", "me"], "has no password"),
        (["--creds", "me:x", "--authfile", "/none"], "cannot be combined"),
    ],
)
def test_wrong_lines(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ran("inspect", "registry.example/w:v1", *words)


def test_creds_without_a_registry() -> None:
    with pytest.raises(UsageError, match="no argument names one"):
        ran("inspect", "w", "--creds", "me:x")


def test_registries_conf(registry: FakeRegistry, archive: str, tmp_path: Path) -> None:
    """Insecure, in another place, with mirrors, blocked: without any option."""
    conf = tmp_path / "registries.conf"
    conf.write_text(f'[[registry]]\nlocation = "{registry.host}"\ninsecure = true\n')
    ref = f"{registry.host}/team/app:v1"
    assert ran("push", archive, ref).exit_code == 0
    with pytest.raises(GpusnapError, match="does not speak TLS"):
        ran("inspect", ref, "--tls-verify=true")
    conf.write_text(
        f'[[registry]]\nprefix = "hub.example"\nlocation = "{registry.host}"\ninsecure = true\n'
        f'[[registry.mirror]]\nlocation = "{registry.host}/none"\ninsecure = true\n'
        '[[registry]]\nprefix = "far.invalid"\nlocation = "far.invalid"\n'
        f'[[registry.mirror]]\nlocation = "{registry.host}"\ninsecure = true\n'
        '[[registry]]\nlocation = "bad.example"\nblocked = true\n'
    )
    assert ran("inspect", "hub.example/team/app:v1").exit_code == 0
    assert ran("pull", "far.invalid/team/app:v1").stdout.startswith("far.invalid/team/app:v1  sha256:")
    with pytest.raises(GpusnapError, match="the host name is unknown"):
        ran("push", archive, "far.invalid/team/app:v2")
    with pytest.raises(GpusnapError, match="blocked on this host") as raised:
        ran("inspect", "bad.example/x:1")
    assert raised.value.code == "GPS-813"


@pytest.mark.parametrize(
    "answer",
    [
        Say(200, {"Content-Type": "text/html"}, b"<html>log in</html>"),
        Say(403),
        Say(404, {}, b"<html>"),
        Say(418),
        Say(301, {"Location": "ftp://x/"}),
    ],
)
def test_a_mirror_that_is_out_of_order(
    registry: FakeRegistry, archive: str, tmp_path: Path, answer: Say
) -> None:
    """Whatever it answers, the registry itself is asked next."""
    ref = f"{registry.host}/team/app:v1"
    assert ran("push", archive, f"http://{ref}").exit_code == 0
    with FakeRegistry(tmp_path / "mirror") as mirror:
        mirror.rules = [Rule(method, "/team/app/", answer, times=99) for method in ("HEAD", "GET")]
        (tmp_path / "registries.conf").write_text(
            f'[[registry]]\nlocation = "{registry.host}"\ninsecure = true\n'
            f'[[registry.mirror]]\nlocation = "{mirror.host}"\ninsecure = true\n'
        )
        assert ran("inspect", ref).exit_code == 0
        assert mirror.seen
