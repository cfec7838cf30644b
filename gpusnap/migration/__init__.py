"""`gpusnap migrate`: moves a running container to another host, and sends its memory ahead."""
