"""What this host's store has of a checkpoint that stands in a registry, where the registry does not give it.

A checkpoint that was pushed from here or pulled is in the store under its reference. Where the registry does
not answer at all, that copy is taken, with a note; where it answers that it has no such thing, or nobody may
see it, or its TLS is not right, the error names the copy.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from gpusnap.checkpoints.locator import InRegistry, InStore, default_store
from gpusnap.checkpoints.names import store_name
from gpusnap.oci.base.errors import OciError, RegistryError, Unreachable
from gpusnap.runtime_shim.errors import GpusnapError
from gpusnap.user_errors import failure, is_tls


def stand_in(place: InRegistry, error: RegistryError) -> InStore | None:
    """The store's copy, to be taken in the place of the registry's; None where it has none.

    Says on stderr that it is taken. Raises `error` in the terms of users, with the copy's name, where it
    should not be taken.
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
    """Raise `error` in the terms of users, with the name of the store's copy, where there is one."""
    found = copy_of(place)
    if found is not None:
        said = failure(error)
        copy = f"this host's store has one with that name: oci:{found.store.path}:{found.wanted}"
        hint = f"{said.hint}; {copy}" if said.hint else copy
        raise type(said)(str(said), hint=hint, code=said.code) from error


def copy_of(place: InRegistry) -> InStore | None:
    """By its name in this host's store, or by the digest in the reference; None where it is not there."""
    with suppress(GpusnapError, OciError):
        store = default_store()
        if os.path.exists(os.path.join(store.path, "oci-layout")):
            wanted = place.reference.digest
            name = store_name(place.reference)
            for entry in store.entries():
                if entry.name == name or (wanted and entry.descriptor.digest == wanted):
                    return InStore(store, entry.name or entry.descriptor.digest)
    return None
