"""gpusnap's commands, and an empty store of this host's, for the tests that run them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import shimhost
from support import Done, good, run

from gpusnap.oci.store.store import Store

COMMAND = "/usr/local/bin/gpusnap"
STORE = Path("/var/lib/gpusnap-test")
PLAIN_BUT_RUNTIME = f'[store]\npath = "{STORE}"\n'
PLAIN = f'runtime = "crun"\n{PLAIN_BUT_RUNTIME}'
SETTINGS_BUT_RUNTIME = f"""\
[memory]
chunk-size = "1M"
[store]
path = "{STORE}"
"""
SETTINGS = f'runtime = "crun"\n{SETTINGS_BUT_RUNTIME}'


@contextmanager
def empty_store(settings: str = SETTINGS) -> Iterator[Store]:
    """An empty one, which the settings name, gone afterwards."""
    shutil.rmtree(STORE, ignore_errors=True)
    shimhost.write_settings(settings)
    yield Store(STORE)
    shutil.rmtree(STORE, ignore_errors=True)


def gpusnap(*words: str | os.PathLike[str]) -> Done:
    """Run the command."""
    return run(COMMAND, *words)


def done(*words: str | os.PathLike[str]) -> Any:
    """What the command says as JSON that it did; it must succeed."""
    return json.loads(good(gpusnap(*words, "--json")))
