"""Registries (the OCI distribution specification): a client that resumes transfers and mounts blobs."""
