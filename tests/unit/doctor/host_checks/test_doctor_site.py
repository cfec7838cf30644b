"""Checks of the settings and of logins."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from doctor_trees import only, tree

from gpusnap.doctor.host_checks import site
from gpusnap.runtime_shim.settings import Settings

SECRET = "c2VjcmV0OnNlY3JldA=="
AUTH = "/run/containers/0/auth.json"


@pytest.mark.parametrize(
    ("text", "verdict", "said"),
    [
        ('runtime = "runc"\n', "ok", "is valid"),
        (None, "ok", "defaults are used"),
        ("[memory]\npages = 7\n", "failure", "memory.pages"),
        ("[memory", "failure", "not TOML"),
    ],
)
def test_settings(tmp_path: Path, text: str | None, verdict: str, said: str) -> None:
    """Valid, absent, or wrong with its own sentence; then the defaults count."""
    path = tmp_path / "gpusnap.toml"
    if text is not None:
        path.write_text(text)
    settings, check = site.check_settings(str(path))
    assert check.verdict.value == verdict
    assert said in check.says
    assert settings.runtime == "runc" if text and "runc" in text else settings == Settings()


def test_registries(tmp_path: Path) -> None:
    """Names alone: of entries, helpers, and stores of others."""
    auth = {
        "auths": {"registry.example": {"auth": SECRET}, "https://index.docker.io/v1/": {}},
        "credHelpers": {"gcr.io": "gcr"},
        "credsStore": "pass",
    }
    root = tree(tmp_path, {AUTH: json.dumps(auth)})
    verdict, found = only(site.check_registries(["registry.example/app"], [AUTH, "/none"], root))
    assert verdict == "ok"
    assert {*found.facts["registries"]} == {
        *("registry.example", "index.docker.io", "gcr.io", "those in docker-credential-pass")
    }
    assert SECRET not in repr(found)


def test_no_login_where_one_may_be_wanted(tmp_path: Path) -> None:
    """store.pull-from names a registry without credentials."""
    verdict, found = only(site.check_registries(["http://other.example:5000/app"], [AUTH], str(tmp_path)))
    assert verdict == "warning"
    assert "podman login other.example:5000" in found.todo
    assert only(site.check_registries([], [AUTH], str(tmp_path)))[0] == "ok"


def test_broken_auth_file(tmp_path: Path) -> None:
    """The file is named, and nothing of what it holds."""
    found = [*site.check_registries([], [AUTH], tree(tmp_path, {AUTH: "{" + SECRET}))]
    assert [each.verdict.value for each in found] == ["warning", "ok"]
    assert AUTH in found[0].says
    assert SECRET not in repr(found)


def test_unreadable(tmp_path: Path) -> None:
    """A folder in the file's place is no file."""
    os.makedirs(tmp_path / AUTH[1:])
    assert only(site.check_registries([], [AUTH], str(tmp_path)))[0] == "ok"
