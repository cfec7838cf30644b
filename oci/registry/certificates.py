"""CAs and client certificates that a host has for single registries (containers-certs.d(5)).

/etc/containers/certs.d/HOST[:PORT]/   the first of these two that exists, as for Podman
/etc/docker/certs.d/HOST[:PORT]/
    *.crt                              CAs, in PEM, that are trusted in addition to the system's
    NAME.cert, NAME.key                a certificate to show to the registry, and its key
"""

from __future__ import annotations

import os
import ssl

from gpusnap.oci.base.errors import RegistryError, reason

FOLDERS = ("/etc/containers/certs.d", "/etc/docker/certs.d")


def folder_of(registry: str) -> str:
    """Return the directory of certificates for a registry, host[:port]; "" if there is none."""
    if not registry or "/" in registry or registry.startswith("."):
        return ""
    found = (os.path.join(folder, registry) for folder in FOLDERS)
    return next((folder for folder in found if os.path.isdir(folder)), "")


def load(context: ssl.SSLContext, folder: str) -> None:
    """Trust the CAs in a directory, and use its certificates. Raises RegistryError."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise RegistryError(
            f"the certificates in {folder} cannot be read: {reason(error)}", code="GPS-805"
        ) from error
    for name in names:
        stem, kind = os.path.splitext(os.path.join(folder, name))
        if kind == ".crt":
            load_ca(context, stem + kind)
        elif kind == ".cert":
            _load_pair(context, stem)


def load_ca(context: ssl.SSLContext, path: str) -> None:
    """Trust the CAs in a PEM file. Raises RegistryError if it cannot be read, or is none."""
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise RegistryError(f"the CA file {path} contains no certificate in PEM", code="GPS-805") from error
    except OSError as error:
        raise RegistryError(f"the CA file {path} cannot be read: {reason(error)}", code="GPS-805") from error


def _load_pair(context: ssl.SSLContext, stem: str) -> None:
    try:
        # An empty password, so that it does not prompt for one.
        context.load_cert_chain(f"{stem}.cert", f"{stem}.key", password="")
    except ssl.SSLError as error:
        raise RegistryError(
            f"{stem}.cert and {stem}.key are not a certificate and its key in PEM", code="GPS-805"
        ) from error
    except OSError as error:
        raise RegistryError(
            f"{stem}.cert and {stem}.key cannot be read: {reason(error)}", code="GPS-805"
        ) from error
