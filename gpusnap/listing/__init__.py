"""The output of `gpusnap ls`: which checkpoints, in which form."""
