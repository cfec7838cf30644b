"""`gpusnap migrate`: a running container moves to another host, its memory ahead of it."""
