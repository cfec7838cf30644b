"""Environment variables with which a command passes options to the processes that it starts."""

from __future__ import annotations

TLS_VERIFY = "GPUSNAP_TLS_VERIFY"
"""true or false: whether a registry's certificate must be trusted; overrides registries.conf."""
