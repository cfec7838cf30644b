"""Variables of the environment by which a command says something to what it starts."""

from __future__ import annotations

TLS_VERIFY = "GPUSNAP_TLS_VERIFY"
"""true or false: whether a registry's certificate has to be trusted, before what registries.conf says."""
