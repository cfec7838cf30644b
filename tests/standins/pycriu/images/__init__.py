"""The modules that gpusnap imports."""
