"""What this machine must have installed, and where it gets packages from."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterable

from . import recipe
from .report import HostError, say

APT = ("apt-get", "-q", "-o", "Acquire::Check-Valid-Until=false", "-o", "DPkg::Lock::Timeout=300")
MIRROR_TIMEOUT_S = 15


def _command(name: str) -> Callable[[], bool]:
    return lambda: shutil.which(name) is not None


# package: whether this machine has what it is wanted for, wherever that came from
NEEDED: dict[str, Callable[[], bool]] = {
    "debootstrap": _command("debootstrap"),
    "gcc": _command("gcc"),
    "make": _command("make"),
    "libc6-dev": lambda: os.path.exists("/usr/include/stdio.h"),
    "python3-venv": lambda: importlib.util.find_spec("ensurepip") is not None,
}


def ensure(needed: dict[str, Callable[[], bool]] = NEEDED) -> list[str]:
    """Install what is missing, and return it."""
    missing = [package for package, present in needed.items() if not present()]
    if not missing:
        return []
    say(f"this machine lacks {', '.join(missing)}; installing with apt")
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = [*APT, "install", "-y", "--no-install-recommends", *missing]
    for argv in ([*APT, "update"], install):
        # stdout is the command's; apt's chatter goes where our own messages go.
        if subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode:
            raise HostError(
                f"{' '.join(argv)} failed", f"Install {' '.join(missing)} yourself, then run this again"
            )
    return missing


def mirror(suite: str) -> str:
    """The first archive among this machine's apt sources that has the suite, else Debian's own."""
    # REPO_URI needs no fetched index; other fields would.
    listing = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    for candidate in candidates(listing.split()):
        if _has_suite(candidate, suite):
            return candidate
    return recipe.DEFAULT_MIRROR


def candidates(addresses: Iterable[str]) -> list[str]:
    """Those that may be a mirror of Debian's main archive (not of its security or of somebody else's)."""
    found = dict.fromkeys(address.rstrip("/") for address in addresses)
    return [a for a in found if re.match(r"https?://.*/debian(/|$)", a) and "security" not in a]


def _has_suite(address: str, suite: str) -> bool:
    request = urllib.request.Request(f"{address}/dists/{suite}/InRelease", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=MIRROR_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def proxies() -> dict[str, str]:
    """The proxy that apt uses here, as the environment that tells the tree's apt and debootstrap."""
    names = ("http_proxy", "https_proxy", "no_proxy")
    env = {name: os.environ[name] for name in names if os.environ.get(name)}
    config = subprocess.run(
        ["apt-config", "shell", "P", "Acquire::http::Proxy"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    if match := re.match(r"P='(http[^']+)'", config):
        env.setdefault("http_proxy", match[1])
    return env
