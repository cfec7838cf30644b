"""gpusnap: the command that people type."""
