"""Calls of Podman and containerd through their commands."""
