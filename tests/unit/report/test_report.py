"""gpusnap report: what is in it, that nothing fails it, and that planted secrets are not in it."""

from __future__ import annotations

import base64
import json
import os
import resource
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import ANNOTATIONS, keep, noise
from fakes import a_manifest

from gpusnap.base.user_errors import NotFound
from gpusnap.doctor import container as of_container
from gpusnap.doctor import host
from gpusnap.doctor.base import subject
from gpusnap.doctor.base.check import make_refused, ok
from gpusnap.engines import podman
from gpusnap.engines.podman import Container
from gpusnap.oci.store.store import Store
from gpusnap.report import report as module
from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.base.transaction import Step
from gpusnap.runtime_shim.runtime.child_process import Finished

Run = Callable[..., tuple[int, str, str]]
SECRETS = {
    "settings": "pw-of-the-settings",
    "url": "pw-in-a-url",
    "log": "pw-in-the-log",
    "journal": "pw-in-the-journal",
    "auth": "pw-of-the-registry",
    "environment": "pw-of-the-environment",
    "argument": "pw-as-an-argument",
    "note": "pw-in-a-note",
}


@pytest.fixture(autouse=True)
def planted(host_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A host with a checkpoint, and a secret wherever one might be."""
    settings = tmp_path / "gpusnap.toml"
    settings.write_text(
        f'# password = "{SECRETS["settings"]}"\nruntime = "crun"\n[store]\n'
        f'pull-from = ["https://me:{SECRETS["url"]}@r.example/a"]\ntoken = "{SECRETS["settings"]}"\n'
    )
    monkeypatch.setattr(module, "SETTINGS_FILE", str(settings))
    monkeypatch.setattr(host, "checks", lambda: (ok("kernel", "Linux, all there"),))
    userdata = tmp_path / "userdata"
    userdata.mkdir()
    (userdata / "dump.log").write_text(f"(00.1) Error (criu/x.c:1): --api-key={SECRETS['log']}\n" * 300)
    (userdata / "ctr.log").write_text("output of the program")
    found = Container("c" * 64, "w", "crun", "exited", str(userdata / "checkpoint"))
    monkeypatch.setattr(podman, "inspect_container", lambda word: found)
    journal = (
        f"gpusnap: checkpoint \x1b[31mfailed {SECRETS['auth']} {SECRETS['environment']}\nnothing of ours\n"
    )
    journal += f"podman: restore Authorization: Bearer {SECRETS['journal']}\n"

    def ask(argv: Sequence[str], *, seconds: float) -> Finished:
        return Finished(0, journal, "")

    monkeypatch.setattr(module, "ask", ask)
    login = base64.b64encode(f"me:{SECRETS['auth']}".encode()).decode()
    (tmp_path / "auth.json").write_text(json.dumps({"auths": {"r.example": {"auth": login}}}))
    monkeypatch.setenv("HF_TOKEN", SECRETS["environment"])
    monkeypatch.chdir(tmp_path)
    process = replace(a_manifest().processes[0], command=("serve", SECRETS["argument"]))
    timing = (Step("lock", 0.5, 0.1, f"secret={SECRETS['note']}"), Step("dump", 0.7, 0.3))
    keep(
        host_store,
        noise(2, 1),
        names=("w:1",),
        records={"config.dump": b"{}"},
        record=replace(a_manifest(), processes=(process,), timing=timing),
        annotations=ANNOTATIONS,
    )
    return host_store


def test_what_is_in_it(gpusnap: Run, tmp_path: Path) -> None:
    """A file for its owner alone, with all parts and no secret."""
    code, out, err = gpusnap("report", "--last")
    assert (code, err) == (0, "review it before you share it\n")
    path = tmp_path / out.strip()
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    titles = [line for line in text.splitlines() if line.startswith("== ")]
    assert titles == [
        f"== {each} =="
        for each in (
            *(
                "versions",
                "settings",
                "doctor",
                "store",
                "checkpoint",
                "container",
                "logs of CRIU",
                "journal",
            ),
        )
    ]
    assert [name for name, secret in SECRETS.items() if secret in text] == []
    assert "not available" not in text
    for wanted in (
        'runtime = "crun"',
        "ok       kernel: Linux, all there",
        "host driver_version = 580.159.04",
        "pause = 0.5 s",
        "    0.500     0.100  lock",
        "Error (criu/x.c:1)",
        "podman: restore",
        "\\x1b[31mfailed",
    ):
        assert wanted in text
    assert "output of the program" not in text
    assert "nothing of ours" not in text
    assert text.count("Error (criu/x.c:1)") == 200


def test_by_name_and_of_the_host(gpusnap: Run) -> None:
    """On stdout, too; without a checkpoint the parts about it are not there."""
    assert gpusnap("report", "w:1", "-o", "-")[1].count("\n== ") == 8
    assert gpusnap("report", "-o", "-")[1].count("\n== ") == 5


def test_nothing_fails_it(gpusnap: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that cannot be had says so."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    for place in (host, "checks"), (module, "versions"), (podman, "inspect_container"), (module, "ask"):
        monkeypatch.setattr(*place, fail)
    code, out, _ = gpusnap("report", "w:1", "-o", "-")
    assert code == 0
    assert out.count("not available: RuntimeError: broken") == 5
    assert "host driver_version" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("w:1", "--last"), 2, "cannot be combined"),
        (("a b",), 2, "is not a checkpoint"),
        (("-o", "there.txt"), 1, "exists already"),
        (("-o", "no/folder.txt"), 1, "no/folder.txt cannot be written: no is not a directory"),
        (("-o", "."), 1, ". cannot be written: it is a directory; name a file in it with -o"),
    ],
)
def test_wrong_lines(gpusnap: Run, words: tuple[str, ...], code: int, said: str) -> None:
    Path("there.txt").write_text("earlier")
    found, out, err = gpusnap("report", *words)
    assert (found, out) == (code, "")
    assert said in err
    assert Path("there.txt").read_text() == "earlier"


def test_a_full_disk(gpusnap: Run, tmp_path: Path) -> None:
    """Half a report is not left: the next try would be refused for it. The limit on files is the kernel's."""
    before = os.listdir(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        code, _, err = gpusnap("report", "-o", "new.txt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert code == 1
    assert "new.txt cannot be written" in err
    assert sorted(os.listdir(tmp_path)) == sorted(before)
    assert gpusnap("report", "-o", "new.txt")[0] == 0
    assert Path("new.txt").stat().st_mode & 0o777 == 0o600


def test_a_secret_at_the_end_of_what_is_shown(gpusnap: Run, tmp_path: Path) -> None:
    """A long line is cut after the secrets have gone: the beginning of one is not known as one."""
    line = f"x = {'y' * 1980} {SECRETS['auth']}"
    (tmp_path / "gpusnap.toml").write_text(f"{line}\n{'z' * 1990} https://me:{SECRETS['url']}@r.example\n")
    out = gpusnap("report", "-o", "-")[1]
    assert "y" * 1980 in out
    assert SECRETS["auth"][:8] not in out
    assert SECRETS["url"][:8] not in out
    assert max(map(len, out.splitlines())) <= 2000


def test_a_container_without_a_checkpoint(
    gpusnap: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual case of a report: its first checkpoint has failed. CRIU's log and doctor's word are there."""
    userdata = tmp_path / "userdata"
    running = Container("d" * 64, "new", "gpusnap-runtime", "running", str(userdata / "checkpoint"))
    asked: list[str] = []

    def find(word: str) -> Container:
        asked.append(word)
        return running

    monkeypatch.setattr(podman, "inspect_container", find)
    monkeypatch.setattr(subject, "find", lambda word: word)
    monkeypatch.setattr(
        of_container,
        "checks",
        lambda of, driver: (make_refused("sockets", Refused("one is open", code="GPS-231")),),
    )
    code, out, err = gpusnap("report", "new:x", "-o", "there.txt")
    assert (code, out) == (0, "there.txt\n")
    assert "without a checkpoint: " in err
    text = Path("there.txt").read_text()
    assert set(asked) == {"new"}
    for wanted in ("new:x", f"new {'d' * 64}, running", "sockets: one is open GPS-231", "Error (criu/x.c:1)"):
        assert wanted in text


@pytest.mark.parametrize("store", ["empty", "not there", "broken"])
@pytest.mark.parametrize("words", [("w",), ("--last",)])
def test_without_a_store(
    gpusnap: Run, planted: Store, monkeypatch: pytest.MonkeyPatch, store: str, words: tuple[str, ...]
) -> None:
    """How the store is may be what is reported."""

    def unknown(word: str) -> Container:
        raise NotFound(f"there is no container {word}")

    monkeypatch.setattr(podman, "inspect_container", unknown)
    if store == "broken":
        Path(planted.path, "index.json").write_text("{")
    else:
        shutil.rmtree(planted.path)
    if store == "empty":
        Path(planted.path).mkdir()
    code, out, err = gpusnap("report", *words, "-o", "there.txt")
    assert (code, out) == (0, "there.txt\n")
    assert planted.path in err.splitlines()[0]
    text = Path("there.txt").read_text()
    assert "== checkpoint ==" in text
    assert planted.path in text.partition("== checkpoint ==")[2].splitlines()[1]
    for said in (text, err):
        assert ("there is no container w" in said) == (words == ("w",))


@pytest.mark.parametrize(
    ("store", "wanted"), [("empty", "{} is empty"), ("not there", "{}: it does not exist")]
)
def test_the_state_of_the_store(
    gpusnap: Run, planted: Store, tmp_path: Path, store: str, wanted: str
) -> None:
    """In a report of the host alone, too; and settings that say nothing are said to."""
    (tmp_path / "gpusnap.toml").write_text("# retries = 3\n")
    out = gpusnap("report", "-o", "-")[1]
    assert f"{planted.path}, entries in its index: 1" in out
    assert "gpusnap.toml sets nothing: all have their defaults" in out
    shutil.rmtree(planted.path)
    if store == "empty":
        Path(planted.path).mkdir()
    code, out, _ = gpusnap("report", "-o", "-")
    assert code == 0
    assert wanted.format(planted.path) in out.partition("== store ==")[2].partition("\n== ")[0]
