"""What `gpusnap install` writes for each engine, and takes back."""
