"""Configuration files of container engines, which `gpusnap install` reads before it adds its own."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from gpusnap.engines.install.files import join_root
from gpusnap.runtime_shim.base.errors import GpusnapError, advise, reason

HEAD = "# Written by `gpusnap install`, which overwrites it; `gpusnap uninstall` removes it."


def read(path: str, whose: str) -> Mapping[str, Any] | None:
    """Read a TOML file; None if there is none. Raises GpusnapError; `whose` is the engine's name."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise GpusnapError(
            f"{path} cannot be read: {reason(error)}", hint=advise(error) or "run it as root", code="GPS-005"
        ) from error
    except (ValueError, RecursionError) as error:
        raise GpusnapError(
            f"{path} is not TOML: {error}", hint=f"correct it; {whose} cannot read it either"
        ) from error


def drop_ins(root: str, folder: str, suffix: str = "") -> list[str]:
    """Return the files in a folder of drop-ins, as paths of the host, in the order in which they are read."""
    try:
        names = sorted(os.listdir(join_root(root, folder)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        where = join_root(root, folder)
        raise GpusnapError(
            f"{where} cannot be read: {reason(error)}", hint=advise(error) or "run it as root", code="GPS-005"
        ) from error
    return [f"{folder}/{name}" for name in names if name.endswith(suffix)]


def toml_list(words: Sequence[str]) -> str:
    """Return strings as a TOML array, each once."""
    # A JSON string is a TOML string, if no character is written as a pair of surrogates.
    return "[" + ", ".join(json.dumps(word, ensure_ascii=False) for word in dict.fromkeys(words)) + "]"
