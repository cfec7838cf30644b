"""Errors, files, locks and threads: what every part of `oci` uses."""
