"""What is noted for a gpusnap that is killed, and the files of volumes."""
