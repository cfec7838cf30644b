"""What is masked, and what must stay readable."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

import pytest

from gpusnap.report.mask import known_secrets, mask

SECRET = "s3cr3t-Val.ue"


@pytest.mark.parametrize(
    "text",
    [
        f"password={SECRET}",
        f'password = "{SECRET}"',
        f"DB_PASSWORD='{SECRET}'",
        f"PGPASSWORD={SECRET} pg_dump",
        f'{{"auth": "{SECRET}", "x": 1}}',
        f"registry-token: {SECRET}",
        f"api_key={SECRET}&x=1",
        f"--token {SECRET} --port 80",
        f"--hf-token={SECRET}",
        f"https://user:{SECRET}@registry.example/v2/",
        f"http://{SECRET}@proxy.example:3128",
        f"Authorization: Bearer {SECRET}",
        f"authorization: basic {SECRET}",
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f"aws_access_key_id = {SECRET}",
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}\n-----END OPENSSH PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}",
        f"SECRET_KEY={SECRET}",
        f"SECRET_KEY_BASE={SECRET}",
        f"ENCRYPTION_KEY={SECRET}",
        f"AccountName=a;AccountKey={SECRET};x=1",
        f"VAULT_SECRET_ID={SECRET}",
        f"Authorization: token {SECRET}",
        f"Cookie: lang=en; sid={SECRET}",
        f"https://user:p@{SECRET}@registry.example/v2/",
        f"password='{SECRET} cut off",
        f'{{"said": "{{\\"password\\": \\"{SECRET}\\"}}"}}',
        f"password = correct horse {SECRET}",
        f"DB_PASSWORD: two {SECRET}",
        f"it said password=two {SECRET}, and ended",
        f"podman login -u me -p {SECRET} registry.example",
        f"--password {SECRET}",
        f'["podman", "login", "-p", "{SECRET}", "r.example"]',
        f"['mysql', '--password', '{SECRET}']",
        f"curl -u me:{SECRET} https://r.example",
        f"curl --user me:{SECRET} https://r.example",
        f"mysql -p={SECRET}",
    ],
)
def test_by_names(text: str) -> None:
    found = mask(text)
    assert SECRET not in found
    assert "***" in found


@pytest.mark.parametrize(
    "token",
    [
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        "glpat-abcdefghij1234567890",
        "hf_abcdefghijklmnopqrstuvwxyz",
        "sk-abcdefgh12345678",
        "xoxb-123456789012-abcdef",
        "nvapi-abcdefgh12345678",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmN",
    ],
)
def test_by_form(token: str) -> None:
    assert token not in mask(f"it said {token}, and ended")


@pytest.mark.parametrize(
    "text",
    [
        "the token expired",
        "GPU 0: NVIDIA H100 80GB HBM3, 3.0 GiB of 80.0 GiB used",
        "sha256:" + "ab" * 32,
        "https://registry.example:5000/team/app:v1",
        "runtime = crun",
        "[store] pull-from = ['r.example/a']",
        "passed 3 of 4",
        "author = somebody",
        "podman run -p 8080:80 -p 127.0.0.1:53:53/udp --publish 1:1 -u 1000:1000 --user www-data x",
        "mkdir -p /srv/x && mkdir -p ./y",
        "ssh -p 22 host",
        "GPU-8a7b6c5d-1111-2222-3333-444455556666",
    ],
)
def test_what_stays(text: str) -> None:
    assert mask(text) == text


@pytest.mark.parametrize(
    "piece", ["-", "a-", "-a", "_", "a.", "password ", 'password="\\', "password=a ", "-p ", '-p",', " x"]
)
def test_the_time_that_it_takes(piece: str) -> None:
    """A line of dashes is no work: what a log has must not keep a report from its end."""
    text = f"{piece * 100_000}\n"
    began = time.process_time()
    mask(text)
    assert time.process_time() - began < 5


def test_what_stands_behind() -> None:
    """A value with blanks ends where the next name begins, at a delimiter or with its line."""
    assert mask("token=a b container=w") == "token=*** container=w"
    assert mask("password: a b; user: me") == "password: ***; user: me"
    assert mask("password = a b\nuser = me") == "password = ***\nuser = me"
    assert mask("podman login -p a r.example") == "podman login -p *** r.example"


def test_known_ones(tmp_path: Path) -> None:
    """Of the environment by name, and of auth files, what they stand for as well; paths are none."""
    auth = tmp_path / "auth.json"
    both = base64.b64encode(b"me:pa55word").decode()
    auth.write_text(json.dumps({"auths": {"r.example": {"auth": both}, "s": {"identitytoken": "idtoken1"}}}))
    environ = {
        "HF_TOKEN": "hftoken-1",
        "PWD": "/work",
        "SSH_AUTH_SOCK": "/run/x",
        "HOME": "/root",
        "TERM": "xterm",
    }
    known = known_secrets(environ, [str(auth), str(tmp_path / "gone"), str(tmp_path)])
    assert known == {"hftoken-1", both, "pa55word", "idtoken1"}
    assert mask("it said pa55word and hftoken-1 in /work", known) == "it said *** and *** in /work"
    assert mask("short", ["sho"]) == "short"
