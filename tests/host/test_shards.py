"""The pool of jobs: every file once, in parts of about the same length, and the longest first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import shards
from shards import Job, Shards


def test_every_file_once() -> None:
    files = [Path(f"tests/unit/test_{number}.py") for number in range(40)]
    durations = {str(path): float(number) for number, path in enumerate(files)}
    jobs = shards.unit_jobs(files, durations, seconds=100)
    assert sorted(path for job in jobs for path in job.files) == sorted(files)
    assert len(jobs) == 8
    assert max(job.seconds for job in jobs) < 1.2 * min(job.seconds for job in jobs)
    assert shards.unit_jobs([], {}, seconds=100) == []


def test_all_that_there_are() -> None:
    """Unit tests and integration tests are found, and durations.json speaks of files that are there."""
    jobs = shards.selected([], unit=True, integration=True)
    names = [path.as_posix() for job in jobs for path in job.files]
    for folder in (shards.UNIT, shards.INTEGRATION):
        present = {
            path.relative_to(shards.CHECKOUT).as_posix()
            for path in (shards.CHECKOUT / folder).rglob("test_*.py")
        }
        assert present <= set(names)
    assert len(names) == len(set(names)) + len(shards.IN_HOST)
    assert {job.in_host for job in jobs} == {True, False}
    assert [job.name for job in shards.selected(["test_podman.py"], unit=False, integration=True)] == [
        "test_podman.py"
    ]
    with pytest.raises(SystemExit, match=r"no test_nothing\.py"):
        shards.selected(["test_nothing.py"], unit=True, integration=True)


def test_what_is_not_recorded_is_first() -> None:
    """A new integration test may be the longest of all."""
    known, new = shards.host_jobs([Path("a.py"), Path("b.py")], {"a.py": 300.0})
    assert new.seconds > known.seconds


def test_bytecode_of_unit_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept, in a folder of its own; a test host has another environment, which `enter` makes."""
    monkeypatch.setattr(shards, "UNIT_BYTECODE", tmp_path / "bytecode")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tmp_path / "once.py").write_text("import imported\n")
    (tmp_path / "imported.py").write_text("")
    here, in_host = (Job("a", (Path("a.py"),), 1, in_host=in_host) for in_host in (False, True))
    subprocess.run([sys.executable, tmp_path / "once.py"], env=shards.environ(here), check=True)
    assert len([*(tmp_path / "bytecode").rglob("imported.*.pyc")]) == 1
    assert not (tmp_path / "__pycache__").exists()
    assert shards.environ(in_host) == dict(os.environ)


def test_the_longest_is_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What failed is said, and a job none of whose tests was selected is not."""
    begun: list[str] = []
    answers = {
        "long": (0, "..\n2 passed in 3.00s\nResourceWarning: 1 failed to close"),
        "short": (1, "F.\n1 failed, 1 passed in 1.00s"),
        "middle": (shards.NONE_SELECTED, "9 deselected in 0.1s"),
    }

    def run(self: Shards, job: Job) -> tuple[int, str]:
        begun.append(job.name)
        return answers[job.name]

    monkeypatch.setattr(Shards, "_run", run)
    jobs = [
        Job(name, (Path(name),), length, in_host=True)
        for name, length in (("short", 1), ("long", 3), ("middle", 2))
    ]
    pool = Shards(jobs, [], reports=None)
    pool.work()
    assert begun == ["long", "middle", "short"]
    assert pool.failed == ["short"]
    assert pool.counts == {"passed": 3, "failed": 1}
    assert set(pool.durations) == {"long"}
    said = capsys.readouterr().out
    assert "--- long" in said
    assert "middle" not in said


@pytest.mark.parametrize("code", [0, 1])
def test_the_host_is_built_meanwhile(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Jobs that run in it wait for it, though they are longer; without it, they are not run."""
    begun: list[str] = []
    first = threading.Event()

    def output(self: Shards, argv: list[str], **_: object) -> tuple[int, str]:
        if "build" in argv:
            assert argv[:-1] == [shards.HOST, "--suite", "sid"]
            assert first.wait(60)
            return code, ""
        begun.append("in it" if "enter" in argv else "here")
        first.set()
        return 0, "1 passed in 1.00s"

    monkeypatch.setattr(Shards, "_output", output)
    jobs = [Job("a", (Path("a"),), 9, in_host=True), Job("b", (Path("b"),), 1, in_host=False)]
    pool = Shards(jobs, [], suite=["--suite", "sid"], reports=None)
    shards.run(pool)
    assert begun == ["here", "in it"][: 2 - code]
    assert pool.failed == ["the test host"] * code


def test_fewer_jobs_while_the_host_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each core and one more: three do not meet on one core, where three threads take jobs."""
    meeting = threading.Barrier(3)
    met: list[bool] = []
    done: list[str] = []
    all_done = threading.Event()

    def output(self: Shards, argv: list[str], **_: object) -> tuple[int, str]:
        if "build" in argv:
            assert all_done.wait(60)
            return 0, ""
        try:
            meeting.wait(0.3)
            met.append(True)
        except threading.BrokenBarrierError:
            pass
        done.append("")
        if len(done) == len(here):
            all_done.set()
        return 0, "1 passed in 1.00s"

    monkeypatch.setattr(Shards, "_output", output)
    monkeypatch.setattr(shards, "_CORES", 1)
    here = [Job(name, (Path(name),), 1, in_host=False) for name in "abc"]
    shards.run(Shards([*here, Job("d", (Path("d"),), 1, in_host=True)], [], reports=None))
    assert not met


def test_nobody_waits_for_a_host_that_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is built for the unit tests alone."""
    monkeypatch.setattr(Shards, "_output", lambda self, argv, **_: (0, "1 passed in 1.00s"))
    pool = Shards([Job("b", (Path("b"),), 1, in_host=False)], [], reports=None)
    assert pool.build_host() is None
    shards.run(pool)
    assert pool.counts == {"passed": 1}


@pytest.mark.parametrize(
    ("how", "script"),
    [
        ("says", "trap 'echo was here; kill $child; exit 1' INT; echo begun; sleep 60 & child=$!; wait"),
        ("ignores", "trap '' INT; echo begun; exec sleep 60"),
        ("leaves", "sleep 60 & echo $! > child; echo begun; wait"),
    ],
)
def test_a_job_that_does_not_end(
    how: str,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """It is interrupted, and says where it was; otherwise it is killed, whoever else has its output open."""
    monkeypatch.setattr(shards, "_LIMIT", 1.0)
    monkeypatch.setattr(shards, "_LAST_WORDS", 30.0 if how == "says" else 0.5)
    monkeypatch.setattr(shards, "CHECKOUT", tmp_path)
    pool = Shards([Job("long", (Path("a.py"),), 0.0, in_host=False)], (), reports=None)
    monkeypatch.setattr(pool, "_argv", lambda _: ["sh", "-c", script])
    pool.work()
    if how == "leaves":
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)  # it has not been waited for
    assert pool.failed == ["long"]
    said = capsys.readouterr().out
    assert "begun" in said
    assert ("was here" in said) == (how == "says")
    assert "ended: it took longer than 1 s" in said


def test_durations_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of pytest's reports; what was not run keeps its number, and a file that has gone loses it."""
    case = '<testcase classname="tests.unit.oci.test_{}{}" name="x" time="{}" />'
    cases = case.format("a", ".TestIt", 1.5) + case.format("a", "", 2) + case.format("b", "", 0.1)
    (tmp_path / "1.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    found = shards.reported(tmp_path)
    assert found == {"tests/unit/oci/test_a.py": 3.5, "tests/unit/oci/test_b.py": 0.1}
    for name in ("test_a.py", "test_b.py", "test_c.py"):
        (tmp_path / "tests/unit/oci").mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests/unit/oci" / name).touch()
    path = tmp_path / "durations.json"
    path.write_text('{"tests/unit/oci/test_c.py": 7, "tests/unit/gone.py": 9}')
    monkeypatch.setattr(shards, "DURATIONS", path)
    monkeypatch.setattr(shards, "CHECKOUT", tmp_path)
    shards.record(found)
    assert json.loads(path.read_text()) == {
        "tests/unit/oci/test_a.py": 4,
        "tests/unit/oci/test_b.py": 1,
        "tests/unit/oci/test_c.py": 7,
    }
