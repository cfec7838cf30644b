"""Checkpoints as files that other tools can read. Nothing here depends on GPUs, CRIU or a runtime."""
