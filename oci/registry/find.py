"""Opens a repository with the configuration of this host and its user: mirrors, credentials, and TLS.

Options of a command line are passed in the environment, so that they reach a restore: TLS_VERIFY, and the
file of logins as REGISTRY_AUTH_FILE (gpusnap.oci.registry.credentials).
"""

from __future__ import annotations

import os

from gpusnap.oci.base.environment import TLS_VERIFY
from gpusnap.oci.base.errors import LayoutError, RegistryError
from gpusnap.oci.layout.graph import is_document
from gpusnap.oci.layout.reference import Reference
from gpusnap.oci.registry import credentials as users
from gpusnap.oci.registry.client import Client, lacks_tls
from gpusnap.oci.registry.pace import Limits
from gpusnap.oci.registry.registries_conf import Endpoint, endpoints
from gpusnap.oci.registry.repository import Repository


def repository(
    reference: Reference,
    *,
    plain_http: bool = False,
    mirrors: bool = True,
    limits: Limits | None = None,
) -> Repository:
    """Return the repository of a reference, with its user's credentials.

    plain_http: without TLS; otherwise TLS_VERIFY and registries.conf decide. With `mirrors` it is the first
    of them that has what the reference names, if one has. Raises RegistryError.
    """
    *first, last = endpoints(reference, mirrors=mirrors)
    for mirror in first:
        made = _open(mirror, plain_http=False, limits=limits)
        try:
            if is_document(made.resolve(reference.wanted)):
                return made
        except (RegistryError, LayoutError):
            pass
        except BaseException:
            made.close()
            raise
        # Any error, for example a proxy's page: the next mirror may work.
        made.close()
    return _open(last, plain_http=plain_http, limits=limits)


def _open(at: Endpoint, *, plain_http: bool, limits: Limits | None) -> Repository:
    found = users.find(at.reference.registry, at.reference.repository)
    asked = os.environ.get(TLS_VERIFY, "")
    insecure = not plain_http and (asked == "false" or (at.insecure and asked != "true"))
    if insecure:
        plain_http = lacks_tls(at.reference.registry, limits)
    client = Client(
        at.reference.registry, credentials=found, plain_http=plain_http, verify=not insecure, limits=limits
    )
    return Repository(at.reference, client)
