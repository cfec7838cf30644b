"""Checks whether one container can be checkpointed: one family of checks a module."""
