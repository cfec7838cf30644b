"""Credentials: which file, which entry, and that no secret is ever shown."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusnap.oci.base.errors import Unauthorized
from gpusnap.oci.registry import credentials
from gpusnap.oci.registry.credentials import Credentials, find

SECRET = "the-secret-words"


def auth(user: str, password: str = SECRET) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which nothing of this user's is found."""
    monkeypatch.setattr(credentials, "RUN", str(tmp_path / "run-of-root"))
    (tmp_path / "bin").mkdir()
    names = {"HOME": "home", "XDG_RUNTIME_DIR": "run", "PATH": "bin"}
    return {name: str(tmp_path / folder) for name, folder in names.items()}


@pytest.fixture
def helper(tmp_path: Path, environ: dict[str, str]) -> Callable[[str, str], None]:
    """Makes a credential helper: its name, and its shell script."""

    def make(name: str, script: str) -> None:
        path = tmp_path / "bin" / f"docker-credential-{name}"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return make


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def user(found: Credentials | None) -> str:
    return "" if found is None else found.username


FILES = [
    "run/containers/auth.json",
    f"run-of-root/{os.getuid()}/auth.json",
    "home/.config/containers/auth.json",
    "home/.docker/config.json",
]


def test_order_of_the_files(tmp_path: Path, environ: dict[str, str]) -> None:
    """The first file that has some wins; one without any for this registry is passed over."""
    assert find("r.example", "a", environ) is None
    for at, name in reversed(list(enumerate(FILES))):
        write(tmp_path / name, {"auths": {"r.example": auth(f"user{at}"), "other.example": auth("x")}})
        found = find("r.example", "a", environ)
        assert found is not None
        assert (found.username, found.password, found.source) == (f"user{at}", SECRET, str(tmp_path / name))
    write(tmp_path / FILES[0], {"auths": {"other.example": auth("x")}})
    assert user(find("r.example", "a", environ)) == "user1"


def test_files_by_variable(tmp_path: Path, environ: dict[str, str]) -> None:
    """REGISTRY_AUTH_FILE is then the only one, and must be there; two other variables move theirs."""
    for name in FILES[2:]:
        write(tmp_path / name, {"auths": {"r.example": auth("default")}})
    write(tmp_path / "d/config.json", {"auths": {"r.example": auth("docker")}})
    write(tmp_path / "c/containers/auth.json", {"auths": {"r.example": auth("config")}})
    write(tmp_path / "given.json", {"auths": {"other.example": auth("given")}})
    environ["XDG_CONFIG_HOME"] = str(tmp_path / "c")
    assert user(find("r.example", "a", environ)) == "config"
    environ["XDG_CONFIG_HOME"] = str(tmp_path / "empty")
    environ["DOCKER_CONFIG"] = str(tmp_path / "d")
    assert user(find("r.example", "a", environ)) == "docker"
    environ["REGISTRY_AUTH_FILE"] = str(tmp_path / "given.json")
    assert find("r.example", "a", environ) is None
    assert user(find("other.example", "a", environ)) == "given"
    environ["REGISTRY_AUTH_FILE"] = str(tmp_path / "none.json")
    with pytest.raises(Unauthorized, match=r"REGISTRY_AUTH_FILE names .*none.json, but it does not exist"):
        find("r.example", "a", environ)


@pytest.mark.parametrize(
    ("repository", "wanted"),
    [("a/b/c", "abc"), ("a/b/d", "ab"), ("a/x", "host"), ("a", "host"), ("ab/c", "host"), ("a/b", "ab")],
)
def test_the_most_specific_entry(
    tmp_path: Path, environ: dict[str, str], repository: str, wanted: str
) -> None:
    """An entry may be for a namespace or a repository; the longest one that contains it wins."""
    entries = {"r.example": auth("host"), "r.example/a/b": auth("ab"), "r.example/a/b/c": auth("abc")}
    write(tmp_path / FILES[0], {"auths": entries})
    assert user(find("r.example", repository, environ)) == wanted


@pytest.mark.parametrize(
    ("key", "registry"),
    [
        ("https://r.example", "r.example"),
        ("https://r.example/v1/", "r.example"),
        ("http://r.example:5000/v2/", "r.example:5000"),
        ("https://index.docker.io/v1/", "docker.io"),
        ("docker.io", "docker.io"),
    ],
)
def test_keys_as_docker_writes_them(tmp_path: Path, environ: dict[str, str], key: str, registry: str) -> None:
    """Docker's keys may be addresses of an API, and Docker Hub has a name of its own there."""
    write(tmp_path / FILES[3], {"auths": {key: auth("someone")}})
    assert user(find(registry, "library/a", environ)) == "someone"
    assert find(registry + ".example", "library/a", environ) is None


def test_kinds_of_entries(tmp_path: Path, environ: dict[str, str]) -> None:
    """A colon in the password is part of it; an identity token stands beside or in place of a password."""
    entries = {
        "a.example": auth("u", "p:q\0\0"),
        "b.example": {"username": "u", "password": "p"},
        "c.example": {**auth("<token>", ""), "identitytoken": "t"},
        "d.example": {},
    }
    write(tmp_path / FILES[0], {"auths": entries})
    a, b, c = (find(f"{each}.example", "x", environ) for each in "abc")
    assert a is not None
    assert (a.username, a.password) == ("u", "p:q")
    assert b is not None
    assert (b.username, b.password) == ("u", "p")
    assert c is not None
    assert c.identity_token == "t"
    assert find("d.example", "x", environ) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{" + SECRET, "is not JSON: correct or remove it"),
        ("[]", "contains no JSON object"),
        ({"auths": {"r.example": {"auth": SECRET}}}, "is not base64 of user:password: log in again"),
        ({"auths": {"r.example": {"auth": base64.b64encode(SECRET.encode()).decode()}}}, "is not base64"),
        ({"credHelpers": {"r.example": "../" + "x" * 9}}, "an invalid credential helper"),
        ({"credHelpers": {"r.example": 7}}, "an invalid credential helper"),
        ({"credHelpers": {"r.example": "nowhere"}}, "docker-credential-nowhere, which is not in PATH"),
        ({"credsStore": "nowhere"}, "docker-credential-nowhere, which is not in PATH"),
    ],
)
def test_what_is_wrong_with_a_file(
    tmp_path: Path, environ: dict[str, str], content: object, message: str
) -> None:
    """The message names the file and what to do, and never holds what is in it."""
    write(tmp_path / FILES[0], content)
    with pytest.raises(Unauthorized, match=message) as caught:
        find("r.example", "a", environ)
    assert str(tmp_path / FILES[0]) in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "content", ["", "{}", {"auths": []}, {"auths": {"r.example": 3}}, {"credHelpers": 1}]
)
def test_files_that_say_nothing(tmp_path: Path, environ: dict[str, str], content: object) -> None:
    """Podman leaves empty files behind; other members are no concern of ours."""
    write(tmp_path / FILES[0], content)
    assert find("r.example", "a", environ) is None


def test_a_folder_in_place_of_the_file(tmp_path: Path, environ: dict[str, str]) -> None:
    """A file that is there and cannot be read is not passed over."""
    (tmp_path / FILES[0]).mkdir(parents=True)
    with pytest.raises(Unauthorized, match="cannot be read: Is a directory"):
        find("r.example", "a", environ)


def test_helpers(tmp_path: Path, environ: dict[str, str], helper: Callable[[str, str], None]) -> None:
    """A helper for the registry comes before entries, one for all after them; each gets the registry."""
    answer = '{"ServerURL":"%s","Username":"%s at %s","Secret":"s"}'
    script = f"read -r server <&0 || true; printf '{answer}' \"$server\""
    helper("one", f'{script} one "$server"')
    helper("all", f'{script} all "$server"')
    helper("none", "cat >/dev/null; echo credentials not found in native keychain; exit 1")
    helper("token", 'cat >/dev/null; echo \'{"ServerURL":"x","Username":"<token>","Secret":"t"}\'')
    entries = {"r.example": auth("entry"), "s.example": auth("entry"), "t.example": {}}
    helpers = {"r.example": "one", "n.example": "none", "i.example": "token", "docker.io": "one"}
    write(tmp_path / FILES[0], {"auths": entries, "credHelpers": helpers, "credsStore": "all"})
    assert user(find("r.example", "a", environ)) == "one at r.example"
    assert user(find("s.example", "a", environ)) == "entry"
    assert user(find("t.example", "a", environ)) == "all at t.example"
    assert user(find("docker.io", "a", environ)) == "one at https://index.docker.io/v1/"
    assert find("n.example", "a", environ) is None
    token = find("i.example", "a", environ)
    assert token is not None
    assert (token.username, token.identity_token, token.source) == ("", "t", "docker-credential-token")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            f"echo {SECRET}; echo {SECRET} >&2; exit 3",
            "returned no credentials for r.example: it exited with status 3",
        ),
        (f"echo {SECRET}", "returned invalid credentials for r.example"),
        (f'echo \'{{"Secret":"{SECRET}"}}\'', "returned invalid credentials"),
        (
            f"echo {SECRET}; exec 0<&-; read -r x <{{fifo}}",
            "returned no credentials for r.example within 0.5 s",
        ),
    ],
)
def test_helpers_that_fail(
    tmp_path: Path, environ: dict[str, str], helper: Callable[[str, str], None], script: str, message: str
) -> None:
    """Whatever a helper says is not shown; one that does not end is ended."""
    os.mkfifo(tmp_path / "fifo")
    helper("bad", script.replace("{fifo}", str(tmp_path / "fifo")))
    write(tmp_path / FILES[0], {"credsStore": "bad"})
    with pytest.raises(Unauthorized, match=message) as caught:
        find("r.example", "a", environ, deadline=0.5 if "fifo" in script else 10)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_helper_that_leaves_a_child(
    tmp_path: Path, environ: dict[str, str], helper: Callable[[str, str], None]
) -> None:
    """Such as an agent, which keeps its output open: what it said counts when it has ended."""
    os.mkfifo(tmp_path / "fifo")
    helper("agent", f'read line <{tmp_path}/fifo & echo \'{{"Username":"u","Secret":"s"}}\'')
    write(tmp_path / FILES[0], {"credsStore": "agent"})
    with open(tmp_path / "fifo", "r+b", buffering=0):  # the child ends with it
        assert user(find("r.example", "a", environ, deadline=10)) == "u"


def test_a_helper_that_cannot_be_killed(
    tmp_path: Path,
    environ: dict[str, str],
    helper: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that waits for a disk in the kernel is left behind: nothing waits for it without a deadline."""
    os.mkfifo(tmp_path / "fifo")
    helper("stuck", f"read line <{tmp_path}/fifo")
    write(tmp_path / FILES[0], {"credsStore": "stuck"})
    real, children = subprocess.Popen.wait, list[subprocess.Popen[bytes]]()

    def wait(child: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        assert timeout is not None
        return real(child, min(timeout, 0.1))

    with open(tmp_path / "fifo", "r+b", buffering=0), monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", wait)
        patch.setattr(subprocess.Popen, "kill", lambda child: children.append(child))
        with pytest.raises(Unauthorized, match=r"docker-credential-stuck returned no credentials for .* s$"):
            find("r.example", "a", environ, deadline=0.1)
    (child,) = children
    child.returncode = None
    child.wait(10)


def test_never_shown() -> None:
    """The repr says where they come from, and no more."""
    shown = repr(Credentials("someone", SECRET, "an-identity", "/auth.json"))
    assert shown == "Credentials(source='/auth.json')"
