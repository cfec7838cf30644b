"""gpusnap-runtime: the OCI runtime shim that checkpoints and restores containers that use GPUs."""
