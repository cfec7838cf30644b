"""examples/ci: a snapshot of a warm service in a registry, and test jobs that start from it.

What the tests run are the commands of the two pipelines, as their files have them, in their order.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import registryhost
import shimhost
import waiting
import yaml
from support import DEADLINE, GPUWORK, Done, good, podman, run

SRC = Path(__file__).resolve().parents[2]
EXAMPLES = SRC / "examples" / "ci"
WARM_UP = 1  # seconds

# A server that needs a while until it is warm, and then says what its program on the GPU says.
SERVICE = f"""\
mkdir -p /www
/gpuwork --mib 16 --tick 30 --delay {WARM_UP} > /www/ticks &
exec httpd -f -p 127.0.0.1:8000 -h /www
"""
# One part of the tests: nobody else was here, and the program goes on, its memory right.
PART = """\
set -eu
part=$1
get() { podman exec "$SERVICE" wget -q -O - http://127.0.0.1:8000/ticks; }
podman exec "$SERVICE" sh -c "! test -e /www/mine && echo $part > /www/mine"
before=$(get | wc -l)
until [ "$(get | wc -l)" -gt $((before + 2)) ]; do :; done
get > "$RESULTS/$part"
"""
READY = "wget -q -O - http://127.0.0.1:8000/ticks | grep -q 'tick=2 ok'"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """For all tests of this file, which so have one snapshot in common."""
    with tempfile.TemporaryDirectory(prefix="ci-") as name:
        for program, text in {"sudo": '#!/bin/sh\nexec "$@"\n', "service": SERVICE, "part": PART}.items():
            Path(name, program).write_text(text)
            Path(name, program).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def registry(folder: Path) -> Iterator[str]:
    """Host and port of one with passwords, which Podman shall speak to without TLS."""
    with registryhost.running(passwords=True) as found:
        (folder / "registries.conf").write_text(f'[[registry]]\nlocation = "{found.host}"\ninsecure = true\n')
        yield found.host


def _real_runtime() -> str:
    """A crun whose CRIU can dump the service's TCP socket: from Linux 6.16 on 4.2 or later is needed."""
    newer = Path("/opt/newer/bin/crun")
    if newer.exists() and run(newer, "--version").code == 0:
        return str(newer)
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 16):
        pytest.skip("no CRIU in the test host dumps TCP sockets on this kernel")
    return "crun"


@pytest.fixture
def variables(crun: None, folder: Path, registry: str) -> dict[str, str]:
    """Those of a pipeline, for this host."""
    store = folder / "store"
    shimhost.write_settings(
        f'runtime = "{_real_runtime()}"\n[memory]\nchunk-size = "1M"\n[store]\npath = "{store}"\n'
    )
    mounts = f"--volume {GPUWORK}:/gpuwork:ro --volume {folder}/service:/service:ro"
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "HOME": str(folder),
        "CONTAINERS_REGISTRIES_CONF": str(folder / "registries.conf"),
        "REGISTRY_AUTH_FILE": str(folder / "auth.json"),
        "REGISTRY": registry,
        "REGISTRY_USER": registryhost.USER,
        "REGISTRY_PASSWORD": registryhost.PASSWORD,
        "REPOSITORY": f"http://{registry}/ci/server",
        "IMAGE": "localhost/base",
        "COMMAND": "sh /service",
        "OPTIONS": f"--device nvidia.com/gpu=all --network none {mounts}",
        "MODEL": "rev-7",
        "READY": READY,
        "TEST": f"sh {folder}/part",
    }


def begun(script: str, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    """A job's steps: both run them by `bash -e`."""
    return subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=SRC,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(job: subprocess.Popen[str]) -> Done:
    """Its end; whether well or not, no container is left of it."""
    out, err = waiting.communicate(job, 2 * DEADLINE)
    return Done(job.returncode, out, err)


def done(script: str, variables: Mapping[str, str]) -> Done:
    return ended(begun(script, variables))


def nothing_left() -> None:
    assert good(podman("ps", "--all", "--quiet")) == ""


@dataclass(frozen=True)
class Pipeline:
    """The scripts of a pipeline's two jobs, and the variable that names the second's part."""

    snapshot: str
    test: str
    part: str

    @classmethod
    def github(cls) -> Pipeline:
        jobs = yaml.safe_load((EXAMPLES / "github-actions.yml").read_text())["jobs"]
        snapshot, test = (
            "\n".join(step["run"] for step in jobs[job]["steps"] if "run" in step)
            for job in ("snapshot", "test")
        )
        return cls(snapshot, test, "PART")

    @classmethod
    def gitlab(cls, folder: Path) -> Pipeline:
        file = yaml.safe_load((EXAMPLES / "gitlab-ci.yml").read_text())
        before = file["default"]["before_script"]
        snapshot, test = ("\n".join([*before, *file[job]["script"]]) for job in ("snapshot", "test"))
        # The checkout is read-only here.
        return cls(snapshot.replace("snapshot.env", f"{folder}/result"), test, "CI_NODE_INDEX")


def test_the_pipelines(variables: dict[str, str], tmp_path: Path) -> None:
    """One warm service, jobs at once that each go on from where it was, and nothing left of any.

    The second pipeline finds the snapshot of the first one.
    """
    snapshots: list[str] = []
    for pipeline in (Pipeline.github(), Pipeline.gitlab(tmp_path)):
        output = tmp_path / "result"
        output.unlink(missing_ok=True)
        first = done(pipeline.snapshot, {**variables, "GITHUB_OUTPUT": str(output)})
        good(first)
        assert ("warm after" in first.err) == (not snapshots)
        nothing_left()
        found = re.fullmatch(
            r"snapshot=(http://\S+/ci/server@sha256:[0-9a-f]{64})\n", output.read_text(), re.IGNORECASE
        )
        assert found, output.read_text()
        snapshots.append(found[1])
        job = {**variables, "SNAPSHOT": found[1], "GITHUB_RUN_ID": "7", "GITHUB_RUN_ATTEMPT": "1"}
        job["RESULTS"] = str(tmp_path)
        parts = ("1",) if snapshots[1:] else ("1", "2")
        jobs = [begun(pipeline.test, {**job, pipeline.part: part, "CI_JOB_ID": part}) for part in parts]
        for each in [ended(each) for each in jobs]:
            good(each)
        nothing_left()
        for part in parts:
            ticks = re.findall(r"tick=(\d+) (ok|BAD)", (tmp_path / part).read_text())
            numbers = [int(tick) for tick, _ in ticks]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            assert {right for _, right in ticks} == {"ok"}
            (tmp_path / part).unlink()
    assert snapshots[0] == snapshots[1]


SNAPSHOT = 'sh examples/ci/snapshot.sh -r "$REPOSITORY" -i "$IMAGE" -o "$OPTIONS" -k "$MODEL" -w "$READY"'


@pytest.fixture
def logged_in(variables: dict[str, str]) -> dict[str, str]:
    """The variables, after what the pipelines do first."""
    script = 'podman login --username "$REGISTRY_USER" --password "$REGISTRY_PASSWORD" "$REGISTRY"'
    good(done(script, variables))
    return variables


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"COMMAND": "false"}, "has ended before it was warm"),
        ({"READY": "false", "COMMAND": "sleep 100"}, "is not warm after 1 s"),
    ],
)
def test_not_warm(logged_in: dict[str, str], what: Mapping[str, str], says: str) -> None:
    """It says so, and nothing is left running."""
    failed = done(f"{SNAPSHOT} -t 1 -- $COMMAND", {**logged_in, **what})
    assert failed.code == 1
    assert says in failed.err
    nothing_left()


def test_without_a_login(variables: dict[str, str]) -> None:
    """A registry that lets nobody in is not taken for one that has no snapshot: nothing is started."""
    failed = done(f"{SNAPSHOT} -- $COMMAND", {**variables, "REGISTRY_AUTH_FILE": "/nowhere"})
    assert failed.code == 1
    assert "after" not in failed.err
    assert "gpusnap: " in failed.err


def test_run(logged_in: dict[str, str]) -> None:
    """The test's exit code is the job's; its container is removed, somebody else's of that name is not."""
    snapshot = good(done(f"{SNAPSHOT} -- $COMMAND", logged_in))
    run_it = f"sh examples/ci/run.sh -w true {snapshot} job sh -c"
    assert done(f"{run_it} 'exit 7'", logged_in).code == 7
    nothing_left()
    good(podman("run", "-d", "--name", "job", "localhost/base", "sleep", "100"))
    refused = done(f"{run_it} 'exit 7'", logged_in)
    assert refused.code == 1
    assert "the container job already exists" in refused.err
    assert good(podman("container", "inspect", "--format", "{{.State.Status}}", "job")) == "running"
    good(podman("rm", "--force", "--time", "0", "job"))


@pytest.mark.parametrize("script", ["snapshot.sh", "run.sh"])
def test_usage(host: None, script: str) -> None:
    """Without what it needs it prints its first lines, and nothing of its code."""
    said = run("sh", EXAMPLES / script)
    assert said.code == 2
    assert said.err.splitlines()[2].startswith(f"  {script} [-" if script == "run.sh" else f"  {script} -r")
    assert "set -eu" not in said.err
