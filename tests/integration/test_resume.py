"""What a killed gpusnap leaves, and how it is brought back."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from support import RUNTIME, Container, faults, good, run, until


def test_resume_after_a_kill(crun: None, tmp_path: Path) -> None:
    """SIGKILL to the shim while its processes are suspended: `gpusnap resume` brings them back, with all."""
    container = Container.start("w", "--mib", "8")
    init, image = container.pid, tmp_path / "image"
    flag = tmp_path / "flag"
    # Stands in for crun: the dump never begins, and the shim waits for it.
    wrapper = tmp_path / "crun"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" checkpoint --image-path"*) touch {flag}; exec sleep 600;; esac\n'
        'exec /usr/bin/crun "$@"\n'
    )
    wrapper.chmod(0o755)
    Path("/etc/gpusnap/gpusnap.toml").write_text(f'runtime = "{wrapper}"\n[memory]\npages = "criu"\n')
    words = [RUNTIME, "checkpoint", "--image-path", str(image), "--work-path", str(tmp_path), container.id]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as shim:
        until(flag.exists, "the dump")
        shim.kill()
    sleeper = next(int(pid) for pid in run("pgrep", "-x", "sleep").out.split())
    os.kill(sleeper, signal.SIGKILL)
    assert "stopped" in Path(f"/proc/{init}/status").read_text()
    assert f"running: {init}" in good(run("/usr/local/bin/gpusnap", "resume", str(init)))
    container.goes_on()
    good(run("/usr/local/bin/gpusnap", "resume", str(init)))  # it runs already: nothing happens
    container.goes_on()
    faults("")


def test_resume_of_what_is_no_gpu_process(crun: None) -> None:
    """One sentence, and exit code 1."""
    done = run("/usr/local/bin/gpusnap", "resume", "1")
    assert done.code == 1
    assert "process 1 is no GPU process" in done.err
