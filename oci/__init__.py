"""Checkpoints as files that other tools read: Podman's archive today. Knows no GPU, no CRIU, no runtime."""
