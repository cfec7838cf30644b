"""Certificates that a host keeps for single registries."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from fake_registry import FakeRegistry

from gpusnap.oci.base.errors import RegistryError, Unreachable
from gpusnap.oci.registry import certificates

DATA = b"data"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where they are looked for."""
    found = tmp_path / "containers", tmp_path / "docker"
    monkeypatch.setattr(certificates, "FOLDERS", tuple(map(str, found)))
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1, signed by itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path_factory.mktemp("certificate")
    key, out = folder / "key.pem", folder / "certificate.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    argv = ["openssl", "req", "-x509", *kind, *name, "-keyout", str(key), "-out", str(out)]
    subprocess.run(argv, check=True, capture_output=True)
    return out, key


def test_where(folders: tuple[Path, Path]) -> None:
    """The first folder of the registry's name that there is."""
    first, second = (each / "r.example:5000" for each in folders)
    assert certificates.folder_of("r.example:5000") == ""
    second.mkdir(parents=True)
    assert certificates.folder_of("r.example:5000") == str(second)
    first.mkdir(parents=True)
    assert certificates.folder_of("r.example:5000") == str(first)
    for other in ("r.example", "", "..", "../containers"):
        assert certificates.folder_of(other) == ""


def test_a_ca_of_a_registry(tmp_path: Path, folders: tuple[Path, Path], pair: tuple[Path, Path]) -> None:
    """It is trusted for that registry; without it the message says where to put it."""
    both = tmp_path / "both.pem"
    both.write_bytes(pair[1].read_bytes() + pair[0].read_bytes())
    with FakeRegistry(tmp_path / "registry", certificate=both) as registry:
        digest = registry.add_blob(DATA)
        with pytest.raises(
            Unreachable, match=r"or as a .crt file to the registry's directory in .*containers"
        ):
            registry.repository(plain_http=False).has_blob(digest)
        folder = folders[1] / registry.host
        folder.mkdir(parents=True)
        shutil.copy(pair[0], folder / "ca.crt")
        assert registry.repository(plain_http=False).has_blob(digest)


def test_a_certificate_for_a_registry(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    """A pair is loaded; one without its key, or with a password, is an error that names it."""
    shutil.copy(pair[0], tmp_path / "us.cert")
    context = ssl.create_default_context()
    with pytest.raises(RegistryError, match=r"us.cert and .*us.key cannot be read: it does"):
        certificates.load(context, str(tmp_path))
    shutil.copy(pair[1], tmp_path / "us.key")
    certificates.load(context, str(tmp_path))
    argv = ["openssl", "ec", "-aes128", "-passout", "pass:words", "-in", str(pair[1])]
    subprocess.run([*argv, "-out", str(tmp_path / "us.key")], check=True, capture_output=True)
    with pytest.raises(
        RegistryError, match=r".*us.cert and .*us.key are not a certificate and its key in PEM"
    ):
        certificates.load(context, str(tmp_path))


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    """It is an error, before anything is sent."""
    (tmp_path / "ca.crt").write_text("none")
    with pytest.raises(RegistryError, match=r"the CA file .*ca.crt contains no certificate in PEM"):
        certificates.load(ssl.create_default_context(), str(tmp_path))
    with pytest.raises(RegistryError, match=r"the certificates in .*gone cannot be read: it does"):
        certificates.load(ssl.create_default_context(), str(tmp_path / "gone"))
