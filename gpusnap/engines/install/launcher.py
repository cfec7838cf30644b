"""gpusnap-runtime for `gpusnap install`: the program for the engines, and the settings file.

A distribution's package has the launcher in /usr/bin, and nothing needs to be installed. A wheel contains the
launcher as a file: static, without a C library, with the path ENTRY compiled in, because Podman runs it with
an environment of two variables. So it is copied to LAUNCHER, and ENTRY becomes a link to the console script
of gpusnap's environment, in whichever folder that is. A wheel that was built without a C compiler has none,
and the engines run the console script: thirty milliseconds slower for each command.
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpusnap import runtime_shim
from gpusnap.engines.install.files import join_root
from gpusnap.engines.install.installer import Item
from gpusnap.oci.base.dataclass import dataclass, list_fields
from gpusnap.runtime_shim import setting_keys, settings
from gpusnap.runtime_shim.base.errors import GpusnapError, reason
from gpusnap.runtime_shim.runtime.find import SETTINGS_FILE

PROGRAM = "gpusnap-runtime"
LAUNCHER = "/usr/local/bin/gpusnap-runtime"
ANOTHER_LAUNCHER = "/usr/local/libexec/gpusnap/launcher/gpusnap-runtime"
"""The copy's path if that name is a link to the environment's script, as `pipx install --global` makes it."""
ENTRY = "/usr/local/libexec/gpusnap/gpusnap-runtime"
"""The same as PYTHON_ENTRY of the launcher in a wheel; see setup.py."""

_SLOW = "this installation has no C launcher: each engine command takes 30 ms longer"
_PACKAGED = Path(runtime_shim.__file__).parent / "launcher" / PROGRAM


@dataclass(frozen=True, slots=True)
class Program:
    """The program for the engines."""

    path: str
    items: tuple[Item, ...] = ()
    notes: tuple[str, ...] = ()


def program(root: str = "/", packaged: Path = _PACKAGED) -> Program:
    """Return the program for the engines, and the files that it needs.

    `packaged` is the launcher in a wheel. Raises GpusnapError if gpusnap is not installed.
    """
    script = find_program(root)
    if script in (LAUNCHER, ENTRY):  # pip without an environment: the launcher would call itself
        return Program(script, notes=(_SLOW,))
    try:
        data = packaged.read_bytes()
    except FileNotFoundError:
        slow = _is_script(join_root(root, script))
        return Program(script, notes=(_SLOW,) if slow else ())
    except OSError as error:
        raise GpusnapError(
            f"the launcher {packaged} cannot be read: {reason(error)}",
            hint="reinstall gpusnap",
            code="GPS-002",
        ) from error
    entry = Item(ENTRY, "runtime", target=script)
    path = ANOTHER_LAUNCHER if _leads_to(LAUNCHER, script, root) else LAUNCHER
    return Program(path, (entry, Item(path, "runtime", data, 0o755)))


def _leads_to(path: str, target: str, root: str) -> bool:
    """Return whether a path is a link to the same file as `target`; both are paths of the host."""
    place = join_root(root, path)
    if not os.path.islink(place):
        return False
    led = join_root(root, os.path.join(os.path.dirname(path), os.readlink(place)))
    return os.path.realpath(led) == os.path.realpath(join_root(root, target))


def find_program(root: str = "/", name: str = PROGRAM) -> str:
    """Return an installed program: beside the present command, or in Python's folder for commands.

    The result is a path of the host, that is without `root`, and with unresolved links: a link to the current
    version should also apply to the engines. Raises GpusnapError if there is none.
    """
    own = sys.argv[0] if sys.argv and sys.argv[0] else ""
    places = [os.path.dirname(path) for path in (os.path.abspath(own), os.path.realpath(own)) if own]
    if places and os.path.join(places[0], name) in (LAUNCHER, ENTRY):
        del places[0]  # they are links to the program, or call it
    places += [sysconfig.get_path("scripts")]
    inside = [_strip_root(place, root) for place in dict.fromkeys(places)]
    for place in inside:
        path = os.path.join(place, name)
        with suppress(OSError):
            found = os.stat(join_root(root, path))
            if stat.S_ISREG(found.st_mode) and found.st_mode & 0o111:
                return path
    raise GpusnapError(
        f"the program {name} is not in {' or '.join(inside)}",
        hint="install gpusnap, from pipx, pip or its Debian package, into this tree",
        code="GPS-002",
    )


def _strip_root(path: str, root: str) -> str:
    """Return a path of this machine as a path of the tree `root`; unchanged if it is not in there."""
    if root in ("", "/"):
        return path
    relative = os.path.relpath(path, os.path.realpath(root))
    # A tree made for it may have the same folders as this machine, such as /usr/bin.
    return path if relative.startswith("..") else "/" + relative


def _is_script(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def settings_item() -> Item:
    """Return the settings file with all defaults as comments; an existing one is kept."""
    return Item(SETTINGS_FILE, "settings", settings_text().encode(), yields=True)


def settings_text() -> str:
    """Return all settings with their defaults, as comments."""
    lines = ["# gpusnap's settings, with their defaults; see docs/settings.md.", "#"]
    lines += ["# `gpusnap settings` checks this file and shows the settings in effect.", ""]
    section = ""
    for name in sorted(setting_keys.TABLE, key=lambda name: "." in name):
        table = name.rpartition(".")[0]
        if table != section:
            section = table
            lines.append("")
        # Whole names and no [table], so that a line can be appended, too.
        lines.append(f"# {name} = {_toml(_default(name))}")
    return "\n".join(lines) + "\n"


def _default(name: str) -> Any:
    value: Any = settings.Settings()
    for part in name.split("."):
        attribute = part.replace("-", "_")
        assert attribute in list_fields(value), name
        value = getattr(value, attribute)
    return value if name != "gpu-map" else ""


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    assert isinstance(value, str), value
    assert not set('"\\\n') & set(value), value
    return f'"{value}"'
