"""What reaches CRIU: the settings, and the driver's mounts that nobody declares."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import gpuhost
import pytest
import shimhost
import waiting
from conftest import SRC
from support import (
    DEADLINE,
    GPUS_CONF,
    STORAGE,
    Container,
    good,
    manifest,
    members,
    podman,
    run,
    sentence,
    until,
)

from gpusnap.runtime_shim.process import proc

WORK = ("--mib", "8")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.tar.zst"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A CRIU action script that writes down each action."""
    log = tmp_path / "actions"
    path = tmp_path / "script"
    path.write_text(f'#!/bin/sh\necho "$CRTOOLS_SCRIPT_ACTION" >> {log}\n')
    path.chmod(0o755)
    return path


def test_action_script(real: str, settings: shimhost.Writer, archive: Path, script: Path) -> None:
    """criu.action-script runs at the stages of a dump and of a restore."""
    settings(f'[criu]\naction-script = "{script}"\n')
    container = Container.start("w", *WORK)
    good(container.checkpoint(archive))
    container.remove()
    Container.restore("w", archive).goes_on()
    actions = (script.parent / "actions").read_text().split()
    assert "post-dump" in actions
    assert "post-restore" in actions


_WAITS = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0
touch {met}
while [ -e {met} ]; do sleep 0.05; done
"""


def test_stopped_in_a_dump(real: str, settings: shimhost.Writer, archive: Path, tmp_path: Path) -> None:
    """A signal stops CRIU and the runtime while the container stands: they go on, and it is not lost."""
    script, met = tmp_path / "script", tmp_path / "met"
    script.write_text(_WAITS.format(met=met))
    script.chmod(0o755)
    settings(f'[criu]\naction-script = "{script}"\n')
    container = Container.start("w", *WORK)
    line = [
        "podman",
        "--runtime",
        "gpusnap-runtime",
        "container",
        "checkpoint",
        "--export",
        str(archive),
        "w",
    ]
    null = subprocess.DEVNULL
    with waiting.Process(line, stdin=null, stdout=null, stderr=subprocess.PIPE, text=True) as engine:
        try:
            until(lambda: met.exists() or engine.poll() is not None, "the end of CRIU's dump")
            stopped = [pid for pid in proc.pids() if proc.comm(pid) in ("criu", real)]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            assert len(stopped) >= 2, "it has ended already"
            met.unlink()
            said = engine.communicate(timeout=DEADLINE)[1]
        finally:
            met.unlink(missing_ok=True)
            engine.kill()
    assert engine.returncode == 0, said
    assert "was stopped by a signal, and has to go on" in said
    container.remove()
    Container.restore("w", archive).goes_on()


@pytest.mark.parametrize(
    "killed", [("criu",), ("gpusnap-runtime", "crun", "runc", "criu")], ids=["criu", "all"]
)
def test_the_network_after_criu_is_killed(
    real: str, settings: shimhost.Writer, tmp_path: Path, killed: tuple[str, ...]
) -> None:
    """CRIU drops all packets of a container that it dumps; one that is killed does not end that itself."""
    script, met = tmp_path / "script", tmp_path / "met"
    script.write_text(_WAITS.format(met=met))
    script.chmod(0o755)
    settings(f'[criu]\naction-script = "{script}"\n')
    container = Container.start("w", *WORK, options=["--network", "bridge"])

    def is_locked() -> bool:
        words = ("nsenter", "--target", str(container.pid), "--net")
        return any("CRIU" in run(*words, program, "-S").out for program in ("iptables", "ip6tables"))

    line = ["podman", "--runtime", "gpusnap-runtime", "container", "checkpoint", "--leave-running", "w"]
    with waiting.Process(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as engine:
        try:
            until(lambda: met.exists() or engine.poll() is not None, "the end of CRIU's dump")
            assert is_locked()
            for pid in [pid for name in killed for pid in proc.pids() if proc.comm(pid) == name]:
                os.kill(pid, signal.SIGKILL)
        finally:
            met.unlink(missing_ok=True)
        engine.wait(DEADLINE)
    assert engine.returncode != 0
    if len(killed) > 1:
        assert is_locked()
        good(run("/usr/local/bin/gpusnap", "recover", container.id))
    assert not is_locked()
    container.goes_on()


def test_ghost_limit(real: str, settings: shimhost.Writer, archive: Path) -> None:
    """A deleted file that is open is carried along up to criu.ghost-limit, which an annotation lowers."""
    grow = "head -c 4194304 /dev/urandom > /g; exec 3< /g; rm /g; exec /gpuwork --mib 8 --tick 30"
    container = Container.start("w", script=grow, options=["--annotation", "io.gpusnap.criu.ghost-limit=1M"])
    assert "ghost" in sentence(container.checkpoint(archive))
    container.unharmed()
    container.remove()
    container = Container.start("w", script=grow)
    good(container.checkpoint(archive))
    container.remove()
    Container.restore("w", archive).goes_on()


def test_manage_cgroups_ignore(real: str, settings: shimhost.Writer, archive: Path) -> None:
    """crun and runc 1.3 are told by their option; runc 1.1 needs its file, which the refusal names."""
    settings('[criu]\nmanage-cgroups = "ignore"\n')
    container = Container.start("w", *WORK)
    file = Path("/etc/criu/runc.conf")
    if "ignore" not in good(run(real, "checkpoint", "--help")) and real == "runc":
        assert "/etc/criu/runc.conf" in sentence(container.checkpoint(archive))
        container.unharmed()
        file.parent.mkdir(exist_ok=True)
        file.write_text("manage-cgroups=ignore\n")
    try:
        good(container.checkpoint(archive))
        container.remove()
        Container.restore("w", archive).goes_on()
    finally:
        file.unlink(missing_ok=True)


def test_unknown_option_for_criu(real: str, settings: shimhost.Writer, archive: Path) -> None:
    """A line that CRIU does not know ends in a sentence, and the container runs on."""
    settings('[criu]\noptions = ["no-such-option"]\n')
    container = Container.start("w", *WORK)
    sentence(container.checkpoint(archive))
    container.unharmed()


def test_annotation_of_the_caller_has_the_last_word(newer: str, archive: Path, tmp_path: Path) -> None:
    """org.criu.config, where the runtime takes it, goes on to work beside ours."""
    log = tmp_path / "actions"
    own = tmp_path / "own"
    own.write_text(f"#!/bin/sh\necho $CRTOOLS_SCRIPT_ACTION >> {log}\n")
    own.chmod(0o755)
    config = tmp_path / "criu.conf"
    config.write_text(f"action-script {own}\n")
    container = Container.start("w", *WORK, options=["--annotation", f"org.criu.config={config}"])
    good(container.checkpoint(archive))
    assert "post-dump" in log.read_text().split()
    container.remove()
    Container.restore("w", archive).goes_on()


def test_mounts_of_the_driver(real: str, archive: Path) -> None:
    """CDI's mounts, one below a symbolic link of the image, one without a type in config.json."""
    container = Container.start("w", *WORK)
    good(container.checkpoint(archive))
    container.remove()
    again = Container.restore("w", archive)
    again.goes_on()
    firmware = "/lib/firmware/nvidia/560.35.03/gsp_ga10x.bin"
    assert good(podman("exec", "w", "cat", firmware)) == "GSP"
    assert "ro" in good(podman("exec", "w", "sh", "-c", f"grep {firmware} /proc/mounts")).split()[3].split(
        ","
    )


def test_mount_of_a_symbolic_link(real: str, archive: Path) -> None:
    """A library mounted by hand, by the name that is a link on this host."""
    link = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
    container = Container.start("w", *WORK, options=["-v", f"{link}:/opt/libcuda.so.1:ro"])
    good(container.checkpoint(archive))
    container.remove()
    Container.restore("w", archive).goes_on()


def test_cgroups_after_a_restore(crun: None, archive: Path) -> None:
    """With CRIU told to ignore cgroups every process is in the container's cgroup again, and nowhere else."""
    shimhost.write_settings('runtime = "crun"\n[criu]\nmanage-cgroups = "ignore"\n')
    _check_cgroups(archive)


def test_cgroups_after_a_restore_by_newer_runtimes(newer: str, archive: Path) -> None:
    """The same with the next releases; crun restores only init into it, and the shim moves the rest."""
    text = shimhost.SETTINGS.read_text()
    shimhost.write_settings(text + '[criu]\nmanage-cgroups = "ignore"\n')
    _check_cgroups(archive)


def _check_cgroups(archive: Path) -> None:
    container = Container.start("w", *WORK, "--procs", "2", "--children", "1", workers=2)
    before = {Path(f"/proc/{pid}/cgroup").read_text() for pid in members(container)}
    count = len(members(container))
    good(container.checkpoint(archive))
    container.remove()
    again = Container.restore("w", archive)
    again.goes_on()
    assert len(members(again)) == count == 5
    assert {Path(f"/proc/{pid}/cgroup").read_text() for pid in members(again)} == before


def test_mounts_of_a_hook(real: str, archive: Path) -> None:
    """NVIDIA's hook covers a file in /proc from a tmpfs of its own; neither is in config.json."""
    gpuhost.install(SRC / "softgpu/build", GPUS_CONF, modified_params=True)
    try:
        container = Container.start("w", *WORK)
        hidden = good(podman("exec", "w", "cat", gpuhost.PARAMS_FILE))
        good(container.checkpoint(archive))
        container.remove()
        Container.restore("w", archive).goes_on()
        assert good(podman("exec", "w", "cat", gpuhost.PARAMS_FILE)) == hidden
    finally:
        gpuhost.install(SRC / "softgpu/build", GPUS_CONF)


def test_mount_that_the_legacy_runtime_makes(real: str, archive: Path, tmp_path: Path) -> None:
    """A library of the driver mounted from outside, which config.json does not list: declared as external."""
    source = Path("/usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so.560.35.03")
    source.write_bytes(b"PTX")
    target = f"/usr/lib/x86_64-linux-gnu/{source.name}"
    hook = tmp_path / "hook"
    hook.write_text(
        "#!/bin/sh\n"
        "state=$(cat)\n"
        'bundle=$(echo "$state" | sed "s/.*\\"bundle\\":\\"\\([^\\"]*\\)\\".*/\\1/")\n'
        'root=$(sed "s/.*\\"root\\":{\\"path\\":\\"\\([^\\"]*\\)\\".*/\\1/" "$bundle/config.json")\n'
        f'mkdir -p "$root/usr/lib/x86_64-linux-gnu" && touch "$root{target}"\n'
        f'mount --bind {source} "$root{target}"\n'
    )
    hook.chmod(0o755)
    hooks = tmp_path / "hooks.d"
    hooks.mkdir()
    entry = {
        "version": "1.0.0",
        "hook": {"path": str(hook)},
        "when": {"always": True},
        "stages": ["createContainer"],
    }
    (hooks / "legacy.json").write_text(json.dumps(entry))
    command = ["localhost/base", "/gpuwork", "--tick", "30", "--rest", "24", *WORK]
    options = ["--device", "nvidia.com/gpu=all", "-v", "/usr/local/bin/gpuwork:/gpuwork:ro"]
    good(podman("--hooks-dir", str(hooks), "run", "-d", "--name", "w", *options, *command))
    container = Container("w")
    if podman("exec", "w", "cat", target).out != "PTX":
        pytest.skip("under this runtime no mount of a createContainer hook by a path of the host shows")
    good(container.checkpoint(archive))
    assert target in [mount["destination"] for mount in manifest(archive)["mounts"]]
    container.remove()
    Container.restore("w", archive).goes_on()
    assert good(podman("exec", "w", "cat", target)) == "PTX"
    source.unlink()


def test_nothing_of_ours_is_left(crun: None, archive: Path) -> None:
    """No file of ours in /run or /tmp after a checkpoint, a refusal and a restore."""
    before = {*Path("/run").glob("gpusnap-*"), *Path("/tmp").glob("gpusnap-*")}
    container = Container.start("w", *WORK)
    sentence(container.checkpoint(archive, "--pre-checkpoint"))
    good(container.checkpoint(archive))
    container.remove()
    Container.restore("w", archive).goes_on()
    assert {*Path("/run").glob("gpusnap-*"), *Path("/tmp").glob("gpusnap-*")} == before
    assert list(STORAGE.glob("*/userdata/.config-*")) == []
    assert run("findmnt", "-n", "-t", "tmpfs", "-o", "TARGET").out.count("criu") == 0
