"""gpusnap checkpoint and restore as users of Podman type them: its options, and several at once."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from fake_podman import ID, FakePodman
from kept_checkpoints import an_archive

from gpusnap.base.user_errors import NotFound
from gpusnap.cli import exit_codes
from gpusnap.cli.main import command
from gpusnap.cli.options.podman_words import CHECKPOINT, RESTORE
from gpusnap.engines import podman
from gpusnap.operations.checkpointing import checkpoint as checkpointing
from gpusnap.operations.restoring import restore as restoring
from gpusnap.operations.restoring.podman_restore import RestoreRequest
from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted, UsageError


def run(*words: str) -> Result:
    return CliRunner().invoke(command, words)


def exit_code_of(done: Result) -> int:
    """As main has it."""
    assert done.exception is None or isinstance(done.exception, GpusnapError)
    return exit_codes.exit_code(done.exception) if done.exception is not None else 0


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    found = FakePodman(tmp_path / "podman", monkeypatch)
    found.has()
    found.exports(an_archive(tmp_path))
    return found


# podman-container-checkpoint(1) and podman-container-restore(1) of Podman 5.8.
OF_CHECKPOINT = (
    *("-a", "--all", "-c", "--compress", "--create-image", "-e", "--export", "--file-locks"),
    *("--ignore-rootfs", "--ignore-volumes", "-k", "--keep", "-l", "--latest", "-R", "--leave-running"),
    *("-P", "--pre-checkpoint", "--print-stats", "--tcp-established", "--with-previous"),
)
OF_RESTORE = (
    *("-a", "--all", "--file-locks", "--ignore-rootfs", "--ignore-static-ip", "--ignore-static-mac"),
    *("--ignore-volumes", "-i", "--import", "--import-previous", "-k", "--keep", "-l", "--latest", "-n"),
    *("--name", "--pod", "--print-stats", "-p", "--publish", "--tcp-close", "--tcp-established"),
)


@pytest.mark.parametrize(("name", "options"), [("checkpoint", OF_CHECKPOINT), ("restore", OF_RESTORE)])
def test_every_option_of_podman_is_known(name: str, options: Sequence[str]) -> None:
    assert isinstance(command, click.Group)
    found = command.get_command(click.Context(command), name)
    assert found is not None
    known = {word for param in found.params for word in param.opts}
    assert set(options) - known == set()


@pytest.mark.parametrize(
    ("name", "option", "takes_value"),
    [
        (name, option, table[names][0])
        for name, table in (("checkpoint", CHECKPOINT), ("restore", RESTORE))
        for names in table
        for option in names
    ],
)
def test_what_is_refused_says_what_to_do(name: str, option: str, takes_value: bool) -> None:
    done = run(name, option, *["none"] if takes_value else [], "w")
    assert isinstance(done.exception, UsageError)
    assert str(done.exception).startswith("--")
    assert "is a Podman option: " in str(done.exception)
    assert done.exception.hint
    assert option not in run(name, "--help").stdout.split()


def test_export_is_to(fake: FakePodman, tmp_path: Path) -> None:
    """A plain name is a file there, as with Podman; -R stands for --leave-running."""
    done = run("checkpoint", "-R", "-e", str(tmp_path / "w"), "w")
    assert done.exception is None
    assert (tmp_path / "w").exists()
    assert "--leave-running" in fake.calls()[-1]
    for words in (("-e", "x", "--to", "./y"), ("-e", "x", "--name", "y")):
        assert isinstance(run("checkpoint", *words, "w").exception, UsageError)


def test_import_is_what(fake: FakePodman, tmp_path: Path) -> None:
    fake.has(status="exited")
    words = ("--name", "x", "-p", "8081:80", "-p", "8082:82", "--file-locks")
    done = run("restore", "-i", str(tmp_path / "in.tar"), *words)
    assert done.exception is None
    (call,) = fake.calls()
    assert call.endswith("in.tar --file-locks --publish 8081:80 --publish 8082:82 --name x")


@pytest.mark.parametrize(
    "words",
    [
        ("checkpoint",),
        ("checkpoint", "--all", "w"),
        ("checkpoint", "--all", "--latest"),
        ("checkpoint", "a", "b", "--name", "x"),
        ("checkpoint", "a", "b", "--to", "./x.tar"),
        ("checkpoint", "a", "b", "--to", "oci:/x:name"),
        ("checkpoint", "a", "b", "--to", "example.com/x:y"),
        ("restore",),
        ("restore", "a", "-i", "b"),
        ("restore", "a", "b", "--name", "x"),
        ("restore", "a", "b", "-p", "1:2"),
        ("restore", "a", "--name", "x", "--tcp-established"),
    ],
)
def test_what_does_not_go_together(words: Sequence[str]) -> None:
    assert isinstance(run(*words).exception, UsageError)


@pytest.mark.parametrize(
    "words",
    [
        ["checkpoint", ""],
        ["checkpoint", "a", ""],
        ["suspend", ""],
        ["resume", ""],
        ["swap", "a", ""],
        ["swap", "", "a"],
        ["migrate", "", "ssh://other"],
        ["recover", ""],
        ["doctor", ""],
        ["schedule", ""],
    ],
    ids=" ".join,
)
def test_an_empty_name(fake: FakePodman, words: Sequence[str]) -> None:
    """Podman would be asked for a container without a name."""
    done = run(*words)
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == "the name of a container is empty"
    assert not (fake.folder / "calls").exists()


class TestSeveral:
    """`a` is done, `bad` fails, `gone` is not there, `stop` gets Ctrl-C."""

    @pytest.fixture(autouse=True)
    def work(self, monkeypatch: pytest.MonkeyPatch, fake: FakePodman) -> None:
        def checkpoint(wish: checkpointing.CheckpointRequest, *_: object) -> checkpointing.CheckpointResult:
            name = wish.container
            if name == "bad":
                raise GpusnapError("it is bad", hint="make it good", code="GPS-215")
            if name == "gone":
                raise NotFound("there is no container gone")
            if name == "stop":
                raise Interrupted("the checkpoint was interrupted")
            if name == "key":
                signal.raise_signal(signal.SIGINT)
            found = podman.inspect_container("w")
            return checkpointing.CheckpointResult(
                found, 1.0, 0, 10, 5, name=f"{name}:1", digest="sha256:x", store="/s"
            )

        monkeypatch.setattr(checkpointing, "checkpoint", checkpoint)

    def test_one_fails(self) -> None:
        done = run("checkpoint", "a", "bad", "c")
        assert isinstance(done.exception, GpusnapError)
        assert done.exception.sentence() == "1 of 3 failed: bad; see above for each of them"
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["a:1", "c:1"]
        assert "gpusnap: bad: it is bad; make it good [GPS-215]\n" in done.stderr

    def test_a_sentence_that_names_the_container(self) -> None:
        """It is not named twice."""
        assert "gpusnap: there is no container gone\n" in run("checkpoint", "a", "gone").stderr

    def test_exit_codes(self) -> None:
        """All the same is that one; as JSON each has its own."""
        assert exit_code_of(run("checkpoint", "a", "gone", "a", "gone")) == 3
        assert exit_code_of(run("checkpoint", "a", "c")) == 0
        done = run("checkpoint", "a", "gone", "bad", "--json")
        assert exit_code_of(done) == 1
        found = json.loads(done.stdout)["results"]
        assert [each.get("exitCode", 0) for each in found] == [0, 3, 1]
        assert found[0]["name"] == "a:1"
        assert found[2] == {"container": "bad", "error": "it is bad", "code": "GPS-215", "exitCode": 1}

    @pytest.mark.parametrize("who", ["stop", "key"])
    def test_interrupted(self, who: str) -> None:
        """No other is begun, and what is done is said."""
        done = run("checkpoint", "a", "bad", who, "d", "--json")
        assert isinstance(done.exception, Interrupted)
        assert re.search(rf"{who}: (.* )?interrupted; done before: a; not started: d$", str(done.exception))
        found = json.loads(done.stdout)["results"]
        assert [each.get("exitCode", 0) for each in found] == [0, 1, 130]

    def test_all(self, fake: FakePodman, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of gpusnap's runtime; others are named, and pods' infra containers are nobody's."""
        listed = [{"Names": ["a"]}, {"Names": ["infra"], "IsInfra": True}, {"Names": ["c"]}]
        (fake.folder / "users").write_text(json.dumps(listed))
        done = run("checkpoint", "--all")
        assert done.exception is None
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["a:1", "c:1"]
        (fake.folder / "users").write_text(json.dumps(listed[:1]))
        (one,) = json.loads(run("checkpoint", "--all", "--json").stdout)["results"]  # a script gets one form
        assert one["name"] == "a:1"
        (fake.folder / "users").write_text(json.dumps(listed))
        fake.has(runtime="crun")
        (fake.folder / "path").write_text("/usr/bin/crun\n")
        done = run("checkpoint", "--all")
        assert isinstance(done.exception, NotFound)
        assert "do not use gpusnap-runtime: a, c" in done.stderr

    def test_latest(self, fake: FakePodman) -> None:
        (fake.folder / "ids").write_text("newest\n")
        assert run("checkpoint", "-l").stdout.startswith("newest:1 ")
        (fake.folder / "ids").write_text("")
        assert isinstance(run("checkpoint", "-l").exception, NotFound)


def test_several_restores(monkeypatch: pytest.MonkeyPatch, fake: FakePodman, tmp_path: Path) -> None:
    """Each on its own, also one that is not found."""

    def restore(wish: RestoreRequest, _: object, *, asked: object) -> restoring.RestoreResult:
        return restoring.RestoreResult(podman.inspect_container("w").id, "w", 1.0)

    monkeypatch.setattr(restoring, "restore", restore)
    done = run("restore", f"{tmp_path}/in.tar", f"{tmp_path}/none.tar", "--json")
    assert exit_code_of(done) == 3
    first, second = json.loads(done.stdout)["results"]
    assert first["containerId"] == ID
    assert second["what"] == f"{tmp_path}/none.tar"
