"""Common parts of the checks of `gpusnap doctor`."""
