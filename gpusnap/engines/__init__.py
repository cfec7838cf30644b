"""Podman and containerd, as their users call them."""
