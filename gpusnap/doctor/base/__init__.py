"""What every check of `gpusnap doctor` uses."""
