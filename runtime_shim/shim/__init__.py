"""The part of gpusnap-runtime that engines call: the entry, the dispatch, and overrides for one call."""
