"""What `gpusnap ls` shows: which checkpoints, in which form."""
