"""Registries (the OCI distribution specification): a client that resumes and mounts."""
