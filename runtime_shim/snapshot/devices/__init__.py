"""Restores onto other GPUs than at the checkpoint: chooses them, and replaces nodes, mounts and hooks."""
