"""Moves GPU memory between processes and blobs."""
