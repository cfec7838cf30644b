"""The work of `gpusnap restore`: what it restores from, what Podman has already, volumes."""
