"""Finds this host's copy of a checkpoint in a registry, if the registry does not deliver it.

A checkpoint that was pushed from here or pulled is in the store under its reference. If the registry does not
answer at all, that copy is used, with a note. If it answers that the checkpoint does not exist or may not be
read, or if its TLS is not valid, the error names the copy.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from gpusnap.base.user_errors import failure, is_tls
from gpusnap.checkpoints.locator import InRegistry, InStore, default_store
from gpusnap.checkpoints.names import store_name
from gpusnap.oci.base.errors import OciError, RegistryError, Unreachable
from gpusnap.runtime_shim.base.errors import GpusnapError


def find_offline_copy(place: InRegistry, error: RegistryError) -> InStore | None:
    """Return the store's copy, to be used instead of the registry's; None if it has none.

    Prints a note on stderr that it is used. If it should not be used, raises a user error made of `error`,
    with the copy's name.
    """
    if not isinstance(error, Unreachable) or is_tls(error):
        raise_named(place, error)
        return None
    found = copy_of(place)
    if found is not None:
        newer = "" if place.reference.digest else "; the registry may have a newer one"
        print(
            f"note: {error}; using {found.wanted} from this host's store {found.store.path} instead{newer}",
            file=sys.stderr,
        )
    return found


def raise_named(place: InRegistry, error: RegistryError) -> None:
    """Raise a user error made of `error`, with the name of the store's copy, if there is one."""
    found = copy_of(place)
    if found is not None:
        said = failure(error)
        copy = f"this host's store has one with that name: oci:{found.store.path}:{found.wanted}"
        hint = f"{said.hint}; {copy}" if said.hint else copy
        raise type(said)(str(said), hint=hint, code=said.code) from error


def copy_of(place: InRegistry) -> InStore | None:
    """Find the copy by its name in this host's store, or by the reference's digest; None if there is none."""
    with suppress(GpusnapError, OciError):
        store = default_store()
        if os.path.exists(os.path.join(store.path, "oci-layout")):
            wanted = place.reference.digest
            name = store_name(place.reference)
            for entry in store.entries():
                if entry.name == name or (wanted and entry.descriptor.digest == wanted):
                    return InStore(store, entry.name or entry.descriptor.digest)
    return None
