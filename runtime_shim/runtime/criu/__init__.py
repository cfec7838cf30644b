"""CRIU under the real runtime: how gpusnap configures it, and what it reports."""
