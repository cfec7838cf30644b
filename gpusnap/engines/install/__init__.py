"""The files that `gpusnap install` writes for each engine, and removes."""
