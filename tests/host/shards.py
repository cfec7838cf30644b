"""The tests as jobs for one pool: all cores are busy to the end, and the longest job is first.

    tests/host/shards.py [--suite sid] [--unit | --all] [--record] [pytest's options]

A job is a file of the integration tests, in a test host of its own, or a few files of the unit tests, on the
machine itself. Without an option these are the integration tests; `--unit`: the unit tests; `--all`: both.
Names of files among pytest's options choose these alone. Two jobs for each core and one more run at once: an
integration test waits for about half of its time, for ticks, for CRIU, for a container to end. With three,
the cores are busy, but the whole takes longer: who waits asks more often. The output of a job is printed when
it is done. Exit code 1 where a test failed. A job that takes many times as long as it should is ended, and
says where it was. `--record` writes how long each file took to durations.json, by which the next runs sort.
Where the test host has to be built first, that goes on beside the unit tests.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

CHECKOUT = Path(__file__).resolve().parents[2]
INTEGRATION, UNIT = Path("tests/integration"), Path("tests/unit")
# Unit tests with control groups of version 2, which a machine with version 1 beside it does not let us make.
IN_HOST = (
    UNIT / "runtime_shim/snapshot/gpu_processes/test_paused_container.py",
    UNIT / "runtime_shim/snapshot/gpu_processes/test_dump_pause.py",
)
HOST = "tests/host/host"
# Bytecode of gpusnap, its tests and their Python: each job, and each test host, would compile it anew.
BYTECODE, BYTECODE_IN_HOST = CHECKOUT / "build/testhost-bytecode", "/var/cache/gpusnap-bytecode"
UNIT_BYTECODE = CHECKOUT / "build/unit-bytecode"
ENTER = ["enter", "--env", "GPUSNAP_TESTHOST=1", "--bind", f"{BYTECODE}:{BYTECODE_IN_HOST}", "--"]
# With the tests that take the longest: one that waits for something until a deadline passes all the same.
PYTEST = ["-m", "pytest", "-p", "no:cacheprovider", "-q", "--color=no", "--durations=3", "--durations-min=20"]
# Not what only the unit tests use, nor what a package of theirs brings: 0.2 s for each job.
PLUGINS_IN_HOST = ["-p", "no:hypothesispytest", "-p", "no:anyio"]
# -E: the test host has PYTHONDONTWRITEBYTECODE set for all else.
PYTHON_IN_HOST = ["/opt/gpusnap/bin/python", "-E", "-X", f"pycache_prefix={BYTECODE_IN_HOST}"]
DURATIONS = Path(__file__).with_name("durations.json")
# Seconds of unit tests that are one job: long beside pytest's start, short beside the whole.
UNIT_JOB = 90.0
# Of a file that durations.json does not have: an integration test's is begun first, in case it is long.
UNKNOWN_UNIT, UNKNOWN_INTEGRATION = 1.0, 1000.0
# A job is ended after so many seconds and so many times its own, of which no more than _LONG count: a slow
# machine takes two or three times as long. Then it has some seconds to say where it was.
_LIMIT, _TIMES, _LONG, _LAST_WORDS = 1200.0, 5.0, 300.0, 60.0
_CORES = os.cpu_count() or 1
# pytest's exit code where the options select no test of a file.
NONE_SELECTED = 5
_SUMMARY = re.compile(r"(\d+) (passed|failed|skipped|error)")
_ENDED = re.compile(r"\d (passed|failed|skipped|errors?|deselected)\b.* in \d+\.\d\ds")


@dataclass(frozen=True, slots=True)
class Job:
    """Files that one pytest runs."""

    name: str
    files: tuple[Path, ...]
    seconds: float
    """As long as it took when that was recorded."""
    in_host: bool


def host_jobs(files: Iterable[Path], durations: Mapping[str, float]) -> list[Job]:
    """A job for each file, in a test host."""
    return [
        Job(path.name, (path,), durations.get(str(path), UNKNOWN_INTEGRATION), in_host=True) for path in files
    ]


def unit_jobs(files: Iterable[Path], durations: Mapping[str, float], *, seconds: float) -> list[Job]:
    """Jobs of unit tests, of about so many seconds each; a file is never divided."""
    of = {path: durations.get(str(path), UNKNOWN_UNIT) for path in files}
    count = max(1, round(sum(of.values()) / seconds)) if of else 0
    parts: list[list[Path]] = [[] for _ in range(count)]
    lengths = [0.0] * count
    for path in sorted(of, key=lambda path: (-of[path], path)):
        least = lengths.index(min(lengths))
        parts[least].append(path)
        lengths[least] += of[path]
    return [
        Job(f"unit tests {number} of {count}", tuple(sorted(part)), length, in_host=False)
        for number, (part, length) in enumerate(zip(parts, lengths, strict=True), 1)
        if part
    ]


def summary(said: str) -> str:
    """The line in which pytest counts its tests; Python may print warnings after it."""
    return next((line for line in reversed(said.splitlines()) if _ENDED.search(line)), "")


def environ(job: Job) -> dict[str, str]:
    """The environment of a job: unit tests, and the programs that they start, share their bytecode."""
    found = dict(os.environ)
    if not job.in_host:
        found.pop("PYTHONDONTWRITEBYTECODE", None)
        found["PYTHONPYCACHEPREFIX"] = str(UNIT_BYTECODE)
    return found


class Shards:
    """Jobs that wait, and what has become of the others."""

    def __init__(
        self, jobs: Sequence[Job], options: Sequence[str], *, suite: Sequence[str] = (), reports: Path | None
    ) -> None:
        self._waiting = sorted(jobs, key=lambda job: -job.seconds)
        self._building = False  # the test host: jobs that run in it wait
        self._busy = 0  # jobs that are being run
        self._options = options
        self._host = [HOST, *suite, *ENTER]
        self._reports = reports
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False
        self.failed: list[str] = []
        self.counts: dict[str, int] = {}
        self.durations: dict[str, float] = {}

    def work(self) -> None:
        """One job after the other, until none waits."""
        while (job := self._take()) is not None:
            begun = time.monotonic()
            code, said = self._run(job)
            seconds = time.monotonic() - begun
            with self._lock:
                self._busy -= 1
                self._changed.notify_all()
                if code not in (0, NONE_SELECTED):
                    self.failed.append(job.name)
                for number, what in _SUMMARY.findall(summary(said)):
                    self.counts[what] = self.counts.get(what, 0) + int(number)
                if job.in_host and code == 0:
                    self.durations[str(job.files[0])] = seconds
                if code != NONE_SELECTED:
                    print(f"--- {job.name}, {seconds:.0f} s\n{said.rstrip()}", flush=True)

    def _take(self) -> Job | None:
        """The longest job that can be run now; None once there are no more.

        While the test host is built, fewer jobs run: the build and the check of types need the cores, too.
        """
        with self._lock:
            while self._waiting:
                for job in self._waiting:
                    if not self._building or not (job.in_host or self._busy > _CORES):
                        self._waiting.remove(job)
                        self._busy += 1
                        return job
                self._changed.wait()
        return None

    def build_host(self) -> threading.Thread | None:
        """Begin to build the test host, if any job needs it; the thread that does."""
        if not any(job.in_host for job in self._waiting):
            return None
        self._building = True
        thread = threading.Thread(target=self._build_host)
        thread.start()
        return thread

    def _build_host(self) -> None:
        """What it says goes to the terminal. Without it, the jobs that need it are not run."""
        code = 1
        try:
            code, _ = self._output([*self._host[: self._host.index("enter")], "build"], stderr=None)
        finally:
            with self._lock:
                if code:
                    self.failed.append("the test host")
                    self._waiting = [job for job in self._waiting if not job.in_host]
                self._building = False
                self._changed.notify_all()

    def end(self) -> None:
        """Have all of them end as an interrupt would, and begin no more."""
        with self._lock:
            self._ended = True
            running = list(self._running)
        for process in running:
            process.send_signal(signal.SIGINT)

    def _argv(self, job: Job) -> list[str]:
        words = [*PYTEST, *map(str, job.files), *self._options]
        if job.in_host:
            return [*self._host, *PYTHON_IN_HOST, *words, *PLUGINS_IN_HOST]
        report = [f"--junitxml={self._reports}/{job.name}.xml"] if self._reports else []
        return [sys.executable, *words, *report]

    def _run(self, job: Job) -> tuple[int, str]:
        limit = _LIMIT + _TIMES * min(job.seconds, _LONG)
        return self._output(self._argv(job), env=environ(job), limit=limit)

    def _output(
        self,
        argv: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        stderr: int | None = subprocess.STDOUT,
        limit: float | None = None,
    ) -> tuple[int, str]:
        """Exit code and output of a program, which `end` and a limit in seconds interrupt."""
        with self._lock:
            if self._ended:
                return 130, ""
            process = subprocess.Popen(
                argv,
                cwd=CHECKOUT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
            self._running.add(process)
        code, said = _wait(process, limit)
        with self._lock:
            self._running.discard(process)
        return code, said


def _wait(process: subprocess.Popen[str], limit: float | None) -> tuple[int, str]:
    """Exit code and output of a program; 124 if it did not end within so many seconds."""
    for seconds, end in ((limit, signal.SIGINT), (_LAST_WORDS, signal.SIGKILL), (_LAST_WORDS, None)):
        try:
            said, _ = process.communicate(timeout=seconds)
            break
        except subprocess.TimeoutExpired as error:
            said = (error.output or b"").decode(errors="replace")
            if end is not None:
                process.send_signal(end)
    else:  # what it has started has its output open
        process.poll()
        if process.stdout is not None:
            process.stdout.close()
    if end is signal.SIGINT:
        return process.returncode, said
    return 124, f"{said}\nended: it took longer than {limit:.0f} s"


def reported(reports: Path) -> dict[str, float]:
    """Seconds of each file of unit tests, from pytest's reports (junitxml)."""
    found: dict[str, float] = {}
    for report in reports.glob("*.xml"):
        for case in ElementTree.parse(report).iter("testcase"):
            words = case.attrib["classname"].split(".")
            module = next(i for i, word in enumerate(words) if word.startswith("test_"))
            path = "/".join(words[: module + 1]) + ".py"
            found[path] = found.get(path, 0.0) + float(case.attrib["time"])
    return found


def record(durations: Mapping[str, float]) -> None:
    """Write what was measured; of a file that was not run, what is there stays."""
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    all_of_them = {**known, **{path: max(1, round(seconds)) for path, seconds in durations.items()}}
    present = {path: seconds for path, seconds in all_of_them.items() if (CHECKOUT / path).exists()}
    DURATIONS.write_text(json.dumps(present, indent=0, sort_keys=True) + "\n")


def selected(words: Sequence[str], *, unit: bool, integration: bool) -> list[Job]:
    """The jobs for the files that are named among the words, or for all."""
    durations = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    in_host = [*IN_HOST, *(INTEGRATION / path.name for path in (CHECKOUT / INTEGRATION).glob("test_*.py"))]
    here = [path.relative_to(CHECKOUT) for path in (CHECKOUT / UNIT).rglob("test_*.py")]
    if named := {Path(word).name for word in words if word.endswith(".py")}:
        in_host = [path for path in in_host if path.name in named]
        here = [path for path in here if path.name in named]
        if missing := named - {path.name for path in (*in_host, *here)}:
            sys.exit(f"shards.py: there is no {', '.join(sorted(missing))}")
    jobs = unit_jobs(here, durations, seconds=UNIT_JOB) if unit else []
    return [*jobs, *(host_jobs(sorted(in_host), durations) if integration else [])]


def main() -> int:
    words = sys.argv[1:]
    suite, words = (words[:2], words[2:]) if words[:1] == ["--suite"] else ([], words)
    unit, both, recording = (flag in words for flag in ("--unit", "--all", "--record"))
    options = [word for word in words if word not in ("--unit", "--all", "--record")]
    jobs = selected(options, unit=unit or both, integration=both or not unit)
    BYTECODE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as reports:
        shards = Shards(
            jobs,
            [word for word in options if not word.endswith(".py")],
            suite=suite,
            reports=Path(reports) if recording else None,
        )
        run(shards)
        if recording:
            record({**shards.durations, **reported(Path(reports))})
    print("=== " + ", ".join(f"{number} {what}" for what, number in sorted(shards.counts.items())))
    if shards.failed:
        print("failed: " + " ".join(sorted(shards.failed)))
    return 1 if shards.failed or not shards.counts else 0


def run(shards: Shards) -> None:
    """Have all jobs done, or those that run ended at a signal."""
    threads = [threading.Thread(target=shards.work) for _ in range(2 * _CORES + 1)]

    def stop(_number: int, _frame: object) -> None:
        shards.end()

    before = {
        number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        builder = shards.build_host()
        for thread in threads:
            thread.start()
        for thread in (*threads, *([builder] if builder else [])):
            thread.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
