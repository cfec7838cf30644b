"""Install gpusnap from a checkout, as a package would: the launcher on PATH, the Python entry in libexec.

For the test host, and for a machine that is given to tests; nothing is asked before files are written.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

LAUNCHER = Path("/usr/local/bin/gpusnap-runtime")
ENTRY = Path("/usr/libexec/gpusnap/gpusnap-runtime")
COMMAND = Path("/usr/local/bin/gpusnap")
HOOK = Path("/usr/local/bin/gpusnap-hook")
SETTINGS = Path("/etc/gpusnap/gpusnap.toml")

# As README.md tells people to do it.
PODMAN = Path("/etc/containers/containers.conf.d/gpusnap.conf")
_PODMAN = """\
[engine]
runtime_supports_json = ["crun", "runc", "gpusnap-runtime"]
[engine.runtimes]
gpusnap-runtime = ["/usr/local/bin/gpusnap-runtime"]
"""

_CACHE = "/var/cache/gpusnap-bytecode"

# In the test host, SIGABRT has a command print the stacks of its threads: tests/integration/waiting.py.
_STACKS = """\
import faulthandler
faulthandler.enable()
"""

_SCRIPT = """#!{python}
import sys
{stacks}\
sys.path[:0] = [{checkout!r}]
sys.path += {others!r}
from {module} import main
sys.exit(main())
"""


def install(checkout: Path, *, python: str = sys.executable, path: tuple[str, ...] = ()) -> Path:
    """Install from `checkout`, whose launcher has been built; the path of gpusnap-runtime.

    `path`: all other folders that Python is to import from; it then leaves out what `site` does at its start,
    as a package's Python has hardly any of it, and an environment with PyTorch takes 0.1 s for it.
    """
    # The test host's checkout cannot be written to, and to compile all of it takes longer than to run it.
    in_test_host = os.environ.get("GPUSNAP_TESTHOST") == "1"
    cache = f"Xpycache_prefix={_CACHE}" if in_test_host else ""
    modules = {
        ENTRY: "gpusnap.runtime_shim.shim.entry",
        COMMAND: "gpusnap.cli.entry",
        HOOK: "gpusnap.hooks.main",
    }
    for target, module in modules.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = f"-I{'S' if path else ''}{cache}"
        target.write_text(
            _SCRIPT.format(
                python=f"{python} {flags}",
                stacks=_STACKS if in_test_host else "",
                checkout=str(checkout),
                others=list(path),
                module=module,
            )
        )
        target.chmod(0o755)
    PODMAN.parent.mkdir(parents=True, exist_ok=True)
    PODMAN.write_text(_PODMAN)
    LAUNCHER.unlink(missing_ok=True)
    shutil.copy(checkout / "runtime_shim/launcher/build/gpusnap-runtime", LAUNCHER)
    return LAUNCHER


def write_settings(text: str) -> None:
    """Put a settings file in place; an empty text removes it."""
    SETTINGS.parent.mkdir(parents=True, exist_ok=True)
    if text:
        SETTINGS.write_text(text)
    elif SETTINGS.exists():
        os.unlink(SETTINGS)


class Writer:
    """Writes the settings file with a first part that stays."""

    def __init__(self, first: str) -> None:
        self._first = first

    def __call__(self, text: str) -> None:
        write_settings(self._first + text)


def main() -> None:
    """`shimhost.py [RUNTIME]`: install from this checkout, in front of that runtime."""
    checkout = Path(__file__).resolve().parents[2]
    print(f"installed {install(checkout)}")
    if len(sys.argv) > 1:
        write_settings(f'runtime = "{sys.argv[1]}"\n')


if __name__ == "__main__":
    main()
