"""Errors, files, locks and threads, used by every part of `oci`."""
