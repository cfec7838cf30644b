"""gpusnap-runtime as engines call it: the entry, the dispatch, what one call overrides."""
