"""The formats of a checkpoint: Podman's archive, containerd's image, our own artifact."""
