"""Checks whether this host can checkpoint: one family of checks a module."""
