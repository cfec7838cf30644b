"""Local configuration: the settings file, and logins to registries."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from gpusnap.doctor.base.check import Check, make_refused, ok, warning
from gpusnap.doctor.base.sources import text
from gpusnap.oci.base.json_text import parse_json
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import SettingsError
from gpusnap.runtime_shim.runtime.find import SETTINGS_FILE
from gpusnap.runtime_shim.settings import Settings


def check_settings(path: str = SETTINGS_FILE) -> tuple[Settings, Check]:
    """Return the settings, or the defaults if the file is wrong."""
    try:
        found = settings_file.load(path)
    except SettingsError as error:
        return Settings(), make_refused(
            "settings", error, f"correct {path}; docs/settings.md describes every key", path=path
        )
    there = os.path.exists(path)
    says = f"{path} is valid" if there else f"{path} does not exist: defaults are used"
    return found, ok("settings", says, path=path, there=there)


def check_registries(pull_from: Iterable[str], files: Iterable[str], root: str = "/") -> Iterator[Check]:
    """Report for which registries there are credentials: only the registries' names."""
    found: dict[str, str] = {}
    for path in files:
        content = text(root, path)
        if not content or not content.strip():
            continue
        try:
            document = parse_json(content)
        except (ValueError, RecursionError):
            # Not the parser's own message: it may contain the text.
            yield warning("registries", f"{path} is not JSON", "correct it, or remove it and log in again")
            continue
        for key in _keys(document):
            found.setdefault(key, path)
    wanted = sorted({each.removeprefix("http://").partition("/")[0] for each in pull_from})
    missing = [host for host in wanted if not any(key.partition("/")[0] == host for key in found)]
    facts = {"registries": found, "pull_from": wanted, "without": missing}
    has = f"logged in to {', '.join(sorted(found))}" if found else "no logins"
    if missing:
        yield warning(
            "registries",
            f"{has}; store.pull-from names {', '.join(missing)}, for which there are no credentials",
            f"run podman login {missing[0]}, unless it can be read without a login",
            **facts,
        )
    else:
        yield ok("registries", has, **facts)


def _keys(document: object) -> Iterator[str]:
    for table in ("auths", "credHelpers"):
        entries = document.get(table) if isinstance(document, dict) else None
        for key in entries if isinstance(entries, dict) else ():
            host = str(key)
            for scheme in ("https://", "http://"):
                if host.startswith(scheme):
                    host = host.removeprefix(scheme).partition("/")[0]
            yield host
    if isinstance(document, dict) and document.get("credsStore"):
        yield f"those in docker-credential-{document['credsStore']}"
