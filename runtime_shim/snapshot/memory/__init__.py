"""GPU memory on its way between processes and blobs."""
