"""What is told: one sentence on stderr, one line in the caller's log, and the real runtime's words."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from datetime import datetime
from pathlib import Path

import pytest
from fakes import POISON
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.runtime_shim.base.errors import GpusnapError, SettingsError, reason, split_code
from gpusnap.runtime_shim.base.log import note, report, runtime_message, runtime_warnings


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON line has what Podman and containerd read, and is added to what is there."""
    path = tmp_path / "log"
    path.write_text('{"level": "info"}\n', "utf-8")
    report(GpusnapError("it\nfailed", hint="try again"), log=str(path), log_format="json")
    assert capsys.readouterr().err == "gpusnap: it failed; try again\n"
    lines = path.read_text("utf-8").splitlines()
    assert len(lines) == 2
    entry = json.loads(lines[1])
    assert set(entry) == {"level", "msg", "time"}
    assert (entry["level"], entry["msg"]) == ("error", "gpusnap: it failed; try again")
    assert datetime.fromisoformat(entry["time"]).utcoffset() is not None


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --log-format json the line is runc's text form; file: before the path is crun's."""
    path = tmp_path / "log"
    report(GpusnapError('a "b"'), log=f"file:{path}", log_format="text")
    assert path.read_text("utf-8").endswith(' level=error msg="gpusnap: a \\"b\\""\n')
    assert capsys.readouterr().err == 'gpusnap: a "b"\n'


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_code(tmp_path: Path, capsys: pytest.CaptureFixture[str], log_format: str) -> None:
    """It ends the sentence, and is a member of its own: Podman shows the one, programs read the other."""
    path = tmp_path / "log"
    report(GpusnapError("it failed", hint="try", code="GPS-123"), log=str(path), log_format=log_format)
    assert capsys.readouterr().err == "gpusnap: it failed; try [GPS-123]\n"
    line = path.read_text("utf-8")
    if log_format == "json":
        assert json.loads(line)["msg"] == "gpusnap: it failed; try [GPS-123]"
        assert json.loads(line)["code"] == "GPS-123"
    else:
        assert line.endswith(' msg="gpusnap: it failed; try [GPS-123]" code=GPS-123\n')


def test_a_note_with_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    """At its end, as with an error."""
    note("it went on", code="GPS-123")
    assert capsys.readouterr().err == "gpusnap: note: it went on [GPS-123]\n"


def test_codes_of_errors() -> None:
    """A class has one for all its errors, the place that raises one a better one; each is said once."""
    assert SettingsError("a").sentence() == "a [GPS-111]"
    assert SettingsError("a", code="GPS-231").sentence() == "a [GPS-231]"
    assert SettingsError("a [GPS-111] b").sentence() == "a [GPS-111] b"
    assert GpusnapError("a", hint="b").sentence() == "a; b"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("a; b [GPS-123]", ("a; b", "GPS-123")),
        ("a [GPS-111] b [GPS-123]", ("a [GPS-111] b", "GPS-123")),
        ("a [GPS-123]; b", ("a [GPS-123]; b", "")),
        ("a [GPS-12]", ("a [GPS-12]", "")),
        ("", ("", "")),
    ],
)
def test_split_code(line: str, parts: tuple[str, str]) -> None:
    """What another gpusnap said, taken apart, so that more can be said before the code."""
    assert split_code(line) == parts


@pytest.mark.parametrize("words", POISON)
def test_podman_leaves_the_code(words: str) -> None:
    """It cuts a message to the line of such words: these are gone, and the code is not."""
    assert GpusnapError(f"crun: {words}", hint="x", code="GPS-123").sentence().endswith("; x [GPS-123]")


@pytest.mark.parametrize("log", [None, "", "journald:x", "syslog:x"])
def test_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str | None) -> None:
    """Where the log is no file of ours to write, nothing is written."""
    monkeypatch.chdir(tmp_path)
    report(GpusnapError("a"), log=log, log_format="json")
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error is told all the same, and why the log was not written in words that Podman leaves alone."""
    report(GpusnapError("a"), log=str(tmp_path / "none" / "log"), log_format="json")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "gpusnap: a"
    assert "cannot be written: it does not exist" in lines[1]


def test_note(capsys: pytest.CaptureFixture[str]) -> None:
    """A note is told on stderr and is no error."""
    note("CRIU is old")
    assert capsys.readouterr() == ("", "gpusnap: note: CRIU is old\n")


LOG = """
{"msg":"first","level":"error","time":"t"}
not json
["a", "list"]
{"msg":"careful","level":"warning"}
{"level":"error"}
{"msg":" last \\n","level":"error"}
{"msg":"chatter","level":"debug"}
"""


def test_runtime_message() -> None:
    """The last error of the log; without one the last line of stderr; without that nothing."""
    assert runtime_message(LOG, "stderr\n") == "last"
    assert runtime_message('{"level": "info", "msg": "x"}', "one\n  two \n\n") == "two"
    assert runtime_message("", "") == ""


def test_runtime_warnings() -> None:
    """Warnings and errors, in order, without debug chatter."""
    assert [text.strip() for text in runtime_warnings(LOG)] == ["first", "careful", "last"]


@given(st.text(), st.text())
def test_any_log_can_be_read(log: str, stderr: str) -> None:
    """Whatever a runtime leaves in its log, reading it does not fail."""
    assert "\n" not in runtime_message(log, stderr).splitlines()[:1]
    assert isinstance(runtime_warnings(log), list)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EPERM])
def test_reason(number: int) -> None:
    """Podman replaces messages with the words of these; ours say the same otherwise."""
    said = reason(OSError(number, os.strerror(number)))
    assert os.strerror(number).lower() in POISON
    assert said
    assert said.lower() not in POISON
    assert reason(OSError(errno.ENOSPC, "")) == os.strerror(errno.ENOSPC)
    assert reason(OSError("odd"))


@pytest.mark.parametrize("words", POISON)
def test_sentence_rewords_what_others_said(words: str) -> None:
    """The words of crun or CRIU in a message of ours are changed too, in any case, and the rest is kept."""
    said = GpusnapError(f"crun: open x: {words.title()}; y", hint=f"{words.upper()} {words}").sentence()
    assert words not in said.lower()
    assert said.startswith("crun: open x: ")
    assert "; y; " in said


def test_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Podman was killed, and we go on: what is said to nobody must not end what is under way."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as nobody:
        monkeypatch.setattr(sys, "stderr", nobody)
        note("it continues")
        report(GpusnapError("it failed"))
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            nobody.close()


def test_no_name_commands_a_terminal(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A process that is named by a control sequence is shown by it, in notes, errors and the caller's log."""
    name = "\x1b]0;owned\x07\x1b[2J\r\u202e\x9b"
    shown = r"\x1b]0;owned\x07\x1b[2J\r\u202e\x9b"
    note(f"process 7 ({name}) waits")
    report(GpusnapError(f"process 7 ({name}) waits", hint=f"ask {name}"), log=str(tmp_path / "log"))
    said = capfd.readouterr().err
    assert f"process 7 ({shown}) waits\n" in said
    assert all(c.isprintable() or c == "\n" for c in said)
    assert all(c.isprintable() or c == "\n" for c in (tmp_path / "log").read_text())


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_log_that_leads_elsewhere(tmp_path: Path, kind: str) -> None:
    """An archive that brought a link or a FIFO where the engine has its log: neither is written to."""
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    path = tmp_path / "log"
    path.symlink_to(precious) if kind == "link" else os.mkfifo(path)
    report(GpusnapError("no"), log=str(path))
    assert precious.read_text() == "as it was"
