"""`make demo`: a container that uses a GPU is checkpointed with Podman, removed, and restored.

    python3 demo/demo.py [--here | --software] [--mib N]

Where there is an NVIDIA GPU and what it takes to checkpoint a container, the story (story.py) runs on this
machine. Elsewhere it runs in the test host (tests/host), with softgpu as the GPU. This part decides, builds
what is needed and starts the story; standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # the checkout stays as it is
CHECKOUT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent), str(CHECKOUT / "tests" / "host")]

import foreground  # noqa: E402  the paths come first
import machine  # noqa: E402
from report import DemoError, say  # noqa: E402
from testhost import packages, recipe  # noqa: E402
from testhost.report import HostError  # noqa: E402

STORY = "demo/story.py"


def main() -> int:
    options = _parse()
    try:
        if os.geteuid() != 0:
            raise DemoError("checkpointing a container needs root; run `sudo make demo`")
        os.environ["PATH"] = machine.search_path()
        say("gpusnap: checkpoint a container that uses a GPU, remove it, and bring it back.\n")
        reason = "" if options.software else machine.obstacle()
        if options.here and reason:
            raise DemoError(f"{reason}; without --here the demo uses softgpu")
        if options.software or reason:
            say(f"{reason or 'As asked'}: this runs on softgpu, a GPU in software, in a throw-away host.")
            return _software(options.mib or 64)
        say("There is an NVIDIA GPU: the demo runs on this machine, with the real driver.")
        return _here(options.mib or 256)
    except (DemoError, HostError) as error:
        say(f"demo: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, foreground.Stopped) as stopped:
        say("demo: stopped", file=sys.stderr)
        return stopped.code if isinstance(stopped, foreground.Stopped) else 128 + signal.SIGINT


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Checkpoint and restore a GPU container with Podman.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--here", action="store_true", help="use this machine's GPU, or fail and say why")
    which.add_argument("--software", action="store_true", help="use softgpu, even if there is a GPU")
    parser.add_argument("--mib", type=int, help="device memory that the workload fills (256; softgpu: 64)")
    options = parser.parse_args()
    if options.mib is not None and not 1 <= options.mib <= 8192:
        parser.error("--mib takes 1 to 8192")
    return options


def _software(mib: int) -> int:
    say("Setting up softgpu, gpusnap's launcher and the host; a few minutes the first time …")
    packages.ensure()
    foreground.make("softgpu", checkout=CHECKOUT)
    foreground.make("runtime_shim/launcher", checkout=CHECKOUT)
    python = f"{recipe.VENV}/bin/python"
    enter = [str(CHECKOUT / "tests/host/host"), "enter", "--", python, STORY, "--software", "--mib", str(mib)]
    return foreground.run(enter, cwd=CHECKOUT)


def _here(mib: int) -> int:
    packages.ensure({name: packages.NEEDED[name] for name in ("gcc", "make", "libc6-dev")})
    foreground.make("softgpu", "build/bin/gpuwork", checkout=CHECKOUT)
    python = machine.interpreter(CHECKOUT)
    story = [python, "-B", STORY]
    code = foreground.run([*story, "--here", "--mib", str(mib)], cwd=CHECKOUT)
    if code == 128 + signal.SIGKILL:  # any other end it tidies up after itself
        say("demo: killed; removing what it left", file=sys.stderr)
        foreground.run([*story, "--tidy"], cwd=CHECKOUT)
    return code


if __name__ == "__main__":
    sys.exit(main())
